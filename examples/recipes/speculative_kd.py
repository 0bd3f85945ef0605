"""Speculative KD (arXiv 2410.11325): the teacher replaces tokens that it ranks low, and the student continues.

paper: y_t is the student's if it is in the teacher's top-K, and else the teacher's; mean over t of D(p_T || p_S) on y
ours:  joined(kept, teacher_response(kept, max_tokens=1), rollout(kept)), at most `replacements` times a response, and
       compared(score(y), forward_kl()) on all of it
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class SpeculativeKd:
    class Settings(spot.PluginSettings):
        top_k: int = 32
        accepted: int = 25  # the lowest rank that the student's token may have
        replacements: int = 3

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, k, rounds = settings, settings.top_k, 1 + settings.replacements
        self.needs = spot.PolicyNeeds(
            teacher_top_k=k, teacher_responses=1, rounds=rounds, outcomes=False, term_bytes_per_token=spot.row_bytes(k)
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        response, start = await stages.rollout(), 0
        for left in reversed(range(self.needs.rounds)):
            y = response.token_ids
            scores = await stages.score(y, top_k=self.settings.top_k)
            accepted = scores.topk_ids[:, : self.settings.accepted]
            unlikely = scores.known_rows & (accepted != y[:, None]).all(axis=1)
            low = [t for t in range(start, len(y)) if unlikely[t]]  # what the teacher wrote stays
            if not low or not left:
                break
            kept = spot.first_tokens(response, low[0])
            kept = spot.joined(kept, await stages.teacher_response(prefix_ids=kept.token_ids, max_tokens=1))
            response, start = spot.joined(kept, await stages.rollout(prefix_ids=kept.token_ids)), low[0] + 1
        judgement, targets = await stages.verify(y), spot.compared(scores, spot.forward_kl())
        return [spot.student_sample(prompt, stages, response, judgement, scores, soft_targets=(targets,))]
