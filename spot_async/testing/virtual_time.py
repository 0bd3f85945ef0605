"""Runs asyncio on virtual time, where sleeping costs nothing and the order of events is exact.

When no callback is ready, the clock jumps to the next timer. So hours of simulated latency pass in moments, and every
run of a seeded program is the same. A program that waits for something that can no longer happen raises `DeadlockError`
instead of hanging.

Tasks that could continue at the same moment do so in the order in which they became ready, as asyncio has them. A
program must not rely on it: in a real run that order follows from the network.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_S = 0.1  # until what is asked of a thread is done
MOST_TURNS = 100_000  # of the loop at one moment


class DeadlockError(RuntimeError):
    """Raised when nothing more can happen: every task waits and no timer is set, or one waits for a socket.

    Also when tasks go on and on without waiting.
    """


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait, but advances the clock by the time that it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._turns = 0  # since the clock was advanced

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns = self._turns + 1 if timeout == 0 else 0
        waits_outside = timeout != 0 and len(self.get_map()) > 1  # the first socket is the loop's own
        if timeout is None or waits_outside or self._turns > MOST_TURNS:
            self._turns = 0
            tasks = "; ".join(sorted(task.get_name() for task in asyncio.all_tasks(self.loop)))
            raise DeadlockError(f"at {self.now_s:g} s every task waits for another, or goes on and on: {tasks}")
        self.now_s += max(0.0, timeout)
        return []

    loop: asyncio.AbstractEventLoop


class _NumberedTask(asyncio.Task[T]):
    """A task whose hash is a number, so that a seed replays a run in any process.

    asyncio keeps tasks in sets, and cancels those of a TaskGroup in the set's order. That order follows from hashes,
    and a plain task's hash is its address, which differs between processes.
    """

    __slots__ = ("_number",)

    def __init__(self, coroutine: Coroutine[Any, Any, T], numbers: Iterator[int], **settings: Any) -> None:
        self._number = next(numbers)  # must come first, since the base class puts the task into such a set
        super().__init__(coroutine, **settings)

    def __hash__(self) -> int:
        return self._number


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is simulated seconds since its start. It is for one thread, without sockets."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.loop = self
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coroutine, **settings: _NumberedTask(coroutine, numbers, loop=loop, **settings)
        )

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """Do what is meant for a thread a little later, on this one: a thread would live in real time."""
        done: asyncio.Future[T] = self.create_future()

        def do() -> None:
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001 - handed over
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_later(THREAD_S, do)
        return done


def run_on_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, but on a `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
