"""Writes the stall report: everything that a person needs to see what a run waits for, in one file of text.

It has nothing that models wrote, and no contents of requests. It is pure but for the thread stacks, which only the
interpreter can write.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spot_async.base.processes import guard
from spot_async.base.processes.child import log_lines
from spot_async.base.processes.standstill import STATES
from spot_async.loop.events import WAITS_FOR
from spot_async.watchdog.culprit import RunLook, describe_request, name_culprit
from spot_async.watchdog.progress import LastCommit
from spot_async.watchdog.stacks import grouped

NAMES_SHOWN = 12  # how many tasks at the same place are named
LOG_LINES = 8
COMMAND_CHARACTERS = 200
SECRET_OPTION = re.compile(r"^--?[\w-]*(api-?key|auth-?token|hf-?token|password|secret)s?$", re.IGNORECASE)
REDACTED = "***"


@dataclass(frozen=True)
class ReportContents:
    """Everything that the report is made of."""

    title: str
    look: RunLook
    commits: Sequence[LastCommit] = ()
    counts: Mapping[str, str] = field(default_factory=dict)  # of the admission book and the stages, in words by name
    replicas: Sequence[str] = ()  # a line about each replica
    logs: Path | None = None  # the directory of those of child processes


def write_report(path: Path | None, contents: ReportContents) -> Path:
    """Write the report in place of an earlier one, or with None to a new file of its own in $TMPDIR; return where.

    Raises OSError.
    """
    if path is None:
        descriptor, name = tempfile.mkstemp(prefix="spot-async-stall-", suffix=".txt")
        os.close(descriptor)
        path = Path(name)
    with path.open("w", encoding="utf-8") as file:
        for line in report_lines(contents):
            file.write(f"{line}\n")
        file.write("\nThreads, the most recent call first\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    return path


def report_lines(contents: ReportContents) -> Iterator[str]:
    look = contents.look
    yield f"{contents.title}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}, process {os.getpid()}"
    yield f"It waits for this: {name_culprit(look)}."
    if len(look.pumps) > 1:
        yield f"Phase: {look.step}."
    for pump in look.pumps:
        waits = f", waiting for {WAITS_FOR[pump.phase]}" if pump.phase is not None else ""
        if len(look.pumps) > 1:
            yield f"The {pump.pump} pump: iteration {pump.iteration}{waits}."
        else:
            yield f"Phase: {look.step}{waits}."
        is_stall = "that is a stall" if pump.is_stalled else "it would be a stall"
        yield f"Nothing was committed for {pump.silence_s:,.0f} s; from {pump.limit_s:,.0f} s on {is_stall}."
    yield from _section("Last commits", _commits(contents.commits, look.now_s))
    yield from _section("Oldest request of each stage", _oldest(look))
    yield from _section("Counts", (f"{name}: {figures}" for name, figures in contents.counts.items()))
    yield from _section("Replicas", contents.replicas)
    yield from _section("Processes below this one", _processes())
    for path in sorted(contents.logs.glob("*.log")) if contents.logs is not None else ():
        yield from _section(f"End of {path}", _tail(path))
    yield from _section("Tasks, each down to what it awaits; those at the same place together", _tasks(look))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = [*lines]
    if found:
        yield ""
        yield title
        yield from (f"  {line}" for line in found)


def _commits(commits: Sequence[LastCommit], now_s: float) -> Iterator[str]:
    if not commits:
        yield "none since the start"
    for each in commits:
        yield f"{now_s - each.at_s:8,.0f} s ago  {each.detail}  ({each.kind}: {each.count})"


def _oldest(look: RunLook) -> Iterator[str]:
    for stage, requests in look.open.items():
        sent = [request for request in requests if request.started_s is not None]
        limit = f" of {look.limits[stage]}" if stage in look.limits else ""
        yield f"{stage}: {len(sent)}{limit} in flight, {len(requests) - len(sent)} waiting"
        for some in (sent, [request for request in requests if request.started_s is None]):
            if some:
                first = min(some, key=lambda request: request.started_s or request.asked_s)
                yield f"    {describe_request(look, stage, first)}"


def _processes() -> Iterator[str]:
    """Return a line about every living descendant. Its state shows whether somebody stopped it."""
    tree = guard.process_tree(os.getpid())
    for pid, fields in sorted(tree.items()):
        if pid != os.getpid():
            with suppress(OSError):  # the process ended meanwhile
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                command = " ".join([Path(arguments[0]).name, *without_secrets(arguments[1:])])
                yield f"{pid} {STATES.get(fields[0], fields[0])}: {command[:COMMAND_CHARACTERS]}"


def without_secrets(arguments: Iterable[str]) -> Iterator[str]:
    """Return a command line without the values of options that are called a key, a token or a password."""
    is_secret = False
    for argument in arguments:
        option, is_joined, _ = argument.partition("=")
        names_secret = SECRET_OPTION.search(option) is not None
        if is_secret:
            yield REDACTED
        else:
            yield f"{option}={REDACTED}" if names_secret and is_joined else argument
        is_secret = names_secret and not is_joined


def _tail(path: Path) -> Sequence[str]:
    try:
        return log_lines(path, LOG_LINES)
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]


def _tasks(look: RunLook) -> Iterator[str]:
    for views in grouped(look.tasks):
        oldest = views[0]
        more = f" and {len(views) - NAMES_SHOWN} more" if len(views) > NAMES_SHOWN else ""
        names = ", ".join(view.name for view in views[:NAMES_SHOWN])
        yield f"{names}{more} (for {look.now_s - oldest.seen_since_s:,.0f} s or longer)"
        yield from (f"    {line}" for line in oldest.stack)
        if oldest.awaits:
            yield f"    awaits {oldest.awaits}"
