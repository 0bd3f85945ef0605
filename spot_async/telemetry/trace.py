"""Writes what happened in a run as `trace.json`, in Chrome's trace-event format: open it in ui.perfetto.dev.

It has these tracks:

* the trainer: iterations, and phases with the stage that was waited for
* in an asynchronous run, the publishing of its weights beside the trainer, and the iterations trained and served
* the prompts' coroutines, with an arrow from each to the training step that it ended in
* each server that had something to do: requests in flight
* each stage that had something to do: its requests, on as many lanes as were busy at once, and in these the
  attempts that failed, with the pauses after them; those done within `FOLDED_S` are only counted
* counters: requests that wait and are in flight, finished supervision, tokens per second

The file is a JSON array that is written as the run goes. The format allows the closing bracket to be missing, so a
killed run's file opens as well. Long runs are thinned out, except for the trainer's track. The first `SHARE_BYTES` have
the requests of every iteration, the next as many bytes those of every second, then every fourth, and so on. The
trainer's track says which.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import structlog

from spot_async.base.events import Event
from spot_async.base.text import visible
from spot_async.loop.admission import PromptState
from spot_async.loop.events import PhaseEnded, PromptEnded, WeightsServed
from spot_async.loop.orchestrator import Orchestrator
from spot_async.run_directory.layout import append_whole
from spot_async.stages.events import RequestAsked, RequestEnded
from spot_async.stages.services import stage_server

Trace: TypeAlias = Callable[[Orchestrator], None]  # makes it follow an orchestrator

SHARE_BYTES = 16 << 20
BUFFER_BYTES = 1 << 18
COUNTER_INTERVAL_S = 0.05
RATE_INTERVAL_S = 0.5
FOLDED_S = 0.001  # verdicts of an immediate verifier would be lanes that nobody can see, most of the file

# Process ids, which stand for groups of tracks. They are far from thread ids, since viewers draw a thread with its
# process's id as the main thread.
TRAINER, PROMPTS, SERVERS, FIRST_STAGE = 1001, 1002, 1003, 1004
ITERATIONS, PHASES, PUBLISHING = 1, 2, 3  # thread ids of the trainer's tracks


@contextmanager
def trace_to(path: Path) -> Iterator[Trace]:
    """Write a trace while inside. Call what is given for each orchestrator that the run has, before it runs."""
    file = TraceFile(path)

    def follow(orchestrator: Orchestrator) -> None:
        orchestrator.stages.events.subscribe(TraceRecorder(file, orchestrator))
        file.flush()  # viewers do not open an empty file

    try:
        yield follow
    finally:
        file.close()


class TraceFile:
    """A growing JSON array of events. An event that cannot be written ends the trace, not the run."""

    def __init__(self, path: Path) -> None:
        self.bytes = 0
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._pending = bytearray()
        self._separator = b"[\n"
        self._file: FileIO | None = None
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            structlog.get_logger().warning("no trace", path=str(path), error=str(error))

    def add(self, event: dict[str, Any]) -> None:
        line = self._separator + self._encode(event)
        self._separator = b",\n"
        self._pending += line
        self.bytes += len(line)
        if len(self._pending) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all events that are buffered. The file always ends with a whole event."""
        data = bytes(self._pending)
        self._pending.clear()
        if self._file is None or self._file.closed:
            return
        try:
            append_whole(self._file, data)
        except OSError as error:
            structlog.get_logger().warning("trace ends early", path=str(self._path), error=str(error))
            self._file.close()

    def close(self) -> None:
        self._pending += b"\n]\n" if self.bytes else b"[]\n"
        self.flush()
        if self._file is not None:
            self._file.close()


