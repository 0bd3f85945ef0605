"""OPD, then reward alone (arXiv 2609.04108), in one run: rewards count once the student is right often enough.

paper: A_t = log p_T(y_t) - log p_S(y_t), and from some iteration on A_t = (R - mean R) / std R
ours:  both are drafted, and `revise` drops one, by what `observe` was told of all iterations before"""

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class OpdThenRl:
    class Settings(spot.PluginSettings):
        samples: int = 8
        enough: float = 0.5  # accuracy of an iteration, after which there is no way back

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, self.is_rl = settings, False
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, samples_per_prompt=settings.samples)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> list[spot.Sample]:
        wrote = await spot.gather(stages.rollout(n=n) for n in range(self.settings.samples))
        asked = [spot.both(stages.verify(each.token_ids), stages.score(each.token_ids, top_k=0)) for each in wrote]
        judged, scored = zip(*await spot.gather(asked), strict=True)
        rewards = map(np.full_like, [s.logprobs for s in scored], spot.group_advantages([j.reward for j in judged]))
        given = zip(wrote, judged, scored, rewards, [(spot.pull(each),) for each in scored], strict=True)
        return [spot.student_sample(prompt, stages, *of, advantages=a, pulls=pulls) for *of, a, pulls in given]

    def revise(self, batch: spot.LiveBatch) -> list[spot.Sample]:
        dropped = {"pulls": ()} if self.is_rl else {"advantages": None}
        return [spot.revised(each, {"opd_then_rl/is_rl": float(self.is_rl)}, **dropped) for each in batch.samples]

    def observe(self, report: spot.IterationReport) -> None:
        self.is_rl = self.is_rl or report.metrics.get("rollout/accuracy", 0.0) >= self.settings.enough

    def state_dict(self) -> dict[str, bool]:
        return {"is_rl": self.is_rl}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.is_rl = state["is_rl"]
