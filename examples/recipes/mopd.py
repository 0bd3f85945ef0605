"""MOPD (arXiv 2601.02780): each domain has a teacher of its own, and one student learns from all of them.

paper: A_t = log p_domain(x)(y_t) - log p_S(y_t), p_domain(x) the teacher of the prompt's domain
ours:  pulls = (pull(score(y)),), score asks the teacher that policy.route names. The paper adds alpha times a reward's
       advantage, as kdrl.py does. `policy: {kind: opd, route: ...}` is this class.
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Mopd:
    class Settings(spot.RoutedSettings):
        pass

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=(spot.pull(scores),))]
