"""RLSD (arXiv 2604.03128): the reward says in which direction, the privileged self how far.

paper: A_t = A_group clip(exp(sign(A_group) d_t), 1 - e, 1 + e), d_t = log p(y_t | x, y*, y_<t) - log p(y_t | x, y_<t)
ours:  d_t of the student in training behind x, and of its frozen self, which the paper has live, behind the solution
"""

from collections.abc import Iterable, Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Rlsd:
    class Settings(spot.PluginSettings):
        samples: int = 8
        clip: float = 0.2  # e

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.n, self.e = settings.samples, settings.clip
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, samples_per_prompt=self.n)

    def check(self, prompts: Iterable[spot.Prompt]) -> None:
        if any(prompt.teacher_ids is None for prompt in prompts):
            raise spot.ConfigError("prompt.teacher.text: RLSD compares two contexts; give one that names {solution}")

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        ys = await spot.gather(stages.rollout(n=n) for n in range(self.n))
        asked = (spot.both(stages.verify(y.token_ids), stages.score(y.token_ids, top_k=0)) for y in ys)
        said = await spot.gather(asked)
        advantages = spot.group_advantages([judgement.reward for judgement, _ in said])
        pulls = [(spot.pull(scores, a),) for (_, scores), a in zip(said, advantages, strict=True)]
        return [spot.student_sample(prompt, stages, y, *w, pulls=p) for y, w, p in zip(ys, said, pulls, strict=True)]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        pulls = [spot.weighted(sample.supervision.pulls[0], 1.0) for sample in batch.samples]  # weighted with A_group
        d = [np.sign(p.weights) * spot.difference(p, live) for p, live in zip(pulls, batch.live, strict=True)]
        a = [p.weights * np.exp(each).clip(1 - self.e, 1 + self.e) for p, each in zip(pulls, d, strict=True)]
        return [spot.revised(s, pulls=(), advantages=own) for s, own in zip(batch.samples, a, strict=True)]
