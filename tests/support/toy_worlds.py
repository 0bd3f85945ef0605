"""Environments for tests. Workers import them, under other interpreters and as other users too."""

from __future__ import annotations

import os
import random
import tempfile
import time
from typing import Any, Literal, Optional

tempfile.gettempdir()  # finds the directory once, before there are episodes


class Toys:
    """Tools that count, and one that runs code in the episode's own process, as nobody should have."""

    def __init__(self, log: str = "", start: int = 0) -> None:
        self.log = log
        self.total = start

    def reset(self, problem: str, seed: int) -> str:
        return f"{problem}, seed {seed}, {random.randrange(10**6)}"

    def count(self, by: int = 1) -> int:
        """Add to the total.

        Args:
            by: how much
        """
        self.total += by
        return self.total

    def pick(self, kind: Literal["json", "list", "none"], names: Optional[list[str]] = None) -> Any:  # noqa: UP045
        """Return a value of a kind.

        Args:
            kind: which one
            names: what it holds
        """
        return {"json": {"names": names}, "list": names, "none": None}[kind]

    def run(self, code: str) -> Any:
        """Run code.

        Args:
            code: the code
        """
        space: dict[str, Any] = {"self": self}
        exec(code, space)
        return space.get("out", "")

    async def wait(self) -> str:
        """Wait for nothing."""
        return "waited"

    def get_reward(self) -> float:
        return self.total / 4

    def _close(self) -> None:
        if self.log:
            with open(self.log, "a") as file:  # noqa: PTH123
                file.write("closed\n")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def dice() -> str:
    """Return what is never the same."""
    return os.urandom(4).hex()


def undescribed(item: str) -> str:
    """Has no word for its argument."""
    return item


def silent() -> str:
    return ""


def untyped(item) -> str:  # type: ignore[no-untyped-def]
    """Has no type.

    Args:
        item: something
    """
    return str(item)


class Walk:
    """A world that reads text. It answers in the shape that it is made with."""

    def __init__(self, shape: str = "gymnasium") -> None:
        self.shape = shape
        self.at = 0

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, Any]]:
        return f"at {self.at}", {"seed": seed}

    def step(self, action: str) -> Any:
        self.at += {"left": -1, "right": 1}[action]
        seen, reward, done = f"at {self.at}", float(self.at), self.at == 2
        return {
            "gymnasium": (seen, reward, False, done, {}),
            "short": (seen, reward, done),
            "old": (seen, reward, done, {"truncated": True}),
            "mapping": {"observation": seen, "reward": reward, "done": done},
            "messages": {"observations": [{"role": "user", "content": seen}], "reward": reward, "done": done},
            "nothing": "only text, which is no step",
            "infinite": (seen, float("inf"), done),
        }[self.shape]


class Faulty:
    """Fails where an environment must not."""

    def __init__(self, where: str) -> None:
        self.where = where

    def reset(self) -> None:
        if self.where == "reset":
            raise ValueError("no\nrow")
        if self.where == "hang":
            time.sleep(600)
        if self.where == "exit":
            os._exit(0)

    def touch(self) -> str:
        """Do nothing."""
        return ""

    @property
    def reward(self) -> Any:
        return {"reward": "much", "nan": float("nan"), "fine": 0.5}[self.where]
