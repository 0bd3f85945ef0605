"""Every rank's view of the orchestrator: batches come in, each once and on all ranks; answers go out.

Rank 0 holds the socket and hands what arrives on to the others. It also keeps the iteration count:
a batch that was sent again is answered again, not trained again.
"""

from __future__ import annotations

from typing import NoReturn

import zmq

from spot_async.base import wire
from spot_async.errors import TrainerError
from spot_async.trainer.messages import Accepted, Answer, Batch, Failure, Ready, Trained, endpoint
from spot_async.trainer.parallel import broadcast_bytes
from spot_async.types import TrainReport


class BatchFeed:
    """Collective: all ranks call the same methods in the same order; only rank 0 speaks."""

    def __init__(self, channel_directory: str, rank: int) -> None:
        self._socket: zmq.Socket[bytes] | None = None
        if rank == 0:
            self._socket = zmq.Context.instance().socket(zmq.PAIR)
            self._socket.connect(endpoint(channel_directory))
        self._last: Trained | None = None

    def ready(self) -> None:
        self._say(Ready())

    def next(self) -> Batch:
        """Wait for the next batch. Raises `TrainerError` when it is not the iteration that is due."""
        if self._socket is None:
            batch = wire.decode(broadcast_bytes(None), Batch)
        else:
            frame, batch = self._receive(self._socket)
            broadcast_bytes(frame)
        due = 0 if self._last is None else self._last.iteration + 1
        if batch.iteration != due:
            raise TrainerError(f"the trainer was given iteration {batch.iteration + 1}, but iteration {due + 1} is due")
        return batch

    def _receive(self, socket: zmq.Socket[bytes]) -> tuple[bytes, Batch]:
        """The next batch that has not been trained yet, acknowledged; and as it arrived."""
        while True:
            frame = socket.recv()
            batch = wire.decode(frame, Batch)
            self._say(Accepted(batch.iteration))
            if self._last is None or batch.iteration != self._last.iteration:
                return frame, batch
            self._say(self._last)

    def trained(self, iteration: int, report: TrainReport) -> None:
        self._last = Trained(iteration, report)
        self._say(self._last)

    def refuse(self, error: TrainerError) -> NoReturn:
        """Say why training stopped, as often as asked, until the orchestrator ends the process."""
        self._say(Failure(str(error)))
        while True:
            if self._socket is None:
                broadcast_bytes(None)  # rank 0 sends nothing any more
            else:
                self._socket.recv()
                self._say(Failure(str(error)))

    def _say(self, answer: Answer) -> None:
        if self._socket is not None:
            self._socket.send(wire.encode(answer))
