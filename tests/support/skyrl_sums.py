"""An environment of SkyRL's gym as a run's `environment.object`. Its `step` is taken as it is."""

from __future__ import annotations

from typing import Any

import skyrl_gym


class GradeSchool:
    """Several turns of a problem of grade-school mathematics."""

    def reset(self, answer: str, **row: Any) -> None:
        extras = {"reward_spec": {"ground_truth": answer}, "max_turns": 3}
        self._environment = skyrl_gym.make("gsm8k_multi_turn", extras=extras)

    def step(self, action: str) -> Any:
        return self._environment.step(action)
