"""The ranks' end of the channel to the orchestrator: each request reaches all ranks once, and answers go back.

Rank 0 has the socket. It gives each rank its share of a batch, and keeps the iteration count. A batch that is sent
again gets its answer again, and is not trained on again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import zmq

from spot_async.base import wire
from spot_async.errors import TrainerError
from spot_async.trainer.batching import told
from spot_async.trainer.messages import (
    MESSAGES,
    PUBLISHED,
    SAVED,
    Answer,
    Batch,
    Failure,
    Looked,
    Order,
    Published,
    Ready,
    Request,
    Save,
    Saved,
    Share,
    Trained,
    endpoint,
)
from spot_async.trainer.parallel import idle_group, rank_count, receive_bytes, send_bytes, wait_for_all
from spot_async.types import Live, TrainReport, WeightFile

Divide = Callable[[Batch], Sequence[Share]]  # returns each rank's share of a batch


class BatchFeed:
    """The feed of batches, and of requests to save.

    All ranks call the same methods in the same order, and only rank 0 talks on the socket.
    """

    def __init__(self, channel_directory: str, rank: int, *, step: int = 0) -> None:
        """`step` is the first iteration that is due."""

        def connected(name: str) -> zmq.Socket[bytes] | None:
            if rank > 0:
                return None
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
            socket.connect(endpoint(channel_directory, name))
            return socket

        self._socket = connected(MESSAGES)
        # Used by the threads that publish and save.
        self._published_socket, self._saved_socket = connected(PUBLISHED), connected(SAVED)
        # Its own, since ranks wait here for as long as rollouts take. Training's collectives end a rank that hangs.
        self._group = idle_group()
        self._due = step
        self._last: Trained | None = None

    def ready(self, cpu: str) -> None:
        """Say so once all ranks are, and on which CPU this one computes, if on one."""
        wait_for_all(self._group)
        self._say(Ready(self._due, cpu))

    def next(self, divide: Divide) -> Share | Save:
        """Wait for what this rank is to do next. `divide` is called on rank 0 alone.

        Raises `TrainerError` on all ranks for a batch or step that is not due, or that cannot be divided.
        """
        if self._socket is None:
            order: Order = wire.decode(receive_bytes(self._group), cast(Any, Order))
        else:
            order, *others = self._orders(self._receive(self._socket), divide)
            for rank, each in enumerate(others, start=1):
                send_bytes(wire.encode(each), rank, self._group)
        if isinstance(order, Failure):
            raise TrainerError(order.message)
        return order

    def _orders(self, request: Request, divide: Divide) -> Sequence[Order]:
        """Return what each rank is to do about a request."""
        try:
            match request:
                case Batch(iteration) if iteration != self._due:
                    raise TrainerError(
                        f"the trainer was given iteration {iteration + 1}, but iteration {self._due + 1} is due"
                    )
                case Batch():
                    return divide(request)
                case Save(step) if step != self._due:
                    raise TrainerError(f"the trainer was asked to save step {step}, but is at step {self._due}")
                case Save():
                    return [request] * rank_count()
        except TrainerError as error:
            return [Failure(str(error))] * rank_count()

    def _receive(self, socket: zmq.Socket[bytes]) -> Request:
        """Wait for a request that is no trained batch. For one that is, send its answer again."""
        while True:
            request: Request = wire.decode(socket.recv(), cast(Any, Request))
            last = self._last
            if not isinstance(request, Batch) or request.is_look or last is None or request.iteration != last.iteration:
                return request
            self._say(last)

    def looked(self, iteration: int, found: dict[int, Live]) -> dict[int, Live]:
        """Say what the student says of a batch, and return it. `found` is this rank's part, by places in the batch."""
        if self._socket is None:
            send_bytes(wire.encode(found), 0, self._group)
            return found
        for rank in range(1, rank_count()):
            found |= wire.decode(receive_bytes(self._group, rank), dict[int, Live])
        self._say(Looked(iteration, tuple(told(found[place]) for place in sorted(found))))
        return found

    def trained(self, iteration: int, report: TrainReport) -> None:
        self._due = iteration + 1
        self._last = Trained(iteration, report)
        self._say(self._last)

    def published(self, step: int, files: tuple[WeightFile, ...], failure: str) -> None:
        """Say that the weights of a step are on disk, or why not. The thread that wrote them calls it."""
        if self._published_socket is not None:
            self._published_socket.send(wire.encode(Published(step, files, failure)))

    def saved(self, step: int, seconds: float, failure: str) -> None:
        """Answer a request to save, from the thread that did it."""
        if self._saved_socket is not None:
            self._saved_socket.send(wire.encode(Saved(step, seconds, failure)))

    def refuse(self, error: TrainerError) -> NoReturn:
        """Answer every message with why training stopped, until the orchestrator ends the process."""
        self._say(Failure(str(error)))
        while True:
            if self._socket is None:
                receive_bytes(self._group)  # waits for ever, since rank 0 has nothing for it any more
            else:
                self._socket.recv()
                self._say(Failure(str(error)))

    def _say(self, answer: Answer) -> None:
        if self._socket is not None:
            self._socket.send(wire.encode(answer))
