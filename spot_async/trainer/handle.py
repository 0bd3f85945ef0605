"""The orchestrator's end of the trainer: starts the ranks, sends batches, answers with new weights.

Holds no tensors and does not import torch. What is said is `messages.py`; who says it on the other
side is `feed.py`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

import zmq
import zmq.asyncio

from spot_async import wire
from spot_async.errors import ProcessDiedError, TrainerError
from spot_async.processes import ChildProcess
from spot_async.trainer.messages import Accepted, Answer, Batch, Failure, Ready, Trained, decode_answer, endpoint
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import Supervision, TrainReport

ACKNOWLEDGEMENT_TIMEOUT_S = 10.0


class TrainerProcess:
    """The trainer of a run, as an async context manager. Entering waits until all ranks are ready.

    Implements `protocols.Trainer`. Every error of it is a `TrainerError`; after one, leave.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            # Private (mode 0700) and short: a Unix socket's path must fit in 108 bytes.
            channel_directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="spot-trainer-"))
            context = stack.enter_context(zmq.asyncio.Context())
            self._socket = stack.enter_context(context.socket(zmq.PAIR))
            self._socket.linger = 0
            self._socket.bind(endpoint(channel_directory))
            self._child = await self._start(channel_directory)
            stack.push_async_callback(self._child.stop)
            await self._await_ready()
            self._resources = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._resources.aclose()

    async def watch(self) -> None:
        """Run for as long as the trainer lives; raise `ProcessDiedError` when it ends by itself."""
        await self._child.watch()

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        """Train on one batch; returns once the new weights are published.

        Iterations count from 0; the same one sent again is answered again, not trained again. Raises
        `TrainerError` when a rank stopped (non-finite loss, full disk, killed) or took too long.
        """
        timeout_s = self._settings.training.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer_to(Batch(iteration, tuple(batch)))
        except TimeoutError:
            raise TrainerError(
                f"iteration {iteration} was not trained within training.step_timeout_s={timeout_s:g} "
                f"(log: {self._child.log_path})"
            ) from None

    async def _start(self, channel_directory: str) -> ChildProcess:
        settings_path = self._settings.save()
        return await ChildProcess.start(
            "trainer",
            [sys.executable, "-m", "spot_async.trainer.launcher", str(settings_path), channel_directory],
            log_path=settings_path.parent / "logs" / "trainer.log",
        )

    async def _await_ready(self) -> None:
        timeout_s = self._settings.training.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not isinstance(await self._receive(), Ready):
                    pass
        except TimeoutError:
            raise TrainerError(
                f"the trainer was not ready within training.step_timeout_s={timeout_s:g} (log: {self._child.log_path})"
            ) from None

    async def _answer_to(self, batch: Batch) -> TrainReport:
        """Send until acknowledged, then wait for the report. Answers to other iterations are dropped."""
        frame = wire.encode(batch)
        await self._socket.send(frame)
        patience_s: float | None = ACKNOWLEDGEMENT_TIMEOUT_S
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    answer = await self._receive()
            except TimeoutError:
                await self._socket.send(frame)
                continue
            match answer:
                case Accepted(iteration=batch.iteration):
                    patience_s = None
                case Trained(iteration=batch.iteration, report=report):
                    return report
                case Failure(message=message):
                    raise TrainerError(message)

    async def _receive(self) -> Answer:
        """The next message of rank 0. Raises `TrainerError` when the trainer ends without one."""
        frame = asyncio.ensure_future(self._socket.recv())
        try:
            async with asyncio.TaskGroup() as group:
                end = group.create_task(self._end())
                await asyncio.wait({end, frame}, return_when=asyncio.FIRST_COMPLETED)
                end.cancel()
            if not frame.done():
                raise TrainerError(end.result())
            return decode_answer(frame.result())
        finally:
            frame.cancel()  # else it would swallow the next message

    async def _end(self) -> str:
        """Wait for the trainer's end and describe it."""
        try:
            await self._child.watch()
        except ProcessDiedError as died:
            return str(died)
        return "the trainer was stopped"
