"""Saves the trainer's state beside the loop: one checkpoint at a time, while training goes on.

It does not decide when one is due, nor what makes it count: that is what the run's `Checkpoints` do.
"""

from __future__ import annotations

import asyncio

import structlog

from spot_async.loop.resuming import Checkpoints
from spot_async.protocols import Trainer


class StateSaver:
    """Saves when asked to. `begin` is always followed by `finish`, which may run beside what comes next."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints | None, step: int) -> None:
        """`step` is that of the newest checkpoint. Without `checkpoints` nothing is ever saved."""
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._saved_step = step
        self._idle = asyncio.Event()
        self._idle.set()

    def is_due(self, step: int) -> bool:
        return self._checkpoints is not None and self._checkpoints.is_due(step)

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    async def begin(self, step: int) -> None:
        """Let the trainer begin to save its state, which is that after `step` steps. It may train on at once."""
        assert self._checkpoints is not None
        await self._idle.wait()
        self._idle.clear()
        await self._trainer.save(step, self._checkpoints.directory(step))

    async def finish(self, step: int) -> None:
        """Wait until it is saved, and make it count. All else that a run going on from there needs is on disk."""
        assert self._checkpoints is not None
        seconds = await self._trainer.saved(step)
        await self._checkpoints.commit(step)
        structlog.get_logger().info("checkpoint", step=step, saved_s=seconds)
        self._saved_step = step
        self._idle.set()

    def lacks(self, step: int) -> bool:
        """Return whether the state after `step` steps would have to be saved. It may be on its way."""
        return self._checkpoints is not None and step > self._saved_step

    async def bring_up_to(self, step: int) -> None:
        """Save what the trainer stands at, unless that is saved."""
        await self._idle.wait()
        if self.lacks(step):
            await self.begin(step)
            await self.finish(step)
