"""Uni-OPD (arXiv 2605.03677): as many right responses as wrong ones, which the teacher's sums put in that order.

paper: A_t = d_t + max(0, delta - m) of right y, d_t of wrong y;  d_t = log p_T(y_t) - log p_S(y_t), m = the mean of d_t
       over a group's right y less that over its wrong y, each y alike. Of a group with both, as many of each
ours:  pulls = (pull(score(y)),), advantages = max(0, delta - m) of right y, m of the student in training"""

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class UniOpd:
    class Settings(spot.PluginSettings):
        samples: int = 8
        margin: float = 0.4  # delta, nats

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.n, self.margin, room = settings.samples, settings.margin, {"term_bytes_per_token": 4}
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, samples_per_prompt=self.n, **room)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> list[spot.Sample]:
        ys = await spot.gather(stages.rollout(n=n) for n in range(self.n))
        judged = await spot.gather(stages.verify(y.token_ids) for y in ys)
        right, wrong = ([n for n, each in enumerate(judged) if each.verdict.reward == reward] for reward in (1, 0))
        kept = [n for both in zip(right, wrong, strict=False) for n in both] or right + wrong or range(self.n)
        scored = await spot.gather(stages.score(ys[n].token_ids, top_k=0) for n in kept)
        given = [(ys[n], judged[n], scores) for n, scores in zip(kept, scored, strict=True)]
        return [spot.student_sample(prompt, stages, *each, pulls=(spot.pull(each[-1]),)) for each in given]

    def revise(self, batch: spot.LiveBatch) -> list[spot.Sample]:
        ordinals = np.array([sample.supervision.prompt_ordinal for sample in batch.samples])
        right = np.array([sample.metrics.get("rollout/accuracy") == 1 for sample in batch.samples])
        gaps = list(map(spot.difference, [sample.supervision.pulls[0] for sample in batch.samples], batch.live))
        means, samples = np.array([gap.mean() for gap in gaps]), []
        for sample, gap, ordinal, is_right in zip(batch.samples, gaps, ordinals, right, strict=True):
            rights, wrongs = (means[(ordinals == ordinal) & (right == side)] for side in (True, False))
            m = rights.mean() - wrongs.mean() if is_right and len(wrongs) else self.margin
            samples.append(spot.revised(sample, advantages=np.full_like(gap, max(0.0, self.margin - m))))
        return samples
