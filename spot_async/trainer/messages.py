"""The messages between the orchestrator and rank 0, and from rank 0 to the others.

The former go through a Unix socket with one peer at each end, which loses nothing while both live. `Published` and
`Saved` have one each of their own, since they come at any time, from other threads. A message is one msgpack frame
(`base/wire.py`); nothing is pickled.

    rank 0 -> orchestrator   Ready          once, when every rank has its model and is at its step
    orchestrator -> rank 0   Batch          train this, or only say what the student says of it: a look
    rank 0 -> each rank      Share          the same of this part of the batch
    rank 0 -> orchestrator   Looked         what the student says
    rank 0 -> orchestrator   Trained        the step is made
    rank 0 -> orchestrator   Published      its weights are on disk, or could not be written; before or after `Trained`
    orchestrator -> rank 0   Save           begin to save a checkpoint of the state between two batches
    rank 0 -> orchestrator   Saved          it is on disk, or could not be saved
    rank 0 -> orchestrator   Failure        training has stopped; sent again for every later batch
    rank 0 -> each rank      Save, Failure  the same

Answers name their iteration or step, so that a late one is recognised and dropped. There is no message to stop: the
orchestrator ends the ranks by signal, at any time, because whatever they have published is complete.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from spot_async.types import FloatArray, Live, Supervision, TrainReport, WeightFile

# These variables of the environment tell ranks that are on several nodes.
NODES_VARIABLE = "SPOT_ASYNC_NODES"
STORE_PORT_VARIABLE = "SPOT_ASYNC_STORE_PORT"  # of loopback, where this node's ranks reach the process group's store


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    iteration: int
    samples: tuple[Supervision, ...]
    is_look: bool = False  # the next batch is made of it


class UpdateShare(msgspec.Struct, frozen=True):
    """One rank's part of a mini-batch. Samples are counted over all of the mini-batch."""

    names: tuple[str, ...]  # of all samples
    tokens: int  # response tokens of all samples
    samples: dict[int, Supervision]  # this rank's
    passes: tuple[tuple[int, ...], ...]  # this rank's micro-batches; all ranks have the same number
    # (T,) log pi_old of these, from a look. All ranks have it or none, or those that recompute wait for the others.
    old_logprobs: dict[int, FloatArray] | None = None


class Share(msgspec.Struct, frozen=True, tag="share"):
    """One rank's part of a batch."""

    iteration: int
    updates: tuple[UpdateShare, ...]
    is_look: bool = False  # all of the batch is one update


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    iteration: int
    live: tuple[Live, ...]  # of each sample, in their order


class Save(msgspec.Struct, frozen=True, tag="save"):
    # The steps that the state must have behind it, which is also the iteration that is due.
    step: int
    directory: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    # The steps behind the trainer, which is also the iteration that is due.
    step: int = 0
    cpu: str = ""  # that rank 0 computes on, and the instruction set that torch uses there; empty: it has a GPU


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    iteration: int
    report: TrainReport


class Published(msgspec.Struct, frozen=True, tag="published"):
    step: int
    files: tuple[WeightFile, ...] = ()
    failure: str = ""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    step: int
    seconds: float
    failure: str = ""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    message: str


Request: TypeAlias = Batch | Save
Order: TypeAlias = Share | Save | Failure
Answer: TypeAlias = Ready | Looked | Trained | Failure


# The names of the sockets: that of `Published` and that of `Saved` are their own.
MESSAGES, PUBLISHED, SAVED = "trainer", "published", "saved"


def endpoint(channel_directory: str, socket: str = MESSAGES) -> str:
    """Return a socket's address, inside the private directory that both ends know."""
    return f"ipc://{channel_directory}/{socket}.sock"
