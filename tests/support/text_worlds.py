"""Environments that read text, for runs of the running sum's models: their answers are sums."""

from __future__ import annotations

import time
from typing import Any


class Again:
    """Asks for another sum, and ends with the second answer."""

    def reset(self, **row: Any) -> str:
        self.turns = 0
        return "1+1"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"{self.turns}+2=", 0.5, self.turns >= 2


class Slow(Again):
    """Takes its time, so that a run has turns in flight whenever it ends."""

    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(0.2)
        return super().step(action)


class Once(Again):
    """Ends with the first answer, which is worth a quarter."""

    def reset(self, **row: Any) -> str:
        return "2+2"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "3+3=", 0.25, True


class Told(Again):
    """Says a column of the problem's row."""

    def reset(self, tier: str, **row: Any) -> str:
        super().reset()
        return f"{len(tier)}+{len(row)}"


class Moody(Again):
    """Says something of a problem that depends on more than the problem."""

    def reset(self, seed: int, **row: Any) -> str:
        super().reset()
        return f"{seed}+1"


class Timely(Again):
    """Answers by the clock."""

    def step(self, action: str) -> tuple[str, float, bool]:
        return f"{time.time_ns() % 10**9}+2=", *super().step(action)[1:]
