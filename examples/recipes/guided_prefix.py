"""TrOPD's guidance (arXiv 2606.01249): the student continues what the teacher began, and imitates the beginning.

paper: y = (y_T[:L], y_S), y_S the student's after the teacher's first L tokens; forward KL on the prefix, OPD after it
ours:  joined(teacher_response(max_tokens=L), rollout(prefix)); compared(score(y), forward_kl(), where=prefix), and
       pull(score(y)), which is masked by itself where no student sampled. TrOPD's regions of trust are not here.
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class GuidedPrefix:
    class Settings(spot.PluginSettings):
        top_k: int = 16
        prefix_tokens: int = 16  # L

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_top_k_key="top_k",
            teacher_responses=1,
            outcomes=False,
            term_bytes_per_token=spot.row_bytes(settings.top_k),
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        prefix = await stages.teacher_response(max_tokens=self.settings.prefix_tokens)
        response = spot.joined(prefix, await stages.rollout(prefix_ids=prefix.token_ids))
        y = response.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
        guidance = spot.compared(scores, spot.forward_kl(), where=np.arange(len(y)) < len(prefix.token_ids))
        terms = {"pulls": (spot.pull(scores),), "soft_targets": (guidance,)}
        return [spot.student_sample(prompt, stages, response, judgement, scores, **terms)]
