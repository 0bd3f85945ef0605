"""How a command ends: what it prints to, its exit code, failures as one line, and runs that can be stopped.

Nothing here knows a command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import structlog
import typer
from rich.console import Console
from rich.text import Text

from spot_async.base.concurrency import error_words, first_error, root_cause
from spot_async.base.processes.memory import tune_gc
from spot_async.base.processes.open_files import raise_open_file_limit
from spot_async.base.processes.private_directory import remove_private_directories
from spot_async.base.text import counted
from spot_async.errors import (
    BudgetSpentError,
    ConfigError,
    DataError,
    PluginError,
    SpotError,
    StalledError,
    StorageError,
)
from spot_async.evaluation.response_log import count_kept
from spot_async.run_directory.layout import ENDS_EARLY, RunDirectory

T = TypeVar("T")

EXIT_CODES: dict[type[SpotError], int] = {ConfigError: 2, DataError: 2, StalledError: 3, BudgetSpentError: 4}


class Screen(Console):
    """Falls silent where nobody reads it any more, as behind `head` or on a terminal that was closed, and where a disk
    is full; the command goes on and ends as it would."""

    def __exit__(self, *exc_info: Any) -> None:  # what every way of printing comes through
        try:
            super().__exit__(*exc_info)
        except OSError:  # of these, rich itself passes broken pipes only
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:  # for what Python still holds and writes when it ends
            os.dup2(nowhere.fileno(), self.file.fileno())


screen = Screen()
stderr = Screen(stderr=True, soft_wrap=True, highlight=False)


def run_until_stopped(run: Coroutine[Any, Any, T], directory: RunDirectory) -> T:
    """Run to the end; on a failure or a signal say in one line why, and what is saved, and exit."""
    received: list[signal.Signals] = []

    async def stoppable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            if received and number is signal.SIGHUP:
                return  # a terminal that closes may say so twice: the system does, and the shell
            if received:
                leave_at_once(f"stopped at once by {number.name}; {saved(directory)}", 128 + number)
            received.append(number)
            if structlog.is_configured():  # to the run's log, while there is one
                structlog.get_logger().warning(ENDS_EARLY, reason=f"stopped by {number.name}")
            screen.print(f"{number.name}: stopping; once more to stop at once", highlight=False)
            task.cancel()

        # SIGINT also where it is ignored, as in what a script starts in the background: whoever sends it means it.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(signal.SIGHUP, stop, signal.SIGHUP)
        return await run

    tune_gc()
    raise_open_file_limit()
    try:
        return asyncio.run(stoppable())
    except asyncio.CancelledError:
        if not received:  # a bug: nobody asked for it
            raise
        stderr.print(Text(f"stopped by {received[0].name}; {saved(directory)}"))
        raise typer.Exit(128 + received[0]) from None
    except (SpotError, OSError, BaseExceptionGroup) as error:
        cause = root_cause(error) if directory.is_there() else gone(directory, error)
        if isinstance(cause, PluginError) and cause.__cause__ is not None:  # its author wants to see the lines
            stderr.print(Text("".join(traceback.format_exception(cause.__cause__)).rstrip()))
        fail(cause, code=exit_code(cause), note=saved(directory))


def gone(directory: RunDirectory, error: BaseException) -> StorageError:
    """What ended a run whose directory was taken away: whatever noticed it first was bound to fail."""
    return StorageError(
        f"the run directory {directory.path} is gone: it was removed or renamed while the run went on "
        f"(noticed by: {error_words(first_error(error))})"
    )


def hung(directory: RunDirectory) -> Callable[[str], None]:
    """How a stalled run ends whose event loop does not: past all locks and buffers, another thread may hold them."""

    def exit_process(message: str) -> None:
        leave_at_once(f"error: {message}\n{saved(directory)}", EXIT_CODES[StalledError])

    return exit_process


def leave_at_once(message: str, code: int) -> NoReturn:
    """End this process whatever it is doing, with a last word; the kernel ends the children with it."""
    show_cursor = "\x1b[?25h" if screen.is_terminal else ""
    with suppress(OSError):
        os.write(2, f"{show_cursor}{message}\n".encode())
    remove_private_directories()
    os._exit(code)


def exit_code(error: SpotError) -> int:
    """What the process ends with after a failure; docs/watchdog.md lists them all."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def saved(directory: RunDirectory) -> str:
    """What a run that ended early leaves behind."""
    if not directory.is_there():
        return f"what was saved went with {directory.path}"
    if directory.purpose == "eval":
        kept = counted(count_kept(directory.path / "evaluation.jsonl"), "judged response")
        return f"saved: {kept}; to go on: the same command with --resume {directory.path}"
    student = directory.path / "student"
    if not student.is_symlink():
        return f"nothing was trained yet; logs are in {directory.path}"
    return f"saved: {student.resolve().name} as {student}, metrics and samples beside it"


def fail(error: SpotError, *, code: int, note: str | None = None) -> NoReturn:
    """Print the failure, below it what it carries as notes (the end of a server's log), and leave."""
    for line in str(error).splitlines():
        stderr.print(Text(f"error: {line}", style="red"))
    for detail in getattr(error, "__notes__", ()):
        stderr.print(Text(detail))
    if note is not None:
        stderr.print(Text(note))
    raise typer.Exit(code)
