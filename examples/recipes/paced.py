"""PACED (arXiv 2603.11178): distil most where the student is neither sure to fail nor sure to succeed.

paper: w(p) L, w(p) = p (1 - p), p the student's pass rate on the problem; L the forward KL, and later the reverse one
ours:  compared(score(y), forward_kl(), p (1 - p)), later pull(score(y), p (1 - p)); p of the prompt's group, as sampled
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Paced:
    class Settings(spot.PluginSettings):
        samples: int = 8
        top_k: int = 16
        reverses_from: float = 0.5  # of the iterations

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, k = settings, settings.top_k
        sizes = {"samples_per_prompt": settings.samples, "term_bytes_per_token": spot.row_bytes(k)}
        self.needs = spot.PolicyNeeds(teacher_top_k=k, **sizes)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        async def attempt(n: int) -> tuple:
            y = (rollout := await stages.rollout(n=n)).token_ids
            return rollout, *await spot.both(stages.verify(y), stages.score(y, top_k=self.settings.top_k))

        group = await spot.gather(attempt(n) for n in range(self.settings.samples))
        passed = [judged.verdict.reward for _, judged, _ in group if judged.verdict.reward is not None]
        w, kl = (rate := sum(passed) / max(1, len(passed))) * (1 - rate), spot.forward_kl()
        terms = [{"pulls": (spot.pull(s, w),), "soft_targets": (spot.compared(s, kl, weight=w),)} for *_, s in group]
        drafts = [spot.student_sample(prompt, stages, *a, **own) for a, own in zip(group, terms, strict=True)]
        why = {"left_out": "verifier: no verdict in the group"}
        left = [spot.Sample(supervision=None, metrics=each.metrics, record=each.record | why) for each in drafts]
        return drafts if passed else left

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        others = {"pulls": ()} if batch.progress < self.settings.reverses_from else {"soft_targets": ()}
        return [spot.revised(sample, **others) for sample in batch.samples]
