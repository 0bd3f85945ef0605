"""Ends commands: prints failures as one line, chooses exit codes, stops runs and downloads. It knows no command.

`answer_to` decides how a run answers a signal. It is pure: handlers and tasks are around it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType
from typing import Any, NoReturn, TypeVar

import structlog
import typer
from rich.text import Text

from spot_async.base.processes.private_directory import remove_private_directories
from spot_async.base.processes.resources import raise_open_file_limit, tune_gc
from spot_async.base.secrets import SECRETS
from spot_async.base.tasks import error_words, first_error, in_time, root_cause
from spot_async.base.text import counted, visible
from spot_async.config import ROLES, Config
from spot_async.errors import (
    BudgetSpentError,
    ConfigError,
    DataError,
    PluginError,
    SpotError,
    StalledError,
    StorageError,
)
from spot_async.loop.resuming import StopRequest
from spot_async.models.hub import with_downloads
from spot_async.run_directory.layout import ENDS_EARLY, RunDirectory
from spot_async.run_directory.manifest import committed
from spot_async.telemetry.screen import Screen

# Those by which schedulers and clouds announce that they need the machine. Ctrl-C is a person who wants the end now.
SAVING = frozenset({signal.SIGTERM, signal.SIGUSR1})
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the run is not done, and the same command with --resume continues it


class Answer(Enum):
    SAVE = auto()  # end in order, with a checkpoint of the step that is under way
    CANCEL = auto()  # end in order, as it is
    IGNORE = auto()  # it is ending already
    LEAVE = auto()  # exit at once


def answer_to(number: signal.Signals, earlier: Sequence[signal.Signals], *, can_save: bool, saves: bool) -> Answer:
    """Return what to do about a signal after those that came earlier.

    `can_save`: the run would make a checkpoint if it were asked now. `saves`: it was asked, and ends.
    """
    if not earlier:
        return Answer.SAVE if can_save and number in SAVING else Answer.CANCEL
    if number is signal.SIGHUP:
        return Answer.IGNORE  # when a terminal closes, both the system and the shell may send this
    if saves and number in SAVING and number not in earlier:
        return Answer.IGNORE  # schedulers announce the end by one, and send the other when it comes closer
    return Answer.LEAVE


T = TypeVar("T")

BLOCKED_S = 1.0  # schedulers send two signals at once, and a loop that works hears each sooner than this
LAST_WORDS_S = 5.0  # how long each thing may take that is done before a process is ended at once

EXIT_CODES: dict[type[SpotError], int] = {ConfigError: 2, DataError: 2, StalledError: 3, BudgetSpentError: 4}


screen = Screen()
stderr = Screen(stderr=True, soft_wrap=True, highlight=False)


def run_until_stopped(
    run: Coroutine[Any, Any, T], directory: RunDirectory, wish: StopRequest | None = None, *, prompts: int = 0
) -> T:
    """Run to the end. On a failure or a signal, print one line that says why and what is saved, and exit.

    * `wish`: while it is heard, SIGTERM and SIGUSR1 say it, and the run ends by itself. Otherwise signals cancel it.
    * `prompts`: how many may be in flight at once.
    """
    received: list[signal.Signals] = []
    unheard_s: list[float] = []  # when signals arrived on which the loop has not acted
    wish = wish or StopRequest()
    saves = False

    async def stoppable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            nonlocal saves
            answer = answer_to(number, received, can_save=wish.is_heard, saves=saves)
            received.append(number)
            if answer is Answer.IGNORE:
                return
            if answer is Answer.LEAVE:
                leave_at_once(f"stopped at once by {number.name}", 128 + number, directory)
            if structlog.is_configured():  # then events go to the run's log
                structlog.get_logger().warning(ENDS_EARLY, reason=f"stopped by {number.name}")
            saves = answer is Answer.SAVE
            after = " after the step under way, with a checkpoint" if saves else ""
            screen.print(f"{number.name}: stopping{after}; once more to stop at once", highlight=False)
            if saves:
                wish.say()
            else:
                task.cancel()

        def hear(number: signal.Signals) -> None:
            stop(number)
            unheard_s.clear()

        def arrive(number: int, frame: FrameType | None) -> None:
            """See whether the loop acts on signals. One that comes long after another unheard one finds it blocked."""
            now_s = time.monotonic()
            if unheard_s and now_s - unheard_s[0] >= BLOCKED_S and number != signal.SIGHUP:
                leave_at_once(f"stopped at once by {signal.Signals(number).name}", 128 + number, directory)
            unheard_s.append(now_s)

        # Also where SIGINT was ignored, as a shell script does for a command in the background: whoever sends it to
        # this process means it. But nohup ignores SIGHUP, and that must stay.
        hears_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        numbers = [signal.SIGINT, *SAVING, *([signal.SIGHUP] if hears_hangup else [])]
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            # The loop's own handler wakes it, also if the signal comes as it begins to wait, or to another thread.
            loop.add_signal_handler(number, hear, number)
            signal.signal(number, arrive)
        try:
            return await run
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler or signal.SIG_DFL)

    tune_gc(prompts=prompts)
    raise_open_file_limit()
    try:
        result = asyncio.run(stoppable())
    except asyncio.CancelledError:
        if not received:  # nobody asked for it, so it is a bug
            raise
        end_stopped(received[0], directory)
    except (SpotError, OSError, BaseExceptionGroup) as error:
        cause = root_cause(error) if directory.path.is_dir() else gone(directory, error)
        fail(cause, code=exit_code(cause), note=saved(directory))
    if saves:
        end_stopped(received[0], directory)
    return result


def end_stopped(number: signal.Signals, directory: RunDirectory) -> NoReturn:
    """Exit after a run that a signal stopped has come down in order."""
    stderr.print(Text(f"stopped by {number.name}; {saved(directory)}"))
    raise typer.Exit(TRY_AGAIN if number in SAVING and committed(directory.path) else 128 + number) from None


def gone(directory: RunDirectory, error: BaseException) -> StorageError:
    """Return the error of a run whose directory was taken away. It replaces the error that noticed it first."""
    return StorageError(
        f"the run directory {directory.path} is gone: it was removed or renamed during the run "
        f"(noticed by: {error_words(first_error(error))})"
    )


def hung(directory: RunDirectory) -> Callable[[str], None]:
    """Return a function that ends this process for a stalled run whose event loop does not come down.

    It takes no lock and flushes no buffer, since another thread may hold them.
    """

    def exit_process(message: str) -> None:
        leave_at_once(f"error: {message}", EXIT_CODES[StalledError], directory)

    return exit_process


def leave_at_once(message: str, code: int, directory: RunDirectory | None = None) -> NoReturn:
    """Print a last line and end this process, whatever it is doing. The kernel ends the children with it.

    A second line says what is saved in a run's `directory`. Neither a disk nor a screen that hangs holds this up.
    """
    kept = in_time(lambda: saved(directory), LAST_WORDS_S) if directory is not None else None
    show_cursor = "\x1b[?25h" if screen.is_terminal else ""
    said = visible(SECRETS.struck_text("\n".join([message, *([kept] if kept is not None else []), ""])))
    in_time(lambda: os.write(2, f"{show_cursor}{said}".encode(errors="replace")), LAST_WORDS_S)
    in_time(remove_private_directories, LAST_WORDS_S)
    os._exit(code)


def exit_code(error: SpotError) -> int:
    """Return the exit code after a failure; docs/failures.md lists them all."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def saved(directory: RunDirectory) -> str:
    """Return in words what a run that ended early leaves behind."""
    if not directory.path.is_dir():
        return f"what was saved went with {directory.path}"
    if directory.purpose == "eval":
        from spot_async.evaluation.response_log import count_kept  # with problems and templates: not for --help

        kept = counted(count_kept(directory.path / "evaluation.jsonl"), "judged response")
        return f"saved: {kept}; to continue: the same command with --resume {directory.path}"
    student = directory.path / "student"
    if not student.is_symlink():
        return f"nothing was trained yet; logs are in {directory.path}"
    to_continue = f"; to continue: spot-async train --resume {directory.path}" if committed(directory.path) else ""
    return f"saved: {student.resolve().name} as {student}, metrics and samples beside it{to_continue}"


