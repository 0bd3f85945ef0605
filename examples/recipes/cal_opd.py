"""Cal-OPD (arXiv 2609.21619): how the teacher wavers when it is told of a good or a bad answer is nothing to learn.

paper: A_t = max(d_t - lambda f_t, 0) - max(-d_t - lambda r_t, 0),  d_t = log p_T(y_t) - log p_S(y_t),  f_t and r_t: how
       far log p_T(y_t) falls, and rises, behind either of two words on the answer
ours:  d = difference(pull(score(y)), live) of the student in training, and of score(y, prompt_ids=each word) likewise
"""

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class CalOpd:
    class Settings(spot.PluginSettings):
        words: tuple[str, str] = ("The answer below is right.", "The answer below is wrong.")
        width: float = 5.0  # lambda
        context_tokens: int = 4096  # the longest prompt with such words

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, asked = settings, {"teacher_prompt_tokens": settings.context_tokens, "scores_per_prompt": 3}
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False, term_bytes_per_token=16, **asked)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> list[spot.Sample]:
        y = (rollout := await stages.rollout()).token_ids
        read = [stages.teacher_prompt(*prompt.turns(word)) for word in self.settings.words]
        asked = spot.gather(stages.score(y, top_k=0, prompt_ids=ids) for ids in (None, *read))
        scored, judgement = await spot.both(asked, stages.verify(y))
        pulls = tuple(map(spot.pull, scored))
        return [spot.student_sample(prompt, stages, rollout, judgement, scored[0], pulls=pulls)]

    def revise(self, batch: spot.LiveBatch) -> list[spot.Sample]:
        samples, width = [], self.settings.width
        for sample, live in zip(batch.samples, batch.live, strict=True):
            d, *told = (spot.difference(pull, live) for pull in sample.supervision.pulls)
            lowest, highest = np.minimum(d, np.min(told, axis=0)), np.maximum(d, np.max(told, axis=0))
            a = np.maximum(d - width * (d - lowest), 0) - np.maximum(-d - width * (highest - d), 0)
            samples.append(spot.revised(sample, {"cal_opd/kept": float((a != 0).mean())}, pulls=(), advantages=a))
        return samples
