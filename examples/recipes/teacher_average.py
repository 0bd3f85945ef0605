"""An average of teachers, the ensemble of Hinton et al. (arXiv 1503.02531), on the student's own responses.

paper: KL(sum_j w_j p_j, p_S), the mean of the teachers' distributions; its gradient is that of sum_j w_j KL(p_j, p_S)
ours:  compared(score(y, teacher=j), forward_kl(), weight=w_j) for each j of stages.teachers
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class TeacherAverage:
    class Settings(spot.PluginSettings):
        top_k: int = 16

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.k = settings.top_k
        rows = max(1, len(context.teachers)) * spot.row_bytes(self.k)
        self.needs = spot.PolicyNeeds(
            teachers=context.teachers, teacher_top_k=self.k, outcomes=False, term_bytes_per_token=rows
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        asked = (stages.score(y, top_k=self.k, teacher=name) for name in stages.teachers)
        found, judgement = await spot.both(spot.gather(asked), stages.verify(y))
        scores = dict(zip(stages.teachers, found, strict=True))
        targets = tuple(
            spot.compared(scores[name], spot.forward_kl(), top_k=self.k, weight=share)
            for name, share in stages.teachers.items()
        )
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=targets)]
