"""SG-OPD (arXiv 2606.09304): a verdict says which of the teacher's words to trust, and which responses to begin with.

paper: A_t = g_t d_t,  d_t = log p_T(y_t) - log p_S(y_t),  g_t = lambda where d_t has the verdict's sign, beta elsewhere
ours:  weighted(pull(score(y)), g), d of the student in training; at first, of a right teacher's response: written(y)"""

import random

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class SgOpd:
    class Settings(spot.PluginSettings):
        gates: tuple[float, float] = (1.8, 1.0)  # lambda > 1, beta <= 1
        teacher_share: float = 0.5  # of the first responses, where it is right; none after a fifth of the run

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, self.seed, size = settings, context.run_seed, spot.row_bytes(1)
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, teacher_responses=1, term_bytes_per_token=size)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> list[spot.Sample]:
        share = self.settings.teacher_share * (1 - 5 * prompt.progress)
        if random.Random(f"{self.seed} {prompt.ordinal}").random() < share:
            y = (shown := await stages.teacher_response()).token_ids
            if (judged := await stages.verify(y)).verdict is spot.Verdict.CORRECT:
                return [spot.student_sample(prompt, stages, shown, judged, soft_targets=(spot.written(shown),))]
        y = (rollout := await stages.rollout()).token_ids
        scores, judged = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        return [spot.student_sample(prompt, stages, rollout, judged, scores, pulls=(spot.pull(scores),))]

    def revise(self, batch: spot.LiveBatch) -> list[spot.Sample]:
        return [spot.revised(s, pulls=self.gated(s, live)) for s, live in zip(batch.samples, batch.live, strict=True)]

    def gated(self, sample: spot.Sample, live: spot.Live) -> tuple:
        sign = 2 * sample.metrics.get("rollout/accuracy", 0.5) - 1  # the verdict's; 0 without one
        agreed = [sign * spot.difference(pull, live) > 0 for pull in sample.supervision.pulls]
        weights = [np.where(each, *self.settings.gates) for each in agreed]
        return tuple(map(spot.weighted, sample.supervision.pulls, weights))
