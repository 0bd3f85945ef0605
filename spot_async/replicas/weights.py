"""Sends weights to a role's replicas: to all that serve at once, and to others as they come back.

A replica that misses an update is out of rotation until it has confirmed the newest weights, so that no request ever
sees older ones.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Generic

from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.tasks import gather
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    ProcessDiedError,
    RequestError,
    ServerRestartedError,
    TransientError,
)
from spot_async.models.weight_files import check_unchanged, in_use, marked
from spot_async.protocols import WeightSink
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import B, HeldLease, Replica, Trouble
from spot_async.replicas.scheduler import Scheduler
from spot_async.types import WeightSnapshot

UPDATED = frozenset({State.SERVING, State.SUSPECT, State.HALF_OPEN})


class Weights(Generic[B]):
    """The weights that one role's replicas must hold. `moved` is set whenever a replica changes its state."""

    def __init__(self, replicas: list[Replica[B]], scheduler: Scheduler[B], moved: asyncio.Event) -> None:
        self._replicas = replicas
        self._scheduler = scheduler
        self._newest: WeightSnapshot | None = None  # None: those that the servers started with
        self._moved = moved
        self._updating = asyncio.Lock()

    async def update(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Send new weights to all replicas that serve, and report those that miss them.

        If none takes them and some refuse, raise the first refusal; the old weights then stay the newest. If none
        serves, or all are lost, wait until one comes back, until `deadline` (loop time).

        Requests may be in flight, if the servers take weights then. Raises ValueError for a second update beside the
        first, which is a bug.
        """
        if self._updating.locked():
            raise ValueError(f"weights {snapshot.version} are sent while others are: one update at a time")
        async with self._updating:
            await self._update_all(snapshot, deadline)

    async def _update_all(self, snapshot: WeightSnapshot, deadline: float) -> None:
        before = self._newest
        snapshot = marked(snapshot)
        self._set_newest(snapshot)
        serving = [each for each in self._replicas if each.life.state in UPDATED]
        for replica in serving:  # now, since one may be lost before the tasks below begin
            replica.life.move(State.UPDATING, loop_time_s())
        try:
            errors = await gather(self._update(each, snapshot, deadline) for each in serving)
        except asyncio.CancelledError:
            for replica in serving:
                if replica.life.state is State.UPDATING:
                    replica.life.version = None  # it is not known which ones it holds, but it can be sent others
                    replica.life.move(State.SERVING, loop_time_s())
            raise
        refused = [
            (each, error)
            for each, error in zip(serving, errors, strict=True)
            if error is not None and each.life.state is State.UPDATING
        ]
        if refused and all(each.life.version != snapshot.version for each in self._replicas):
            self._set_newest(before)
            for replica, _ in refused:
                replica.life.move(State.SERVING, loop_time_s())
            raise refused[0][1]
        for replica, error in refused:
            replica.report(Trouble.BEHIND, error)
        await self._until_one_serves(deadline)

    def withdraw(self) -> None:
        """Send the newest weights to no replica any more, since they are void. `update` gives others soon.

        Nothing may be asked of the replicas until then.
        """
        self._newest = None

    async def catch_up(self, replica: Replica[B]) -> None:
        """Send the newest weights to a replica that is out of rotation, until it holds those that are newest then."""
        while self._newest is not None and replica.life.version != self._newest.version:
            await _send(replica, self._newest, loop_time_s() + WEIGHT_UPDATE_TIMEOUT_S)

    async def _update(self, replica: Replica[B], snapshot: WeightSnapshot, deadline: float) -> RequestError | None:
        """Send weights to one replica; return the error with which it refused them. A lost replica is reported."""
        if replica.life.state is not State.UPDATING:  # it was lost just now, and gets them when it comes back
            return None
        try:
            with replica.standing_still():
                await _send(replica, snapshot, deadline)
        except ServerRestartedError as error:
            replica.report(Trouble.RESTARTED, error)
        except RequestError as error:
            if not got_no_reply(error):
                return error
            replica.report(Trouble.BEHIND, error)
        except ProcessDiedError as error:  # the backend itself says that its server must be started again
            replica.report(Trouble.ENDED, error)
        else:
            if replica.life.state is State.UPDATING:
                replica.life.move(State.SERVING, loop_time_s())
        return None

    async def _until_one_serves(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                while not any(each.life.takes(self._scheduler.version, 0) for each in self._replicas):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            names = ", ".join(each.name for each in self._replicas)
            raise DeadlineExceededError(f"{names}: no server came back to take the new weights") from None

    def _set_newest(self, snapshot: WeightSnapshot | None) -> None:
        self._newest = snapshot
        self._scheduler.version = None if snapshot is None else snapshot.version


async def _send(replica: Replica[B], snapshot: WeightSnapshot, deadline: float) -> None:
    """Send weights to a replica, under a lease, so that a freeze is noticed and ends the sending.

    The directory is locked meanwhile: other replicas may be two steps further by then, and the trainer would delete
    these weights. Raises DataError if its files are not those that were published, or no longer once they are sent.
    """
    with in_use(Path(snapshot.directory)):
        check_unchanged(snapshot)
        async with HeldLease(replica, LeaseRequest("weight update", ()), loop_time_s(), is_request=False) as backend:
            if not isinstance(backend, WeightSink):
                raise ConfigError(f"{replica.name}: its backend takes no weights")
            await backend.update_weights(snapshot, deadline=deadline)
        check_unchanged(snapshot)
    replica.showed_life(loop_time_s())
    replica.life.version = snapshot.version


def got_no_reply(error: RequestError) -> bool:
    """Whether the connection failed, or was never made. Then the server may be gone."""
    if not isinstance(error, TransientError) or isinstance(error, DeadlineExceededError):
        return False
    return error.exchange is not None and error.exchange.status is None


def loop_time_s() -> float:
    return asyncio.get_running_loop().time()
