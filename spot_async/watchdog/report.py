"""Says what a run waits for: in one line that names who is at fault, and in a file with everything that a person needs.

In a phase of the trainer's, whoever has to act then is at fault. While a batch is waited for, it is the oldest request
that a stage sent. A prompt that is at no stage, although its coroutine runs, waits inside the policy's own code.

The report has nothing that models wrote, and no contents of requests. It shows where asyncio tasks are, down whole
chains of awaits, and where threads are. `Task.get_stack` shows only the outermost coroutine of a suspended task, so
stacks follow the coroutines' own links.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import platform
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from spot_async.base.processes.child import STATES, log_lines, processes_below
from spot_async.base.text import rough_time
from spot_async.errors import LONG_PAUSE_S
from spot_async.loop.events import WAITS_FOR, Phase, Pump
from spot_async.stages.services import stage_server
from spot_async.stages.stage import OpenRequest, Stage
from spot_async.watchdog.silence import Commit, LastCommit, PumpLook

ASYNCIO = sysconfig.get_path("stdlib") + "/asyncio/"
OURS = str(Path(__file__).parents[1])
HELPERS = "asyncio_"  # how asyncio names the threads of `to_thread`
IDLE = "concurrent/futures/thread.py"  # where they wait for work
# Of system calls on an open file: read, write, pwrite64, writev, flock, fsync, fdatasync, ftruncate.
ON_FILES = {
    "x86_64": {0, 1, 18, 20, 73, 74, 75, 77},
    "aarch64": {63, 64, 68, 66, 32, 82, 83, 46},
}.get(platform.machine(), set())


@dataclass(frozen=True)
class TaskView:
    """One task that has not ended."""

    name: str
    stack: tuple[str, ...]  # lines `file:line in function`, the outermost coroutine first
    awaits: str  # what the innermost coroutine waits for

    @property
    def place(self) -> str:
        """The innermost line that is not asyncio's."""
        of_others = [line for line in self.stack if not line.startswith(ASYNCIO)]
        return (of_others or [*self.stack] or ["no line of Python"])[-1]


def task_views(loop: asyncio.AbstractEventLoop) -> list[TaskView]:
    """Return all tasks of a loop, by name. May be called from any thread."""
    views = [TaskView(task.get_name(), *_await_chain(task.get_coro())) for task in asyncio.all_tasks(loop)]
    return sorted(views, key=lambda view: view.name)


