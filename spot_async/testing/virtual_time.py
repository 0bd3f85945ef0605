"""Runs asyncio on virtual time, where sleeping costs nothing and the order of events is exact.

When no callback is ready, the clock jumps to the next timer. So hours of simulated latency pass in moments, and every
run of a seeded program is the same. A program that waits for something that can no longer happen raises `DeadlockError`
instead of hanging.

Tasks that could continue at the same moment do so in the order in which they became ready, as asyncio has them. A
program must not rely on it: in a real run that order follows from the network. With a seed the loop shuffles them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_S = 0.1  # until what is asked of a thread is done


class DeadlockError(RuntimeError):
    """Raised when every task waits and no timer is set, so that nothing can ever happen again."""


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait, but advances the clock by the time that it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            tasks = "; ".join(sorted(task.get_name() for task in asyncio.all_tasks(self.loop)))
            raise DeadlockError(f"at {self.now_s:g} s every task waits for another: {tasks}")
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
    """An event loop whose `time()` is simulated seconds since its start. It is for one thread, without sockets.

    With `ready_order` it shuffles the tasks that are ready at the same moment, by that seed. Plain callbacks
    (`call_soon`) keep their order, which asyncio promises.
    """

    def __init__(self, ready_order: int | None = None) -> None:
        self._jumping = _JumpingSelector()
        self._shuffled = None if ready_order is None else random.Random(ready_order)
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

    def _run_once(self) -> None:
        # asyncio has no hook for the order of what is ready, so this uses the queue that `call_soon` fills.
        if self._shuffled is not None:
            ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
            places = [i for i, handle in enumerate(ready) if _is_task_step(handle)]
            steps = [ready[i] for i in places]
            self._shuffled.shuffle(steps)
            for i, step in zip(places, steps, strict=True):
                ready[i] = step
        super()._run_once()  # type: ignore[misc]


def _is_task_step(handle: asyncio.Handle) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


def run_on_virtual_time(main: Coroutine[Any, Any, T], *, ready_order: int | None = None) -> T:
    """Run a coroutine as `asyncio.run` does, but on a `VirtualTimeLoop`, which explains `ready_order`."""
    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, ready_order)) as runner:
        return runner.run(main)
