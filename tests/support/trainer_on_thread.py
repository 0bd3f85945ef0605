"""Runs a trainer's only rank on a thread of this process, for tests that are about what it trains and not its process.

It is given its batches over its socket, as always. This saves the seconds in which a rank of its own would import torch
and transformers. `trainer/test_process.py` and the drills test real processes.
"""

from __future__ import annotations

import asyncio
import contextlib

import torch
import zmq

from spot_async.base.tasks import Opened
from spot_async.errors import ProcessDiedError
from spot_async.trainer.feed import BatchFeed
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.parallel import strategy_of
from spot_async.trainer.rank import StudentTrainer, train_batches


class RankOnThread(Opened):
    """In place of a trainer's `RankProcesses`."""

    def __init__(self, trainer: TrainerProcess, channel_directory: str) -> None:
        settings = self._settings = trainer.settings
        assert (settings.training.ranks, settings.training.sharding) == (1, "none"), "needs processes of its own"
        self.log_path = settings.save().parent / "logs" / "trainer.log"
        self.log_path.parent.mkdir(exist_ok=True)
        self.log_path.write_text("trained by a thread of the test\n")
        self._channel_directory = channel_directory
        self._context = zmq.Context.instance()  # of the rank's socket

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        # The student is loaded here, since transformers cannot load two models at a time, and servers load theirs here.
        student = StudentTrainer(self._settings, strategy_of(self._settings.training), torch.device("cpu"))
        feed = BatchFeed(self._channel_directory, rank=0, step=student.step)
        stack.push_async_callback(self._stop)
        self._rank = asyncio.create_task(asyncio.to_thread(_train, student, feed))

    async def watch(self) -> None:
        await asyncio.wait({self._rank})
        if said := self._rank.result():
            raise ProcessDiedError(f"the trainer's thread ended: {said} (log: {self.log_path})")

    async def _stop(self) -> None:
        """Interrupt the rank, which waits for a message or is about to send one."""
        await asyncio.to_thread(self._context.term)
        await asyncio.wait({self._rank})


def _train(student: StudentTrainer, feed: BatchFeed) -> str:
    """Train until the context of the feed's socket ends. Return the error that ended it before, if any."""
    try:
        with contextlib.suppress(zmq.ContextTerminated):
            train_batches(student, feed)
    except Exception as error:  # noqa: BLE001 - whatever would have ended the process
        return repr(error)
    finally:
        assert feed._socket is not None
        feed._socket.close(linger=0)  # else the context would wait for it
    return ""


def make(trainer: TrainerProcess, channel_directory: str) -> RankOnThread:
    """Make a rank on a thread, in place of `TrainerProcess._make_ranks`."""
    return RankOnThread(trainer, channel_directory)