def fail(error: SpotError, *, code: int, note: str | None = None) -> NoReturn:
    """Print the failure, with its notes below it (the end of a server's log, say), and exit."""
    at_fault = error if isinstance(error, PluginError) else error.__cause__
    if isinstance(at_fault, PluginError) and at_fault.__cause__ is not None:  # the plug-in's author needs the trace
        stderr.print(Text("".join(traceback.format_exception(at_fault.__cause__)).rstrip()))
    for line in SECRETS.struck_text(str(error)).split("\n"):
        stderr.print(Text(f"error: {line}", style="red"))
    for detail in getattr(error, "__notes__", ()):
        stderr.print(Text(detail))
    if note is not None:
        stderr.print(Text(note))
    raise typer.Exit(code)


def downloaded(config: Config, *, weights: Collection[str] = ROLES) -> Config:
    """Return the configuration with the models of the hub in the cache; see `with_downloads`. Raises as that does."""
    with ending_at_once():
        return with_downloads(config, remark, weights=weights)


def remark(line: str) -> None:
    """Print a line beside what the command shows, which programs may read."""
    stderr.print(line, markup=False)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end this process inside. Nothing is started yet, and the threads of a download hear of nothing."""

    def leave(number: int, frame: Any) -> None:
        leave_at_once("stopped by SIGINT before anything was started; the same command continues", 128 + number)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
