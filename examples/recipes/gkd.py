"""GKD (arXiv 2306.13649): a share of the responses is the student's, the rest the teacher's; one divergence on both.

paper: mean over t of JSD(beta)(p_T(. | y_<t) || p_S(. | y_<t)), y the student's with probability lambda
ours:  a coin of the prompt's own chooses rollout() or teacher_response(), and compared(score(y), jsd(beta)) teaches
"""

import random
from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Gkd:
    class Settings(spot.PluginSettings):
        top_k: int = 32
        beta: float = 0.5
        student_share: float = 0.5  # lambda

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, self.seed = settings, context.run_seed
        self.needs = spot.PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_top_k_key="top_k",
            teacher_responses=1,
            outcomes=False,
            term_bytes_per_token=spot.row_bytes(settings.top_k),
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        is_own = random.Random(f"{self.seed} {prompt.ordinal}").random() < self.settings.student_share
        response = await (stages.rollout() if is_own else stages.teacher_response())
        y = response.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
        targets = spot.compared(scores, spot.jsd(self.settings.beta))
        sample = spot.student_sample(prompt, stages, response, judgement, scores, soft_targets=(targets,))
        sample.metrics["gkd/student_share"] = float(is_own)
        return [sample]
