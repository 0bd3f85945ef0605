"""Tasks that run and fail together (`asyncio.TaskGroup`), work in threads, and requests that are sent again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
)
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

import structlog

from spot_async.base.processes.resources import is_out_of_files, out_of_files
from spot_async.base.retry import RetryPolicy
from spot_async.errors import (
    BudgetSpentError,
    FailureClass,
    ProcessDiedError,
    RequestError,
    SpotError,
    StalledError,
    ThrottledError,
    TrainerError,
)

T = TypeVar("T")
U = TypeVar("U")
Loop: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the rest and is raised by itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    return [task.result() for task in tasks]


async def gather_answers(asking: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do as `gather`, but let all end if one fails: what was sent costs, whether anybody reads its answer or not."""
    answers: list[T] = []
    for each in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(each, BaseException):
            raise each
        answers.append(each)
    return answers


async def both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Do as `gather`, for two results of different types."""
    results: list[Any] = await gather([first, second])
    return results[0], results[1]


async def in_thread(function: Callable[..., T], *given: Any, **named: Any) -> T:
    """Do as `asyncio.to_thread`. If cancelled, wait for the function's end first, since nothing can cut it short."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *given, **named))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):  # whoever cancels does not want to know
            await working
        raise


@asynccontextmanager
async def entered_in_thread(blocking: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter a context manager in a thread, and leave it in one, because the loop may not wait for it."""
    async with AsyncExitStack() as stack:
        entered = ExitStack()
        stack.push_async_exit(partial(in_thread, entered.__exit__))
        yield await in_thread(entered.enter_context, blocking)


def in_time(work: Callable[[], T], seconds: float) -> T | None:
    """Return what `work` returns, which is done in a thread; None if that takes longer, or the system refuses it.

    The thread is then left alone: nothing can end it, and it does not keep the process from its end.
    """
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            results.append(work())

    thread = threading.Thread(target=run, name="in time", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


async def settle(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines to their end, also when some fail. A cancellation from outside reaches all of them.

    Raises a single failure by itself and several as a group. Use it for work that must not be cut short, such as
    leaving contexts.
    """
    failures: list[Exception] = []

    async def settled(coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001 - raised once all have ended
            failures.append(error)

    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(settled(coroutine))
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup("several failed", failures)


@asynccontextmanager
async def alongside(*loops: Loop) -> AsyncIterator[None]:
    """Run the loops during the `with` block and cancel them at its end. If one raises, the block ends with a group."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each(), name=each.__qualname__) for each in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def watched(run: Awaitable[T], watches: list[Loop]) -> T:
    """Return what `run` gives, while child processes live. The first to die cancels all with its `ProcessDiedError`."""
    async with alongside(*watches):
        return await run


async def while_alive(run: Awaitable[T], watch: Loop) -> T:
    """Do as `watched` with one child. The first failure is raised by itself, not in a group."""
    try:
        return await watched(run, [watch])
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None


@asynccontextmanager
async def running(*resources: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Enter all resources at once and leave them at once. What was entered is left even if others fail."""
    entered: list[AbstractAsyncContextManager[Any]] = []

    async def enter(resource: AbstractAsyncContextManager[Any]) -> None:
        await resource.__aenter__()
        entered.append(resource)

    async def leave(resource: AbstractAsyncContextManager[Any]) -> None:
        await resource.__aexit__(None, None, None)

    try:
        await gather(enter(resource) for resource in resources)
        yield
    finally:
        await settle(leave(resource) for resource in entered)


class Opened:
    """Base of an async context manager that is made of others. They are left with it, or if it cannot be opened."""

    _stack: AsyncExitStack

    async def _open(self, stack: AsyncExitStack) -> None:
        """Enter what it is made of onto the stack: by default nothing."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._stack.__aexit__(*exc_info)


async def sent_again(
    ask: Callable[[], Awaitable[T]], retry: RetryPolicy, deadline: float, *, jitter: Callable[[], float], what: str
) -> T:
    """Return what `ask` gives; ask again as `retry` says until `deadline` (loop time). For requests outside of stages.

    `jitter` returns numbers uniform in [0, 1). `what` names the request in the log. Raises the last failure.
    """
    failures: Counter[FailureClass] = Counter()  # each class has a budget of its own
    while True:
        try:
            return await ask()
        except RequestError as error:
            failures[error.failure_class] += 1
            left_s = deadline - asyncio.get_running_loop().time()
            waited = not error.was_sent and left_s > 0  # for its turn, which may still come
            delay_s = retry.delay_s(error, failures[error.failure_class], jitter(), has_time=waited)
            asked_s = error.asked_s if isinstance(error, ThrottledError) else None
            if delay_s is None or max(delay_s, asked_s or 0.0) >= left_s:
                raise
            structlog.get_logger().warning("retry", stage=what, attempt=failures.total(), error=str(error))
        await asyncio.sleep(delay_s)


def first_error(failures: BaseException) -> BaseException:
    """Return the first leaf of a group, which failed first and caused the others. A plain exception is returned."""
    return leaves(failures)[0]


def error_words(error: BaseException) -> str:
    """Return an error in one line; with its type where it is not a `SpotError`."""
    words = " ".join(str(error).split())
    return words if isinstance(error, SpotError) else f"{type(error).__name__}: {words}"


def leaves(error: BaseException) -> list[BaseException]:
    """Return all exceptions inside nested groups, in order. A plain exception is its own leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


def budget_error(error: BaseException) -> BudgetSpentError:
    """Return the first `BudgetSpentError` inside a group that `except*` caught."""
    return next(leaf for leaf in leaves(error) if isinstance(leaf, BudgetSpentError))


def root_cause(error: BaseException) -> SpotError:
    """Return the error in a group that caused the others. Raises the group, with its trace, if one of them is a bug."""
    failures = leaves(error)
    for failure in failures:
        # What hung may fail in any way once it is cancelled, so the stall is the cause.
        if isinstance(failure, StalledError):
            return failure
    if any(map(is_out_of_files, failures)):
        return out_of_files()
    for failure in failures:
        if not isinstance(failure, SpotError):
            raise error
    for kind in (ProcessDiedError, TrainerError, BudgetSpentError, SpotError):
        for failure in failures:
            if isinstance(failure, kind):
                return failure
    raise error
