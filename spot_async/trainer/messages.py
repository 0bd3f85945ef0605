"""Everything that the orchestrator and rank 0 say to each other.

One Unix socket, one peer at each end, one msgpack frame a message (`base/wire.py`); nothing is pickled.

    rank 0 -> orchestrator   Ready          once, when every rank has its model
    orchestrator -> rank 0   Batch          train this; sent again when no acknowledgement comes
    rank 0 -> orchestrator   Accepted       the batch has arrived; training starts
    rank 0 -> orchestrator   Trained        new weights are published
    rank 0 -> orchestrator   Failure        training has stopped; said again to every later batch

Answers carry the iteration they answer, so a late one is recognised and dropped. There is no stop
message: the orchestrator ends the ranks by signal, and what they have published is complete by then.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import msgspec

from spot_async.base import wire
from spot_async.types import Supervision, TrainReport


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    iteration: int
    samples: tuple[Supervision, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    pass


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    iteration: int


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    iteration: int
    report: TrainReport


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    message: str


Answer: TypeAlias = Ready | Accepted | Trained | Failure


def decode_answer(frame: bytes) -> Answer:
    """One of the answers; raises as `wire.decode` does."""
    answer: Answer = wire.decode(frame, cast(Any, Answer))
    return answer


def endpoint(channel_directory: str) -> str:
    """The socket's address inside the private directory that both ends know."""
    return f"ipc://{channel_directory}/trainer.sock"
