"""The ranks' end of the channel to the orchestrator: each request reaches all ranks once, and answers go back.

Rank 0 has the socket and passes what arrives on to the others. It also keeps the iteration count. A batch that is sent
again gets its answer again, and is not trained on again.
"""

from __future__ import annotations

from typing import NoReturn

import zmq

from spot_async.base import wire
from spot_async.errors import TrainerError
from spot_async.trainer.messages import (
    Accepted,
    Answer,
    Batch,
    Failure,
    Ready,
    Request,
    Save,
    Saved,
    Trained,
    decode_request,
    endpoint,
    saved_endpoint,
)
from spot_async.trainer.parallel import broadcast_bytes, idle_group, wait_for_all
from spot_async.types import TrainReport


class BatchFeed:
    """The feed of batches, and of requests to save.

    All ranks call the same methods in the same order, and only rank 0 talks on the socket.
    """

    def __init__(self, channel_directory: str, rank: int, *, step: int = 0) -> None:
        """`step` is the first iteration that is due."""
        self._socket: zmq.Socket[bytes] | None = None
        self._saved_socket: zmq.Socket[bytes] | None = None  # used by the thread that saves
        if rank == 0:
            self._socket = zmq.Context.instance().socket(zmq.PAIR)
            self._socket.connect(endpoint(channel_directory))
            self._saved_socket = zmq.Context.instance().socket(zmq.PAIR)
            self._saved_socket.connect(saved_endpoint(channel_directory))
        # Its own, since ranks wait here for as long as rollouts take. Training's collectives end a rank that hangs.
        self._group = idle_group()
        self._due = step
        self._last: Trained | None = None

    def ready(self) -> None:
        """Say so once all ranks are."""
        wait_for_all(self._group)
        self._say(Ready(self._due))

    def next(self) -> Request:
        """Wait for the next request. Raises `TrainerError` if it is not of the iteration that is due."""
        if self._socket is None:
            request = decode_request(broadcast_bytes(None, group=self._group))
        else:
            frame, request = self._receive(self._socket)
            broadcast_bytes(frame, group=self._group)
        match request:
            case Batch(iteration) if iteration != self._due:
                raise TrainerError(
                    f"the trainer was given iteration {iteration + 1}, but iteration {self._due + 1} is due"
                )
            case Save(step) if step != self._due:
                raise TrainerError(f"the trainer was asked to save step {step}, but is at step {self._due}")
        return request

    def _receive(self, socket: zmq.Socket[bytes]) -> tuple[bytes, Request]:
        """Acknowledge batches until a request comes that is no trained batch; return its frame and the request."""
        while True:
            frame = socket.recv()
            request = decode_request(frame)
            if isinstance(request, Save):
                return frame, request
            self._say(Accepted(request.iteration))
            if self._last is None or request.iteration != self._last.iteration:
                return frame, request
            self._say(self._last)

    def trained(self, iteration: int, report: TrainReport) -> None:
        self._due = iteration + 1
        self._last = Trained(iteration, report)
        self._say(self._last)

    def saved(self, step: int, seconds: float, failure: str) -> None:
        """Answer a request to save, from the thread that did it."""
        if self._saved_socket is not None:
            self._saved_socket.send(wire.encode(Saved(step, seconds, failure)))

    def refuse(self, error: TrainerError) -> NoReturn:
        """Answer every message with why training stopped, until the orchestrator ends the process."""
        self._say(Failure(str(error)))
        while True:
            if self._socket is None:
                broadcast_bytes(None, group=self._group)  # waits for ever, since rank 0 broadcasts nothing any more
            else:
                self._socket.recv()
                self._say(Failure(str(error)))

    def _say(self, answer: Answer) -> None:
        if self._socket is not None:
            self._socket.send(wire.encode(answer))
