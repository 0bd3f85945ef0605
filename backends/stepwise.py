"""Long computations on the event loop, one step a turn, so that nothing else waits for more than a step.

Reading megabytes of JSON in a thread would not help: it holds the interpreter's lock all the while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]  # yields between its steps and returns the result


class StepRunner:
    """Runs computations in the order they come, one at a time."""

    def __init__(self) -> None:
        self._busy = asyncio.Lock()

    async def run(self, steps: Steps[T]) -> T:
        async with self._busy:
            while True:
                await asyncio.sleep(0)
                try:
                    next(steps)
                except StopIteration as done:
                    result: T = done.value
                    return result


def run_at_once(steps: Steps[T]) -> T:
    """The result of a computation that is short after all."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