class Lanes:
    """Lays spans that overlap out on as few lanes as possible. Spans must come in the order of their ends."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, int]] = []  # (end of its last span, lane), ascending

    def __len__(self) -> int:
        return len(self._ends)

    def place(self, start: int, end: int) -> int:
        """Return a lane that is free from `start` on: of several the one that was busy last, and else a new one."""
        free = bisect_right(self._ends, (start, len(self._ends)))
        lane = self._ends.pop(free - 1)[1] if free else len(self._ends)
        insort(self._ends, (end, lane))
        return lane


class TraceRecorder:
    """The listener that writes requests, prompts and phases as they end. Times in the file are the loop's."""

    def __init__(self, file: TraceFile, orchestrator: Orchestrator) -> None:
        self._file = file
        self._stages = orchestrator.stages
        self._book = orchestrator.book
        self._lanes: dict[int, Lanes] = {}
        self._process_ids = {stage.name: FIRST_STAGE + i for i, stage in enumerate(self._stages.all)}
        self._folded: Counter[str] = Counter()  # the iteration's requests that are counted alone, by stage
        self._used: set[str] = set()  # stages that have a track already
        self._servers: set[str] = set()  # servers that have a track already
        self._counters = Counters(file)
        self._recorded = True  # whether the requests of this iteration are written
        self._stride = 1
        self._iteration_started_s = 0.0
        self._arrows: set[int] = set()  # prompts whose arrow has begun and not ended
        self._last_change_s: float | None = None
        self._shows_publishing = not orchestrator.is_strict  # in a strict run the trainer's own phases show it
        self._weights = {"trained": 0, "served": 0}  # the iterations that made them
        self._name("trainer", TRAINER)
        self._name("iterations", TRAINER, ITERATIONS)
        self._name("trainer", TRAINER, PHASES)
        if self._shows_publishing:
            self._name("publishing", TRAINER, PUBLISHING)
        self._name("prompts", PROMPTS)

    def on(self, event: Event) -> None:
        match event:
            case RequestAsked() if self._recorded:
                self._load_changes(event.at_s)
            case RequestEnded() if self._recorded:
                self._load_changes(event.ended_s)
                self._add_request(event)
            case PromptEnded() if self._recorded:
                self._add_prompt(event)
            case PhaseEnded(pump="train"):
                self._add_phase(event)
            case PhaseEnded(pump="publish") if self._shows_publishing:
                args = {"iteration": event.iteration}
                self._slice(TRAINER, PUBLISHING, event.name, event.started_s, event.ended_s, args)
            case WeightsServed():
                self._count_weights("served", event.iteration, event.at_s)

    def _add_request(self, span: RequestEnded) -> None:
        if span.outcome == "done" and span.ended_s - span.started_s < FOLDED_S and not span.failed:
            self._folded[span.stage] += 1
            return
        ordinal, *rest = span.priority
        args: dict[str, Any] = {"prompt": ordinal, "waited_ms": round(1e3 * (span.started_s - span.asked_s), 3)}
        if rest:
            args["part"] = rest
        if span.outcome != "done":
            args["outcome"] = span.outcome
        elif span.tokens:
            args["tokens"] = span.tokens
        if span.replica:
            args["server"] = span.replica
        # Requests are named by stage, since viewers sum up by name. The arguments say which request it is.
        process_id = self._process_of(span.stage)
        lane = self._slice(process_id, None, span.stage, span.started_s, span.ended_s, args)
        for attempt in span.failed:
            said = {"server": attempt.replica} if attempt.replica else {}
            said |= {"failure": attempt.failure.value, "reason": visible(attempt.reason)}
            self._slice(process_id, lane, f"failed: {attempt.brief}", attempt.sent_s, attempt.failed_s, said)
            if attempt.delay_s is not None:
                resumed_s = min(attempt.failed_s + attempt.delay_s, span.ended_s)
                self._slice(process_id, lane, "back-off", attempt.failed_s, resumed_s, {})

    def _load_changes(self, at_s: float) -> None:
        """Write counters, if they are due, with the values that were true since the last change."""
        last_s, self._last_change_s = self._last_change_s, at_s
        if last_s is not None and last_s < at_s and self._counters.due(at_s):
            self._count(last_s)

    def _add_prompt(self, span: PromptEnded) -> None:
        started, ended = microseconds(span.started_s), microseconds(span.ended_s)
        ordinal = span.prompt.ordinal
        args = {"prompt": ordinal, "outcome": span.outcome}
        lane = self._slice(PROMPTS, None, "prompt", span.started_s, span.ended_s, args)
        if span.outcome is PromptState.QUEUED:
            # An arrow belongs to the slice that is open at its time, so it leaves just before the end.
            self._arrow("s", ordinal, PROMPTS, lane, max(started, ended - 1))
            self._arrows.add(ordinal)

    def _add_phase(self, span: PhaseEnded) -> None:
        args = {"iteration": span.iteration}
        self._slice(TRAINER, PHASES, span.name, span.started_s, span.ended_s, args)
        if span.name == "wait for batch":
            self._iteration_started_s = span.started_s
            for wait in span.waits:
                name = f"waits for {wait.stage or 'nothing known'}"
                self._slice(TRAINER, PHASES, name, wait.started_s, wait.ended_s, args)
        elif span.name == "train":
            self._count_weights("trained", span.iteration, span.ended_s)
            for ordinal in self._arrows.intersection(span.ordinals):
                self._arrow("f", ordinal, TRAINER, PHASES, microseconds(span.started_s))
            self._arrows.difference_update(span.ordinals)
        elif span.name == "update weights":
            self._finish_iteration(span)
        if self._recorded:
            self._count(span.ended_s)
        self._file.flush()

    def _count_weights(self, name: str, iteration: int, at_s: float) -> None:
        if self._shows_publishing:
            self._weights = {**self._weights, name: iteration}
            self._counters.set(TRAINER, "weights", microseconds(at_s), self._weights)

    def _finish_iteration(self, span: PhaseEnded) -> None:
        args: dict[str, Any] = {"prompts": len(span.ordinals)}
        if self._folded:
            args["brief"], self._folded = dict(self._folded), Counter()
        if not self._recorded:
            args["requests"] = f"not recorded: by now the file keeps those of one iteration in {self._stride}"
        self._slice(TRAINER, ITERATIONS, f"iteration {span.iteration}", self._iteration_started_s, span.ended_s, args)
        shares = self._file.bytes // SHARE_BYTES
        self._stride = max(self._stride, 1 << shares)
        self._recorded = (span.iteration + 1) % self._stride == 0
        self._last_change_s = span.ended_s

    def _slice(
        self, process_id: int, thread_id: int | None, name: str, started_s: float, ended_s: float, args: dict[str, Any]
    ) -> int:
        """Write one span, and return its thread. Without a thread, it is laid out on a lane of the process."""
        started, ended = microseconds(started_s), microseconds(ended_s)
        if thread_id is None:
            lanes = self._lanes.setdefault(process_id, Lanes())
            known = len(lanes)
            thread_id = 1 + lanes.place(started, ended)  # viewers treat thread 0 specially
            if len(lanes) > known:
                self._name(f"lane {thread_id}", process_id, thread_id)
        self._file.add(
            {
                "ph": "X",
                "pid": process_id,
                "tid": thread_id,
                "name": name,
                "ts": started,
                "dur": ended - started,
                "args": args,
            }
        )
        return thread_id

    def _arrow(self, end: str, ordinal: int, process_id: int, thread_id: int, at: int) -> None:
        event = {"ph": end, "id": ordinal, "cat": "prompt", "name": "trained in", "pid": process_id, "tid": thread_id}
        self._file.add(event | {"ts": at} | ({"bp": "e"} if end == "f" else {}))

    def _count(self, at_s: float) -> None:
        """Write the counters as they are now, which they have been since `at_s`."""
        at = microseconds(at_s)
        at_servers: Counter[str] = Counter()
        for stage in self._stages.all:
            if stage.open or stage.name in self._used:
                values = {"in flight": stage.in_flight, "waiting": stage.waiting}
                self._counters.set(self._process_of(stage.name), stage.name, at, values)
            at_servers.update(request.replica for request in stage.open if request.replica)
        if at_servers and not self._servers:
            self._name("servers", SERVERS)
        self._servers |= at_servers.keys()
        for name in sorted(self._servers):
            self._counters.set(SERVERS, name, at, {"in flight": at_servers[name]})
        self._counters.set(TRAINER, "finished supervision", at, {"prompts": self._book.waiting})
        self._counters.set_rate(PROMPTS, "tokens generated", at_s, self._stages.tokens_generated)
        self._counters.looked_s = at_s

    def _process_of(self, stage: str) -> int:
        """Return a stage's process id. It is named when it is first used, so that unused stages have no track."""
        process_id = self._process_ids[stage]
        if stage not in self._used:
            self._used.add(stage)
            server = stage_server(stage)
            self._name(stage if server is None else f"{server}: {stage}", process_id)
        return process_id

    def _name(self, name: str, process_id: int, thread_id: int | None = None) -> None:
        """Name a process or one of its threads. Viewers order both by number."""
        kind, number = ("process", process_id) if thread_id is None else ("thread", thread_id)
        for said, args in (("name", {"name": name}), ("sort_index", {"sort_index": number})):
            event = {"ph": "M", "pid": process_id, "tid": thread_id or 0, "name": f"{kind}_{said}", "args": args}
            self._file.add(event)


