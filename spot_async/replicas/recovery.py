"""Sees to one replica for as long as the run goes on: notices its trouble, and brings it back.

A replica that ended or froze loses what it has in flight at once, so that other replicas get it. One that froze is
given `stall_s` to thaw: what it holds in memory is worth more than a fresh start. Else its backend object is left,
which ends a server of ours for good, and a new one is entered, compared with the first and sent the newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic

import structlog

from spot_async.base.timeouts import CAPABILITIES_TIMEOUT_S
from spot_async.config import ServingConfig
from spot_async.errors import (
    BudgetSpentError,
    DeadlineExceededError,
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
from spot_async.replicas.weights import Weights

LONGEST_PING_S = 10.0  # for a machine that swaps
PING_INTERVAL_S = 1.0
FIRST_PAUSE_S = 1.0  # between attempts to enter it; doubles
LONGEST_PAUSE_S = 30.0
LAST_WORDS_S = 10.0  # SGLang looks for its reasons for five
RESTARTS_WITHIN_S = 3600.0


class Supervisor(Generic[B]):
    """Looks after one replica. `are_ours`: entering its backend starts a server."""

    def __init__(
        self,
        replica: Replica[B],
        others: list[Replica[B]],
        weights: Weights[B],
        awake: asyncio.Event,
        serving: ServingConfig,
        *,
        are_ours: bool,
    ) -> None:
        """`others` are all of the role's; while it is not `awake`, what the servers run on is somebody else's."""
        self._replica = replica
        self._others = others
        self._weights = weights
        self._awake = awake
        self._serving = serving
        self._are_ours = are_ours
        self._restarts_s: deque[float] = deque()
        self._log = structlog.get_logger().bind(replica=replica.name)

    async def run(self) -> None:
        """Bring the replica back as often as it fails. Raises `ProcessDiedError` when the last may not start again."""
        while True:
            report = await self._next_trouble()
            self._log.warning("replica in trouble", trouble=report.trouble.value, error=str(report.error))
            await self._take_out(report)
            explained = await self._explained(report)
            if explained is not report:
                self._log.warning("replica ended", error=str(explained.error))
            report = explained
            if not await self._serves_as_it_is(report):
                await self._enter_again(report.error)
            self._log.info("replica is back", state=self._replica.life.state.value, restarts=self._replica.restarts)

    async def _next_trouble(self) -> Report:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._watch_process()), group.create_task(self._watch_answers())]
            report = await self._replica.trouble()
            for task in tasks:
                task.cancel()
        return report

    async def _watch_process(self) -> None:
        try:
            await self._replica.backend.watch()
        except ProcessDiedError as error:
            self._replica.report(Trouble.ENDED, error)

    async def _watch_answers(self) -> None:
        """Ping it whenever there is reason to; a ping that fails is trouble."""
        life = self._replica.life
        while True:
            await self._replica.needs_ping(self._serving.stall_s)
            connections_failed = life.state is State.SUSPECT
            if life.state is State.SERVING:  # it had something in flight and answered nothing
                life.move(State.SUSPECT, _now_s())
            error = await self._ping(unknown_is_well=not connections_failed)
            if connections_failed and life.failed_trial:
                error = error or self._replica.last_error
            if error is not None:
                is_other = isinstance(error, ServerRestartedError)
                self._replica.report(Trouble.RESTARTED if is_other else Trouble.SILENT, error)
                return
            self._replica.showed_life(_now_s())
            if life.state is State.SUSPECT:
                life.move(State.HALF_OPEN if connections_failed else State.SERVING, _now_s())
            elif life.state is State.HALF_OPEN:  # what is on trial takes long, and that is all
                life.move(State.SERVING, _now_s())

    async def _ping(self, *, unknown_is_well: bool) -> SpotError | None:
        """The error of a failed ping. A backend without pings passes, or fails with the last error seen of it."""
        backend = self._replica.backend
        if not isinstance(backend, HealthCheck):
            return None if unknown_is_well else self._replica.last_error
        try:
            await backend.ping(deadline=_now_s() + min(LONGEST_PING_S, self._serving.stall_s))
        except RequestError as error:
            return error
        return None

    async def _take_out(self, report: Report) -> None:
        """Take the replica out of rotation, and take back what it has in flight."""
        replica, reason = self._replica, f"{report.trouble.value} ({report.error})"
        if report.trouble in (Trouble.ENDED, Trouble.SILENT):
            replica.take_out(State.OPEN, _now_s())
            replica.take_back(reason, is_lost=True)
            return
        replica.take_out(State.DRAINING, _now_s())
        try:
            async with asyncio.timeout(self._serving.stall_s):
                await replica.until_idle()
        except TimeoutError:
            replica.take_back(reason, is_lost=False)

    async def _explained(self, report: Report) -> Report:
        """The true cause of trouble: connections to a server of ours fail before it has ended; its end says more."""
        if not self._are_ours or report.trouble is not Trouble.SILENT or _is_frozen(report):
            return report
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._replica.backend.watch()
        except ProcessDiedError as error:
            return Report(Trouble.ENDED, error)
        except TimeoutError:
            pass
        return report

    async def _serves_as_it_is(self, report: Report) -> bool:
        """Whether the same backend object can go on: one that thawed, or only missed weights."""
        replica = self._replica
        replica.life.move(State.RECOVERING, _now_s())
        if not (_is_frozen(report) or report.trouble is Trouble.BEHIND):
            return False
        try:
            async with asyncio.timeout(self._serving.stall_s):
                while (error := await self._ping(unknown_is_well=True)) is not None:
                    if not isinstance(error, DeadlineExceededError):
                        return False  # gone for good, such as a process that was killed while it was stopped
                    await asyncio.sleep(PING_INTERVAL_S)
            replica.showed_life(_now_s())
            async with self._awake_throughout():
                await self._weights.catch_up(replica)
        except TimeoutError:
            return False
        except (BudgetSpentError, StorageError):
            raise
        except SpotError as error:  # also such as says that it must be started again
            self._log.warning("replica took no weights", error=str(error))
            return False
        replica.life.move(State.HALF_OPEN, _now_s())
        return True

    async def _enter_again(self, error: SpotError) -> None:
        pause_s = FIRST_PAUSE_S
        for attempt in itertools.count(1):
            if self._are_ours:
                await self._take_a_restart(error)
            try:
                async with self._awake_throughout():
                    await self._enter()
                    await self._weights.catch_up(self._replica)
            except (BudgetSpentError, StorageError):  # which no other server can change
                raise
            except SpotError as again:
                self._log.warning("replica cannot be entered", error=str(again), attempt=attempt)
                error = self._replica.last_error = again
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2.0 * pause_s)
            else:
                self._replica.life.move(State.SERVING, _now_s())
                return

    async def _enter(self) -> None:
        replica = self._replica
        await self._leave()
        replica.restarts += 1
        await replica.enter(replica.make())
        found = await replica.backend.capabilities(deadline=_now_s() + CAPABILITIES_TIMEOUT_S)
        check_same(replica.offers, replica.name, found, MODEL)
        check_no_less(replica.offers, replica.name, found)
        replica.life.version = None

    @contextlib.asynccontextmanager
    async def _awake_throughout(self) -> AsyncIterator[None]:
        """Wait until the servers are awake, and keep them so inside: who wants them to sleep waits for the end."""
        while True:
            await self._awake.wait()
            async with self._replica.entering:
                if self._awake.is_set():
                    yield
                    return

    async def _leave(self) -> None:
        """The old one, which may be beyond saying farewell. What was taken back first has its time to end: a request
        may still have to tell the server that nobody waits for it."""
        try:
            async with asyncio.timeout(self._serving.stall_s):
                await self._replica.until_idle()
        except TimeoutError:
            self._log.warning("replica is left although requests to it have not ended")
        try:
            await self._replica.leave()
        except SpotError as error:
            self._log.warning("replica was left with an error", error=str(error))

    async def _take_a_restart(self, error: SpotError) -> None:
        """Count one. Without any left, end the run, or stay out of it for good where others serve."""
        now_s = _now_s()
        while self._restarts_s and self._restarts_s[0] <= now_s - RESTARTS_WITHIN_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) < self._serving.restarts:
            self._restarts_s.append(now_s)
            return
        self._replica.life.move(State.DEAD, now_s)
        async with self._replica.entering:
            await self._leave()
        if all(each.life.state is State.DEAD for each in self._others):
            raise self._final(error)
        self._log.error("replica is given up: started again too often", restarts=self._serving.restarts)
        await asyncio.get_running_loop().create_future()

    def _final(self, error: SpotError) -> SpotError:
        if isinstance(error, ProcessDiedError):
            final: SpotError = error
        else:
            final = ProcessDiedError(f"{self._replica.name}: {error}")
        if self._restarts_s:
            final.add_note(f"  started again {len(self._restarts_s)} times within the last hour before that")
        return final


def _is_frozen(report: Report) -> bool:
    return report.trouble is Trouble.SILENT and isinstance(report.error, DeadlineExceededError)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
