"""PACED (arXiv 2603.11178): distil most where the student is neither sure to fail nor sure to succeed.

paper: w(p) L_OPD, w(p) = p (1 - p), p the student's pass rate on the problem
ours:  pulls = (pull(score(y), p (1 - p)),), p the pass rate of the prompt's own group
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Paced:
    class Settings(spot.PluginSettings):
        samples: int = 8

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, samples_per_prompt=settings.samples)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        async def attempt(n: int) -> tuple[spot.Generation, spot.Judgement, spot.TokenScores]:
            rollout = await stages.rollout(n=n)
            y = rollout.token_ids
            scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
            return rollout, judgement, scores

        group = await spot.gather(attempt(n) for n in range(self.settings.samples))
        passed = [judgement.verdict.reward for _, judgement, _ in group if judgement.verdict.reward is not None]
        rate = sum(passed) / max(1, len(passed))
        samples = [
            spot.student_sample(prompt, stages, *answers, pulls=(spot.pull(answers[-1], rate * (1 - rate)),))
            for answers in group
        ]
        if passed:
            return samples
        why = {"left_out": "verifier: no verdict in the group"}
        return [spot.Sample(supervision=None, metrics=each.metrics, record=each.record | why) for each in samples]
