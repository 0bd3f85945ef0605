"""Worker processes that answer one JSON line with one JSON line, and that can be killed at any moment.

Each worker serves one request at a time over its own pipes. So killing one, for its time or because the caller was
cancelled, can neither corrupt nor block another. Nothing inside a worker has to cooperate: no signal handler, no lock,
not the interpreter. A worker prints one line when it is ready, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import structlog

from spot_async.base.processes.last_words import headline, how_it_ended, readable
from spot_async.errors import DeadlineExceededError, ProcessDiedError

STARTUP_TIMEOUT_S = 60.0
MAX_REPLY_BYTES = 1 << 16
FAILED_STARTS_IN_A_ROW = 3  # for each place in the pool
DEATHS_IN_A_ROW = 20  # at requests, without a reply between them; one answer is asked for twice at most
# Workers work on what a model wrote, so they get none of the parent's other variables: those may hold keys.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")


@dataclass(frozen=True)
class Words:
    """What messages say of the workers of a pool."""

    worker: str  # what one is called
    die: str  # what too many of them do, such as "die at the answers they judge"
    setting: str  # what says how many there are


class WorkerDiedError(ProcessDiedError):
    """One worker died by itself, at its request or while it started. The next one may live."""


class WorkerPool:
    """Up to `size` processes running `command`. They are started when needed and kept for later requests.

    Entering starts one, so that a command that cannot run is found at once. Leaving kills all. A worker that dies is
    replaced, also while it starts. Too many deaths in a row are not the fault of what is asked, and end the pool.
    """

    def __init__(
        self, command: Sequence[str], *, size: int, words: Words, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> None:
        self._command = tuple(command)
        self._words = words
        self._max_reply_bytes = max_reply_bytes
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []  # last in, first out, so that the warmest is used
        self._workers: set[_Worker] = set()  # all that are not known to be gone
        self._size = size
        self._failed_starts = 0  # in a row
        self._deaths = 0  # at requests, in a row
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        try:
            self._idle.append(await self._start(asyncio.get_running_loop().time() + STARTUP_TIMEOUT_S))
        except DeadlineExceededError:
            raise ProcessDiedError(f"no {self._words.worker} was ready within {STARTUP_TIMEOUT_S:.0f} s") from None
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._open = False
        self._idle.clear()
        for worker in self._workers:
            worker.kill()  # kill all before the first await, which may be cancelled
        for worker in tuple(self._workers):
            await self._kill(worker)

    async def ask(self, request: dict[str, Any], *, timeout_s: float, deadline: float) -> dict[str, Any]:
        """Return one worker's reply to `request`.

        `deadline` (loop time) limits both the wait for a worker and its work; `timeout_s` limits the work alone. Raises
        `DeadlineExceededError` when no worker was free in time, `TimeoutError` when one was killed for taking too long,
        `WorkerDiedError` when one died by itself, and another `ProcessDiedError` when workers do nothing but die.
        """
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline:
            raise DeadlineExceededError(f"the deadline had passed when a {self._words.worker} was asked for")
        async with self._lease(deadline) as worker:
            try:
                async with asyncio.timeout_at(min(loop.time() + timeout_s, deadline)):
                    reply = await worker.ask(request)
            except WorkerDiedError as died:
                self._deaths += 1
                self._note(died, self._deaths, DEATHS_IN_A_ROW, self._words.die)
                raise
            self._deaths = 0
            return reply

    @asynccontextmanager
    async def _lease(self, deadline: float) -> AsyncIterator[_Worker]:
        """Lend a worker for one request; kill it unless the request ended well."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise DeadlineExceededError(f"no {self._words.worker} was free before the deadline: add workers") from None
        try:
            worker = await self._ready_worker(deadline)
            try:
                yield worker
            except BaseException:
                await self._kill(worker)
                raise
            self._idle.append(worker)
        finally:
            self._slots.release()

    async def _ready_worker(self, deadline: float) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            await self._kill(worker)
        if not self._open:
            raise RuntimeError("the worker pool is closed")
        return await self._start(deadline)

    async def _start(self, deadline: float) -> _Worker:
        """Return a new worker that is ready. One that dies first is replaced."""
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    worker = await self._spawn()
            except (WorkerDiedError, TimeoutError) as error:
                self._failed_starts += 1
                is_late = isinstance(error, TimeoutError)
                died = WorkerDiedError(f"{self._words.worker} was not ready in time") if is_late else error
                self._note(died, self._failed_starts, FAILED_STARTS_IN_A_ROW * self._size, "do not start")
                if is_late:
                    raise DeadlineExceededError(f"no {self._words.worker} started before the deadline") from None
            else:
                self._failed_starts = 0
                return worker

    async def _spawn(self) -> _Worker:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,  # why it does not start
            env={**environment, "SPOT_ASYNC_PARENT": str(os.getpid())},
            start_new_session=True,  # so that Ctrl-C reaches only the parent
            limit=self._max_reply_bytes,
        )
        worker = _Worker(process, self._words.worker)
        self._workers.add(worker)
        try:
            await worker.read()
        except BaseException:
            await self._kill(worker)
            raise
        return worker

    async def _kill(self, worker: _Worker) -> None:
        worker.kill()
        await worker.wait_gone()
        self._workers.discard(worker)

    def _note(self, died: Exception, in_a_row: int, most: int, what: str) -> None:
        """Log how a worker ended. Raises `ProcessDiedError` if it was one too many."""
        structlog.get_logger().warning(f"{self._words.worker} lost", reason=str(died))
        if in_a_row >= most:
            raise ProcessDiedError(
                f"{self._words.worker}s {what} ({in_a_row} in a row), the last one: {died}; see whether the machine "
                f"has memory and time for them, or lower {self._words.setting}"
            ) from None


class _Worker:
    """One running process."""

    def __init__(self, process: asyncio.subprocess.Process, word: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._word = word
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._stderr = process.stderr

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            await self._stdin.drain()
        except ConnectionError:
            raise await self._end() from None
        return await self.read()

    async def read(self) -> dict[str, Any]:
        line = await self._stdout.readline()
        if not line.endswith(b"\n"):
            raise await self._end()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """Send SIGKILL, unless the process is known to be gone."""
        if self.alive:
            # Not Process.kill: that polls the process, which takes the exit status away from asyncio.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait_gone(self) -> None:
        """Wait until the process has ended and its pipes are closed."""
        self._stdin.close()
        await self._process.wait()
        with suppress(ConnectionError):
            await self._stdin.wait_closed()

    async def _end(self) -> WorkerDiedError:
        """Wait for the process to end, and return how it did."""
        written, _ = await asyncio.gather(self._stderr.read(), self._process.wait())
        code = self._process.returncode or 0
        how = how_it_ended(code, headline(readable(written.decode(errors="replace"))))
        return WorkerDiedError(f"{self._word} (pid {self._process.pid}) {how}")