class Counters:
    """Writes counters, but only those that have changed, and not more often than anyone can see."""

    def __init__(self, file: TraceFile) -> None:
        self.looked_s = float("-inf")
        self._file = file
        self._values: dict[tuple[int, str], dict[str, int]] = {}
        self._rate_since: tuple[float, int] | None = None  # time and total when the rate was written last

    def due(self, now_s: float) -> bool:
        return now_s - self.looked_s >= COUNTER_INTERVAL_S

    def set(self, process_id: int, name: str, at: int, values: dict[str, int]) -> None:
        if self._values.get((process_id, name)) == values:
            return
        self._values[process_id, name] = values
        self._file.add({"ph": "C", "pid": process_id, "name": name, "ts": at, "args": values})

    def set_rate(self, process_id: int, name: str, at_s: float, total: int) -> None:
        """Write the growth of `total` per second since this was last written."""
        since_s, before = self._rate_since or (at_s, total)
        if self._rate_since is not None and at_s - since_s < RATE_INTERVAL_S:
            return
        self._rate_since = (at_s, total)
        if at_s > since_s:
            values = {"tokens/s": round((total - before) / (at_s - since_s))}
            # The rate holds for the whole interval, so it is written at its beginning.
            self.set(process_id, name, microseconds(since_s), values)


def microseconds(seconds: float) -> int:
    """Return whole microseconds, the format's unit. Rounding keeps order, so that spans still touch and nest."""
    return round(1e6 * seconds)
