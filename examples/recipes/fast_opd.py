"""Fast OPD (arXiv 2602.15260): OPD on beginnings of responses, and nothing is sampled beyond them.

paper: OPD on y_1..y_L, where sampling stops; L the same, or longer and longer
ours:  pull(score(y)), y = rollout(max_tokens=L), L by the prompt's iteration
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class FastOpd:
    class Settings(spot.PluginSettings):
        first: int = 16  # L at the start, in tokens
        last: int = 64  # at the end

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.first, self.more = settings.first, settings.last - settings.first
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        length = self.first + round(self.more * prompt.progress)
        y = (rollout := await stages.rollout(max_tokens=length)).token_ids
        scores = await stages.score(y, top_k=0)
        unknown = spot.Judgement(spot.Verdict.UNJUDGED)  # a beginning is neither right nor wrong
        sample = spot.student_sample(prompt, stages, rollout, unknown, scores, pulls=(spot.pull(scores),))
        sample.metrics["fast_opd/tokens"] = float(length)
        return [sample]
