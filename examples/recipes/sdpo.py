"""SDPO (arXiv 2601.20802): the student, told what was right, teaches itself on its own attempts.

paper: mean over t of KL(p(. | x, y_<t) || p'(. | x, f, y_<t)), f a right attempt of the group and the judge's words
ours:  compared(score(y, prompt_ids=teacher_prompt(x f)), reverse_kl()); p' is the self that `teacher.follows` says
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Sdpo:
    class Settings(spot.PluginSettings):
        samples: int = 8
        top_k: int = 32
        context_tokens: int = 4096  # the longest prompt with an attempt

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_prompt_tokens=settings.context_tokens,
            samples_per_prompt=settings.samples,
            term_bytes_per_token=spot.row_bytes(settings.top_k),
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollouts = await spot.gather(stages.rollout(n=n) for n in range(self.settings.samples))
        judgements = await spot.gather(stages.verify(each.token_ids) for each in rollouts)
        group = list(zip(rollouts, judgements, strict=True))

        async def taught(rollout: spot.Generation, judged: spot.Judgement) -> spot.Sample:
            right = [y.token_ids for y, found in group if y is not rollout and found.verdict is spot.Verdict.CORRECT]
            shown = stages.teacher_prompt(*prompt.turns(*map(stages.decode, right[:1]), judged.feedback))
            scores = await stages.score(rollout.token_ids, top_k=self.settings.top_k, prompt_ids=shown)
            targets = spot.compared(scores, spot.reverse_kl())
            return spot.student_sample(prompt, stages, rollout, judged, scores, soft_targets=(targets,))

        return await spot.gather(taught(*each) for each in group)
