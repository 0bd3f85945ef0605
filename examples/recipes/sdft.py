"""SDFT (arXiv 2601.19897): the frozen student, which was shown a demonstration c, teaches the student, which was not.

paper: mean over t of KL(p(. | x, y_<t) || p(. | c, x, y_<t)), reverse KL on the student's y
ours:  compared(score(y, prompt_ids=teacher_prompt(x, c, x)), reverse_kl()); c is the problem's solution
"""

from collections.abc import Iterable, Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Sdft:
    class Settings(spot.PluginSettings):
        top_k: int = 32
        context_tokens: int = 2048  # the longest prompt with a demonstration

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_top_k_key="top_k",
            teacher_prompt_tokens=settings.context_tokens,
            outcomes=False,
            term_bytes_per_token=spot.row_bytes(settings.top_k),
        )

    def check(self, prompts: Iterable[spot.Prompt]) -> None:
        if missing := [prompt.problem.id for prompt in prompts if not prompt.problem.solution]:
            raise spot.ConfigError(f"problem {missing[0]!r} has no solution to show; give data.train.fields.solution")

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout, turns = await stages.rollout(), prompt.turns()
        demonstration = spot.ChatTurn(role="assistant", content=prompt.problem.solution or "")
        shown, y = stages.teacher_prompt(*turns, demonstration, turns[-1]), rollout.token_ids
        score = stages.score(y, top_k=self.settings.top_k, prompt_ids=shown)
        scores, judgement = await spot.both(score, stages.verify(y))
        targets = spot.compared(scores, spot.reverse_kl())
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=(targets,))]