def _await_chain(awaitable: object) -> tuple[tuple[str, ...], str]:
    """Return the lines from a coroutine down to the innermost one, and what that one waits for as text."""
    lines: list[str] = []
    while True:
        for kind in ("cr", "gi", "ag"):  # attributes of coroutines, generator-based ones and asynchronous generators
            frame: FrameType | None = getattr(awaitable, f"{kind}_frame", None)
            if frame is not None:
                lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
                awaitable = getattr(awaitable, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            says_something = awaitable is not None and type(awaitable).__name__ != "FutureIter"
            return tuple(lines), repr(awaitable)[:200] if says_something else ""


def thread_place(ident: int) -> str:
    """Return the line that a thread is at, the line of ours that it was called from, and the file that it waits for.

    While the loop is blocked, its thread is at the line that blocks it.
    """
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "no line of Python"
    places = [f"{line.filename}:{line.lineno} in {line.name}" for line in traceback.extract_stack(frame)]
    ours = [place for place in places if place.startswith(OURS)]
    place = places[-1] if not ours or places[-1] == ours[-1] else f"{places[-1]}, called at {ours[-1]}"
    thread = next((each for each in threading.enumerate() if each.ident == ident), None)
    opened = _opened_by_call(thread.native_id) if thread is not None and thread.native_id is not None else None
    return place if opened is None else f"{place} ({opened} does not answer)"


def _opened_by_call(thread: int) -> str | None:
    """Return the file that a thread of this process, by its native id, reads or writes now; None if that is unknown."""
    with suppress(OSError, ValueError):
        number, descriptor, *_ = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
        if int(number) in ON_FILES:
            path = str(Path(f"/proc/self/fd/{int(descriptor, 16)}").readlink())
            return "the screen" if int(descriptor, 16) in (1, 2) or path.startswith(("/dev/pts/", "/dev/tty")) else path
    return None


def busy_threads() -> list[str]:
    """Return the lines that the event loop's helper threads are at, such as to write a checkpoint."""
    frames = sys._current_frames()
    helpers = [each for each in threading.enumerate() if each.name.startswith(HELPERS) and each.ident in frames]
    return [
        thread_place(each.ident)
        for each in helpers
        if each.ident is not None and not frames[each.ident].f_code.co_filename.endswith(IDLE)
    ]


OF_EVALUATION = {"evaluation": "student", "evaluation verify": "verifier"}
OF_TRAINER: dict[Phase | None, str] = {
    "train": "the trainer has not answered",
    "write weights": "the trainer has not written the weights",
    "update weights": "the student's servers have not confirmed the weights",
}
PUMP_NAMES: dict[Pump, str] = {"train": "the trainer", "publish": "publishing"}
NAMES_SHOWN = 12  # how many tasks at the same place are named
LOG_LINES = 8


@dataclass(frozen=True)
class RunLook:
    """What the watchdog knows of a run at one moment."""

    now_s: float
    step: str  # the step of the run, as the console shows it
    pumps: Sequence[PumpLook]  # those that are watched, the most overdue first
    stages: Mapping[str, Stage[Any]]
    open: Mapping[str, Sequence[OpenRequest]]  # by stage
    problems: Mapping[int, str]  # problem ids of running prompts, by ordinal
    tasks: Sequence[TaskView]
    blocked_at: str | None  # the line that blocks the event loop
    standing_still: Sequence[str]  # processes of the run that were stopped or wait for a disk, in words
    busy_threads: Sequence[str]  # lines that threads beside the event loop are at
    commits: Mapping[Commit, LastCommit]
    counts: Mapping[str, str]  # of prompts, in words by name
    replicas: Sequence[str]  # a line about each
    logs: Path  # the directory of those of child processes

    def age_s(self, request: OpenRequest) -> float:
        """Return for how long a server has had a request, or for how long it has waited for its turn."""
        return self.now_s - (request.asked_s if request.started_s is None else request.started_s)

    def oldest(self, *, sent: bool) -> list[tuple[str, OpenRequest]]:
        """Return the requests that a server has, or those that wait for their turn, with their stages, oldest first."""
        found = [
            (stage, each) for stage, some in self.open.items() for each in some if (each.started_s is not None) == sent
        ]
        return sorted(found, key=lambda each: -self.age_s(each[1]))


def name_culprit(look: RunLook) -> str:
    """Return who or what the run waits for, and which of its processes and threads stand still meanwhile.

    Where two pumps are watched, the most overdue one is looked at, and the other is said to continue or to wait.
    """
    if look.blocked_at is not None:
        culprit = f"the event loop is blocked at {look.blocked_at}"
    elif len(look.pumps) > 1:
        culprit = f"{_culprit_of_pump(look)}; {_what_other_does(*look.pumps)}"
    else:
        culprit = _culprit(look)
    return "; ".join([culprit, *look.standing_still, *(f"a thread is at {place}" for place in look.busy_threads)])


def _culprit_of_pump(look: RunLook) -> str:
    """Return whom the most overdue of two pumps waits for. Only requests that can hold it up count."""
    pump = look.pumps[0]
    of_training = {stage: requests for stage, requests in look.open.items() if stage_server(stage) is not None}
    match pump.phase:
        case "train" | "write weights" | "update weights" as phase:
            weights = f" of iteration {pump.iteration}" if phase != "train" else ""
            return f"{OF_TRAINER[phase]}{weights} for {pump.silence_s:,.0f} s"
        case "drain":
            waits = f"the weights of iteration {pump.iteration} wait for requests under way at the student"
            sent = [each for each in look.oldest(sent=True) if stage_server(each[0]) == "student"]
            return f"{waits}: {describe_request(look, *sent[0])}" if sent else waits
        case "evaluate" if pump.pump == "publish":
            of_evaluation = {stage: requests for stage, requests in look.open.items() if stage not in of_training}
            if any(of_evaluation.values()):
                return _culprit(replace(look, open=of_evaluation, problems={}))
            return f"the evaluation of iteration {pump.iteration} has judged no response for {pump.silence_s:,.0f} s"
        case _:
            return _culprit(replace(look, open=of_training))


def _what_other_does(pump: PumpLook, other: PumpLook) -> str:
    name = PUMP_NAMES[other.pump]
    if other.waits_for_other:
        return f"{name} waits for it"
    if other.silence_s < pump.silence_s / 2:
        return f"{name} continues"
    return f"{name} has committed nothing for {other.silence_s:,.0f} s either"


def _culprit(look: RunLook) -> str:
    pump = look.pumps[0]
    if pump.phase in OF_TRAINER:
        return OF_TRAINER[pump.phase]
    sent, waiting = look.oldest(sent=True), look.oldest(sent=False)
    if sent and look.age_s(sent[0][1]) >= pump.silence_s / 2:
        return describe_request(look, *sent[0])
    at_stages = {request.priority[0] for requests in look.open.values() for request in requests}
    if outside := [ordinal for ordinal in look.problems if ordinal not in at_stages]:
        first = min(outside)  # in admission order
        place = next((view.place for view in look.tasks if view.name == f"prompt {first}"), "an unknown place")
        return f"{_prompt(look, first)} waits in the policy's own code, at {place}"
    if sent:  # requests come and go, since none is as old as the silence, but none leads to a commit
        return f"requests are answered but no prompt finishes; of the open ones, {describe_request(look, *sent[0])}"
    if waiting:
        return describe_request(look, *waiting[0])
    if pump.phase == "wait for batch":
        return "no prompt is being supervised, and none is admitted"
    return f"the run has been {look.step} for {pump.silence_s:,.0f} s"


def describe_request(look: RunLook, stage: str, request: OpenRequest) -> str:
    """Return an open request in words: where, for whom, for how long, how often it was sent."""
    of_training = stage_server(stage)
    server = of_training or OF_EVALUATION.get(stage, "server")
    whose = _prompt(look, request.priority[0]) if of_training else f"problem {request.priority[0]}"
    since = f"for {look.age_s(request):,.0f} s"
    if request.started_s is None:
        return f"stage {stage} of the {server} has given {whose} no turn {since} ({_in_flight(look, stage)})"
    at = f" ({request.replica})" if request.replica not in (None, "", server) else ""
    asked_s = request.longest_retry_after_s
    pause = f", paused for up to {rough_time(asked_s)} at a time as it asked" if asked_s >= LONG_PAUSE_S else ""
    return f"stage {stage} of the {server}{at} has not answered {since}: {whose}, sent {request.attempts} x{pause}"


def _in_flight(look: RunLook, stage: str) -> str:
    sent = sum(each.started_s is not None for each in look.open[stage])
    return f"{sent} of {look.stages[stage].concurrency} in flight, {len(look.open[stage]) - sent} waiting"


def _prompt(look: RunLook, ordinal: int) -> str:
    problem = look.problems.get(ordinal)
    return f"prompt {ordinal} (problem {problem})" if problem is not None else f"prompt {ordinal}"


def write_report(path: Path | None, title: str, look: RunLook) -> Path:
    """Write the report in place of an earlier one, or with None to a new file of its own in $TMPDIR; return where.

    Raises OSError.
    """
    if path is None:
        descriptor, name = tempfile.mkstemp(prefix="spot-async-stall-", suffix=".txt")
        os.close(descriptor)
        path = Path(name)
    with path.open("w", encoding="utf-8") as file:
        for line in _report_lines(title, look):
            file.write(f"{line}\n")
        file.write("\nThreads, the most recent call first\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    return path


def _report_lines(title: str, look: RunLook) -> Iterator[str]:
    yield f"{title}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}, process {os.getpid()}"
    yield f"It waits for this: {name_culprit(look)}."
    yield f"Phase: {look.step}."
    for pump in look.pumps:
        if pump.phase is not None:
            yield f"The {pump.pump} pump: iteration {pump.iteration}, waiting for {WAITS_FOR[pump.phase]}."
        is_stall = "that is a stall" if pump.is_stalled else "it would be a stall"
        yield f"Nothing was committed for {pump.silence_s:,.0f} s; from {pump.limit_s:,.0f} s on {is_stall}."
    yield from _section("Last commits", _commits(look))
    yield from _section("Oldest request of each stage", _oldest(look))
    yield from _section("Counts", (f"{name}: {figures}" for name, figures in look.counts.items()))
    yield from _section("Replicas", look.replicas)
    processes = (f"{name}: {STATES.get(state, state)}" for name, state in processes_below(os.getpid()))
    yield from _section("Processes below this one", processes)
    for path in sorted(look.logs.glob("*.log")):
        yield from _section(f"End of {path}", _tail(path))
    yield from _section("Tasks, each down to what it awaits; those at the same place together", _tasks(look))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = [*lines]
    if found:
        yield ""
        yield title
        yield from (f"  {line}" for line in found)


def _commits(look: RunLook) -> Iterator[str]:
    if not look.commits:
        yield "none since the start"
    for kind, last in sorted(look.commits.items(), key=lambda each: -each[1].at_s):
        yield f"{look.now_s - last.at_s:8,.0f} s ago  {last.detail}  ({kind}: {last.count})"


def _oldest(look: RunLook) -> Iterator[str]:
    for name, each in look.stages.items():
        done = each.counters
        so_far = f"{done.completed} done, {done.failed} failed, {done.retried} sent again"
        yield f"{name}: {_in_flight(look, name)}; {so_far}"
        for requests in (look.oldest(sent=True), look.oldest(sent=False)):
            of_stage = [request for stage, request in requests if stage == name]
            yield from (f"    {describe_request(look, name, oldest)}" for oldest in of_stage[:1])


def _tail(path: Path) -> Sequence[str]:
    try:
        return log_lines(path, LOG_LINES)
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]


def _tasks(look: RunLook) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[TaskView]] = {}  # of tasks at the same place
    for view in look.tasks:
        groups.setdefault(view.stack, []).append(view)
    for views in groups.values():
        more = f" and {len(views) - NAMES_SHOWN} more" if len(views) > NAMES_SHOWN else ""
        names = ", ".join(view.name for view in views[:NAMES_SHOWN])
        yield f"{names}{more}"
        yield from (f"    {line}" for line in views[0].stack)
        if views[0].awaits:
            yield f"    awaits {views[0].awaits}"
