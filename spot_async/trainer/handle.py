"""The orchestrator's end of the trainer: starts the ranks, sends batches, returns new weights.

It holds no tensors and does not import torch. The messages are in `messages.py`, and the ranks' end is `feed.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar, cast

import zmq
import zmq.asyncio

from spot_async.base import wire
from spot_async.base.processes.child import standing_still
from spot_async.base.processes.private_directory import private_directory
from spot_async.base.tasks import Opened, while_alive
from spot_async.errors import ProcessDiedError, TrainerError, TrainerLostError
from spot_async.trainer.messages import (
    PUBLISHED,
    SAVED,
    Answer,
    Batch,
    Failure,
    Looked,
    Published,
    Ready,
    Save,
    Saved,
    Trained,
    endpoint,
)
from spot_async.trainer.nodes.joined import JoinedNodes
from spot_async.trainer.rank_processes import RankProcesses
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import Live, Supervision, TrainReport, WeightFile

T = TypeVar("T")
Reply = TypeVar("Reply", Looked, Trained)
Told = TypeVar("Told", Published, Saved)


@dataclass(eq=False)
class TrainerProcess(Opened):
    """The trainer of a run, as an async context manager. Entering waits until all ranks are ready;
    `step` is then the number of steps behind them, and so the first iteration to train. `cpu` is that of `Ready`.

    Implements `protocols.Trainer`. Whatever goes wrong in entering or training is a `TrainerError`; then leave, or stop
    what is left and start again.
    """

    settings: TrainerSettings  # of the next start
    _: KW_ONLY
    cores: Collection[int] | None = None  # that the trainer may use; None: the same as this process
    nodes: JoinedNodes | None = None  # they train too
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # to start in, of whoever shares its devices
    _resources: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)  # of the last start

    async def _open(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.stop)
        await self.start()

    async def start(self) -> None:
        """Start the ranks, and wait until all are ready."""
        async with self.turn(), AsyncExitStack() as stack:
            await self._begin(stack)
            self._resources = stack.pop_all()

    async def stop(self) -> None:
        """End what is left of the ranks."""
        await self._resources.aclose()

    async def _begin(self, stack: AsyncExitStack) -> None:
        channel_directory = str(stack.enter_context(private_directory("spot-trainer-")))
        context = stack.enter_context(zmq.asyncio.Context())

        def bound(address: str) -> zmq.asyncio.Socket:
            socket: zmq.asyncio.Socket = stack.enter_context(context.socket(zmq.PAIR))
            socket.linger = 0
            socket.bind(address)
            return socket

        self._socket = bound(endpoint(channel_directory))
        self._published_socket = bound(endpoint(channel_directory, PUBLISHED))
        self._saved_socket = bound(endpoint(channel_directory, SAVED))
        if self.nodes is not None:
            await self.nodes.begin(self.settings.model_dump_json())
        self._ranks = await stack.enter_async_context(self._make_ranks(channel_directory))
        if self.nodes is not None:
            stack.push_async_callback(self.nodes.stop)
        ready = await self._while_it_lives(self._ready(), "the trainer was not ready")
        self.step, self.cpu = ready.step, ready.cpu

    async def watch(self) -> None:
        """Run for as long as the trainer lives. Raises `TrainerLostError` when it ends by itself."""
        try:
            await (self._ranks.watch() if self.nodes is None else self.nodes.watch(self._ranks.watch))
        except ProcessDiedError as died:
            raise TrainerLostError(str(died)) from None

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        """Train on one batch. The new weights may not be on disk yet: `published` waits for them.

        Iterations count from 0. One that is sent again gets the same answer and is not trained again. Raises
        `TrainerError` when a rank stopped (non-finite loss, full disk, killed) or took too long.
        """
        conversation = self._ask(Batch(iteration, tuple(batch)), Trained)
        return (await self._while_it_lives(conversation, f"iteration {iteration + 1} was not trained")).report

    async def look(self, iteration: int, batch: Sequence[Supervision]) -> Sequence[Live]:
        """Return what the student says of samples that the next batch is made of. Raises `TrainerError` as `train`."""
        conversation = self._ask(Batch(iteration, tuple(batch), is_look=True), Looked)
        return (await self._while_it_lives(conversation, f"iteration {iteration + 1} was not looked at")).live

    async def published(self, step: int) -> tuple[WeightFile, ...]:
        """Wait until the weights of a step are on disk; return their files.

        Steps are asked for in order, each once. Raises `TrainerError` as `train` does.
        """
        told = _outcome(self._published_socket, Published, step)
        return (await self._while_it_lives(told, f"the weights of step {step} were not written")).files

    async def save(self, step: int, directory: str) -> None:
        """Begin to save the state after `step` steps, at which the trainer must be. It may be told to train at once."""
        await self._socket.send(wire.encode(Save(step, directory)))

    async def saved(self, step: int) -> float:
        """Wait until what `save` began is on disk; return its seconds. Raises `TrainerError` as `train` does."""
        told = _outcome(self._saved_socket, Saved, step)
        return (await self._while_it_lives(told, f"step {step} was not saved")).seconds

    def _make_ranks(self, channel_directory: str) -> RankProcesses:
        path, meeting = self.settings.save(), None if self.nodes is None else self.nodes.meeting
        log_path = path.parent / "logs" / "trainer.log"
        return RankProcesses(self.settings, path, channel_directory, log_path, cores=self.cores, meeting=meeting)

    async def _while_it_lives(self, conversation: Coroutine[Any, Any, T | Failure], otherwise: str) -> T:
        """Return the conversation's result. Raises `TrainerError` on a failure, the trainer's end or the timeout."""
        timeout_s = self.settings.training.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await while_alive(conversation, self.watch)
        except TimeoutError:
            found = await asyncio.to_thread(lambda: [*standing_still(os.getpid())])
            still = "".join(f"; {each}" for each in found if each.startswith("rank "))
            raise TrainerError(
                f"{otherwise} within training.step_timeout_s={timeout_s:g}{still} (log: {self._ranks.log_path})"
            ) from None
        if isinstance(outcome, Failure):
            raise TrainerError(outcome.message)
        return outcome

    async def _receive(self) -> Answer:
        answer: Answer = wire.decode(await self._socket.recv(), cast(Any, Answer))
        return answer

    async def _ready(self) -> Ready | Failure:
        while True:
            answer = await self._receive()
            if isinstance(answer, Ready | Failure):
                return answer

    async def _ask(self, batch: Batch, kind: type[Reply]) -> Reply | Failure:
        """Send the batch, once, and wait for the outcome. Answers to other iterations are dropped."""
        await self._socket.send(wire.encode(batch))
        while True:
            outcome = await self._receive()
            if isinstance(outcome, Failure) or (isinstance(outcome, kind) and outcome.iteration == batch.iteration):
                return outcome


async def _outcome(socket: zmq.asyncio.Socket, kind: type[Told], step: int) -> Told | Failure:
    """Wait for what became of a step. Answers about others are dropped."""
    while (answer := wire.decode(await socket.recv(), kind)).step != step:
        pass
    return Failure(answer.failure) if answer.failure else answer
