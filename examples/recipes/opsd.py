"""OPSD (arXiv 2601.18734): the frozen student, which reads the solution, teaches the student, which does not.

paper: mean over t of D(p(. | x, y*, y_<t) || p(. | x, y_<t)), forward KL, each token's summand at most 0.05
ours:  compared(score(y), forward_kl(clip=0.05)); the teacher is the student's directory, and `prompt.teacher.text`
       names the solution y*. The vocabulary is the teacher's top-k and one cell for all other tokens.
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Opsd:
    class Settings(spot.PluginSettings):
        top_k: int = 32
        clip: float = 0.05

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_top_k_key="top_k",
            outcomes=False,
            term_bytes_per_token=spot.row_bytes(settings.top_k),
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
        targets = spot.compared(scores, spot.forward_kl(clip=self.settings.clip))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=(targets,))]
