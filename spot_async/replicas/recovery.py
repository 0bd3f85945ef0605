"""Notices when a replica is in trouble, and brings it back, for as long as the run lasts.

A replica that ended or froze loses its requests at once, so that other replicas get them. One that froze has `stall_s`
to thaw, since what it holds in memory is worth more than a fresh start. Otherwise its backend object is closed, which
ends a server of ours for good. A new one is entered, compared with the first, and sent the newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic

import structlog

from spot_async.config import ServingConfig
from spot_async.errors import (
    BudgetSpentError,
    DeadlineExceededError,
    FarSideError,
    ProcessDiedError,
    RequestError,
    ServerRestartedError,
    SpotError,
    StorageError,
)
from spot_async.protocols import HealthCheck
from spot_async.replicas.capabilities import MODEL, check_no_less, check_same
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import B, Replica, Report, Trouble
from spot_async.replicas.weights import Weights, loop_time_s

LONGEST_PING_S = 10.0  # long enough for a machine that swaps
PING_INTERVAL_S = 1.0
FIRST_PAUSE_S = 1.0  # between attempts to enter it; doubles each time, up to the longest
MOST_BETWEEN_STARTS_S = 30.0
LAST_WORDS_S = 10.0  # for a dying server to say why; SGLang takes five to find out
RESTARTS_WITHIN_S = 3600.0


@dataclass(eq=False)
class Recovery(Generic[B]):
    """Watches one replica, and brings it back whenever it is in trouble."""

    replica: Replica[B]
    others: list[Replica[B]]  # all replicas of the role
    weights: Weights[B]
    awake: asyncio.Event  # clear while the trainer uses the servers' devices
    serving: ServingConfig
    _: KW_ONLY
    are_ours: bool  # entering the backend starts a server
    _restarts_s: deque[float] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._log = structlog.get_logger().bind(replica=self.replica.name)

    async def run(self) -> None:
        """Bring the replica back as often as it fails.

        Raises `ProcessDiedError` when it has no restart left, and no other replica of the role has either.
        """
        while True:
            await self._bring_back(await self._next_trouble())

    async def _bring_back(self, report: Report) -> None:
        self._log.warning("replica in trouble", trouble=report.trouble.value, error=str(report.error))
        await self._take_out(report)
        explained = await self._explained(report)
        if explained is not report:
            self._log.warning("replica ended", error=str(explained.error))
        if not await self._serves_as_it_is(explained):
            await self._enter_again(explained.error)
        self._log.info("replica is back", state=self.replica.life.state.value, restarts=self.replica.restarts)

    async def _next_trouble(self) -> Report:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._watch_process()), group.create_task(self._watch_answers())]
            report = await self.replica.trouble()
            for task in tasks:
                task.cancel()
        return report

    async def _watch_process(self) -> None:
        try:
            await self.replica.backend.watch()
        except ProcessDiedError as error:
            self.replica.report(Trouble.ENDED, error)

    async def _watch_answers(self) -> None:
        """Ping the replica whenever there is reason to. A failed ping is reported as trouble, and ends this."""
        life = self.replica.life
        while True:
            await self.replica.needs_ping(self.serving.stall_s)
            connections_failed = life.state is State.SUSPECT
            if life.state is State.SERVING:  # it has had requests and answered none for `stall_s`
                life.move(State.SUSPECT, loop_time_s())
            error = await self._ping(unknown_is_well=not connections_failed)
            # A server may answer pings and yet fail real requests, as its request on trial did.
            if connections_failed and life.failed_trial:
                error = error or self.replica.last_error
            if error is not None:
                is_other = isinstance(error, ServerRestartedError)
                self.replica.report(Trouble.RESTARTED if is_other else Trouble.SILENT, error)
                return
            self.replica.showed_life(loop_time_s())
            if life.state is State.SUSPECT:
                life.move(State.HALF_OPEN if connections_failed else State.SERVING, loop_time_s())
            elif life.state is State.HALF_OPEN:  # it answers pings, so the request on trial just takes long
                life.move(State.SERVING, loop_time_s())

    async def _ping(self, *, unknown_is_well: bool) -> SpotError | None:
        """Ping the replica; return the error of a failed ping.

        A backend that has no pings passes if `unknown_is_well`. Otherwise the last error seen of it is returned.
        """
        backend = self.replica.backend
        if not isinstance(backend, HealthCheck):
            return None if unknown_is_well else self.replica.last_error
        try:
            await backend.ping(deadline=loop_time_s() + min(LONGEST_PING_S, self.serving.stall_s))
        except RequestError as error:
            return error
        return None

    async def _take_out(self, report: Report) -> None:
        """Take the replica out of rotation, and take back what it has in flight."""
        replica, reason = self.replica, f"{report.trouble.value} ({report.error})"
        if report.trouble in (Trouble.ENDED, Trouble.SILENT):
            replica.take_out(State.OPEN, loop_time_s())
            replica.take_back(reason, is_lost=True)
            return
        replica.take_out(State.DRAINING, loop_time_s())
        try:
            async with asyncio.timeout(self.serving.stall_s):
                await replica.until_idle()
        except TimeoutError:
            replica.take_back(reason, is_lost=False)

    async def _explained(self, report: Report) -> Report:
        """Return the true cause of trouble.

        When a server of ours dies, its connections fail before its process has ended, and the end says why. So wait for
        that a little.
        """
        if not self.are_ours or report.trouble is not Trouble.SILENT or _is_frozen(report):
            return report
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self.replica.backend.watch()
        except ProcessDiedError as error:
            return Report(Trouble.ENDED, error)
        except TimeoutError:
            pass
        return report

    async def _serves_as_it_is(self, report: Report) -> bool:
        """Bring the replica back with its backend object as it is; return whether that worked.

        It can work for a server that thaws, and for one that only missed weights.
        """
        replica = self.replica
        replica.life.move(State.RECOVERING, loop_time_s())
        if not (_is_frozen(report) or report.trouble is Trouble.BEHIND):
            return False
        try:
            async with asyncio.timeout(self.serving.stall_s):
                while (error := await self._ping(unknown_is_well=True)) is not None:
                    if not isinstance(error, DeadlineExceededError):
                        return False  # it will not thaw, such as a process that was killed while it was stopped
                    await asyncio.sleep(PING_INTERVAL_S)
            replica.showed_life(loop_time_s())
            async with self._awake_throughout():
                await self.weights.catch_up(replica)
        except TimeoutError:
            return False
        except (BudgetSpentError, StorageError):
            raise
        except SpotError as error:  # among others, it may say itself that it must be started again
            self._log.warning("replica took no weights", error=str(error))
            return False
        replica.life.move(State.HALF_OPEN, loop_time_s())  # on trial, as the process is the one that had stopped
        return True

    async def _enter_again(self, error: SpotError) -> None:
        pause_s = FIRST_PAUSE_S
        for attempt in itertools.count(1):
            if self.are_ours:
                await self._take_a_restart(error)
            try:
                async with self._awake_throughout():
                    await self._enter()
                    await self.weights.catch_up(self.replica)
            except (BudgetSpentError, StorageError):  # starting the server again would change neither
                raise
            except SpotError as again:
                self._log.warning("replica cannot be entered", error=str(again), attempt=attempt)
                if isinstance(again, FarSideError) and self._restarts_s:
                    self._restarts_s.pop()  # nothing was started: its machine is out of reach
                error = self.replica.last_error = again
                await asyncio.sleep(pause_s)
                pause_s = min(MOST_BETWEEN_STARTS_S, 2.0 * pause_s)
            else:
                self.replica.life.move(State.SERVING, loop_time_s())
                return

    async def _enter(self) -> None:
        replica = self.replica
        await self._leave()
        replica.restarts += 1
        first = replica.offers
        assert first is not None  # it was entered when the pool was
        replica.renew()
        found = await replica.enter()
        check_same(first, replica.name, found, MODEL)
        check_no_less(first, replica.name, found)
        replica.life.version = None

    @contextlib.asynccontextmanager
    async def _awake_throughout(self) -> AsyncIterator[None]:
        """Wait until the servers are awake, and keep them awake inside: `sleep` waits for the same lock."""
        while True:
            await self.awake.wait()
            async with self.replica.entering:
                if self.awake.is_set():
                    yield
                    return

    async def _leave(self) -> None:
        """Leave the old backend object, which may fail, since its server may be gone.

        Requests that were taken back get some time to end first: they may still tell the server to stop working.
        """
        try:
            async with asyncio.timeout(self.serving.stall_s):
                await self.replica.until_idle()
        except TimeoutError:
            self._log.warning("replica is left although requests to it have not ended")
        try:
            await self.replica.leave()
        except SpotError as error:
            self._log.warning("replica was left with an error", error=str(error))

    async def _take_a_restart(self, error: SpotError) -> None:
        """Count a restart. If none is left, raise when this was the last replica, else wait here until the run ends."""
        now_s = loop_time_s()
        while self._restarts_s and self._restarts_s[0] <= now_s - RESTARTS_WITHIN_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) < self.serving.restarts:
            self._restarts_s.append(now_s)
            return
        self.replica.life.move(State.DEAD, now_s)
        async with self.replica.entering:
            await self._leave()
        if all(each.life.state is State.DEAD for each in self.others):
            raise self._final(error)
        self._log.error("replica is given up: started again too often", restarts=self.serving.restarts)
        await asyncio.get_running_loop().create_future()

    def _final(self, error: SpotError) -> SpotError:
        if isinstance(error, ProcessDiedError):
            final: SpotError = error
        else:
            final = ProcessDiedError(f"{self.replica.name}: {error}")
        if self._restarts_s:
            final.add_note(f"  started again {len(self._restarts_s)} times within the last hour before that")
        return final


def _is_frozen(report: Report) -> bool:
    return report.trouble is Trouble.SILENT and isinstance(report.error, DeadlineExceededError)
