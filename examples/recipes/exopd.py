"""ExOPD, the extrapolation of G-OPD (arXiv 2602.12125): beyond the teacher, away from where the student began.

paper: A_t = lambda (log p_T(y_t) - log p_ref(y_t)) - (log p_S(y_t) - log p_ref(y_t)), lambda > 1
ours:  pulls = (pull(score(y), lambda), pull(reference_logprobs(y), 1 - lambda)); never one pull of a blend of both,
       which is no log-probability
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class ExOpd:
    class Settings(spot.PluginSettings):
        extrapolation: float = 1.25  # lambda

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(
            teacher_top_k=1, asked_top_k=0, reference=True, outcomes=False, term_bytes_per_token=8
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        (scores, reference), judgement = await spot.both(
            spot.both(stages.score(y, top_k=0), stages.reference_logprobs(y)), stages.verify(y)
        )
        weight = self.settings.extrapolation
        pulls = (spot.pull(scores, weight), spot.pull(reference, 1 - weight))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=pulls)]
