"""DistiLLM-2 (arXiv 2503.07067): one divergence raises what the teacher writes, another lowers what the student writes.

paper: (2 - b) KL(p_T, a p_T + (1 - a) p_S) on the teacher's y + b KL(p_S, a p_S + (1 - a) p_T) on the student's y,
       b from 1 to 1.5 in the first half of the run
ours:  compared(score(y), skew(a), weight=2 - b) and compared(score(y), reverse_skew(a), weight=b), their mean. The
       paper's a also adapts to each response; what the student writes is of now, where the paper's is of each epoch
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Distillm2:
    class Settings(spot.PluginSettings):
        top_k: int = 32
        alpha: float = 0.1

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, k = settings, settings.top_k
        asked = {"teacher_top_k": k, "teacher_responses": 1, "samples_per_prompt": 2, "scores_per_prompt": 2}
        self.needs = spot.PolicyNeeds(outcomes=False, term_bytes_per_token=spot.row_bytes(k), **asked)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        alpha, b = self.settings.alpha, 1 + min(0.5, prompt.progress)

        async def taught(writing, divergence: spot.Divergence, weight: float) -> spot.Sample:
            y = (response := await writing).token_ids
            scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
            targets = spot.compared(scores, divergence, weight=weight)
            return spot.student_sample(prompt, stages, response, judgement, scores, soft_targets=(targets,))

        theirs = taught(stages.teacher_response(), spot.skew(alpha), 2 - b)
        return await spot.both(theirs, taught(stages.rollout(), spot.reverse_skew(alpha), b))
