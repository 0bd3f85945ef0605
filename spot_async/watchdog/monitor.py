"""Watches a run with a task on the event loop and a thread beside it. It is the watchdog's shell.

The task ends a silent run with `StalledError`, which takes everything down in order. The thread is for what the task
cannot see or survive: a blocked event loop, and a run that does not come down. It reports a blocked loop. Once the
silence is past its limit, it ends the process in either case, if the process is ours to end. Children die with their
parent (`base/processes/`). `report.py` writes the report.

A disk or a screen that hangs may be what the run stalls on, so neither the loop nor the thread touches them: helper
threads do (`base/tasks.py`), and are given up after some seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import structlog

from spot_async.base.events import Event
from spot_async.base.processes.child import standing_still
from spot_async.base.tasks import in_time
from spot_async.errors import StalledError
from spot_async.loop.admission import PromptState
from spot_async.loop.events import (
    EvaluationBegan,
    Phase,
    PhaseBegan,
    PhaseEnded,
    PromptEnded,
    Pump,
    ResponseJudged,
    ServersStarting,
    StepBegan,
    TrainingView,
)
from spot_async.run_directory.layout import STALLED
from spot_async.stages.stage import Stage
from spot_async.watchdog.report import RunLook, busy_threads, name_culprit, task_views, thread_place, write_report
from spot_async.watchdog.silence import PUMPS, Commit, Progress, PumpLook, SilenceLimits, look_at_pumps

REPORT = "stall-report.txt"
BEAT_S = 1.0  # between two signs of life of the event loop, and between two looks of the watching thread
BLOCKED_AFTER_S = 10.0  # the event loop counts as blocked after so long without a sign of life
COME_DOWN_S = 60.0  # how long a stalled run may take to end in order
TELL_S = 5.0  # how long the report and the line in the log may take, each
LONGEST_TELLING_S = 10 * TELL_S
FROZEN_S = 5.0  # a beat that is later than this means that the whole process did not run


@dataclass(eq=False)
class Watchdog:
    """Watches a run. Enter it on the run's loop, run `watch` there, and let it listen to the run's events.

    `exit_process(message)` ends this process at once, with the code of a stalled run. None: it is not ours to end.
    """

    limits: SilenceLimits | None  # None: it does not watch, and writes reports only when asked to
    directory: Path
    _: KW_ONLY
    exit_process: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        self._training: TrainingView | None = None  # only while it trains
        # The phase of each pump and its iteration; until they say so, what they do first.
        self._phases: dict[Pump, tuple[Phase, int]] = {
            "train": ("wait for batch", 1),
            "publish": ("wait for weights", 1),
        }
        self._evaluation_stages: Sequence[Stage[Any]] = ()  # those of the evaluation that is under way
        self._replicas: Callable[[], Sequence[str]] = tuple  # returns a line about each replica
        self._step = "start"
        self._is_stalled = False  # then the thread looks no more, and only sees to the run's end
        self._message = "the run stalled"  # and why, once that is told
        self._told = threading.Event()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._progress = Progress(self._loop.time())
        self._stalled: asyncio.Future[str] = self._loop.create_future()
        self._beats, self._beat_s = 0, self._loop.time()
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        self._thread = threading.Thread(target=self._watch_loop, name="watchdog", daemon=True)
        if self.limits is not None:
            self._thread.start()
        if self.exit_process is not None:
            self._loop.add_signal_handler(signal.SIGQUIT, self._report_when_asked)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.exit_process is not None:
            self._loop.remove_signal_handler(signal.SIGQUIT)
        self._timer.cancel()
        if self._is_stalled and self.exit_process is not None:
            return  # the thread watches over the rest of the process's end
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def on(self, event: Event) -> None:
        """Note commits. A request that ends is none, since what it was asked for may never be finished."""
        match event:
            case ServersStarting():
                self._replicas = event.replicas
            case StepBegan():
                self._commit(Commit.STEP, f"{self._step} done")
                self._step, self._training, self._evaluation_stages = event.name, event.training, ()
            case EvaluationBegan():
                self._evaluation_stages = event.stages
            case ResponseJudged():
                self._commit(Commit.RESPONSE_JUDGED, f"response {event.finished} of {event.total}", "publish")
            case PhaseBegan():
                self._phases[event.pump] = (event.name, event.iteration)
                if self._has_two_pumps:
                    self._progress.begin((event.pump,), self._loop.time())
            case PhaseEnded(pump="train", name="train"):
                self._commit(Commit.BATCH_TRAINED, f"iteration {event.iteration}", "train")
            case PhaseEnded(pump="publish", name="update weights"):
                self._commit(Commit.WEIGHTS_CONFIRMED, f"iteration {event.iteration}", "publish")
                if self._phases["train"][0] == "wait for batch":  # its requests may have waited for the update
                    self._progress.begin(PUMPS, self._loop.time())
            case PromptEnded(outcome=PromptState.QUEUED):
                self._commit(Commit.PROMPT_QUEUED, f"prompt {event.prompt.ordinal}", "train")

    def answered(self) -> None:
        """Begin the silence anew: a question of the start is answered. An endpoint may let few through a minute."""
        self._progress.begin(PUMPS, self._loop.time())

    async def watch(self) -> None:
        """Run beside everything else. Raises `StalledError` once the silence is too long and the report is written."""
        raise StalledError(await self._stalled)

    def _beat(self) -> None:
        """Give the thread a sign of life of the loop, and check the silence so far. Runs every `BEAT_S`."""
        now_s = self._loop.time()
        late_s = now_s - self._beat_s - BEAT_S
        self._beats, self._beat_s = self._beats + 1, now_s
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        if late_s > FROZEN_S:
            self._progress.forgive(late_s, now_s)
        if self._stalled.done() or not self._pumps(now_s)[0].is_stalled:
            return
        self._is_stalled = True
        self._message = self._stall_message(now_s, blocked_at=None)
        self._told.set()
        self._stalled.set_result(self._message)

    def _pumps(self, now_s: float) -> Sequence[PumpLook]:
        """Return what the pumps do, the most overdue first. Limits are put off as long as endpoints asked for."""
        phases: dict[Pump, tuple[Phase | None, int]] = {"train": (None, 0)}
        if self._training is not None:
            phases = {pump: self._phases[pump] for pump in (PUMPS if self._has_two_pumps else PUMPS[:1])}
        asked_s = max((each.longest_retry_after_s for stage in self._stages for each in list(stage.open)), default=0.0)
        return look_at_pumps(phases, self._progress, self.limits, now_s, asked_s)

    @property
    def _has_two_pumps(self) -> bool:
        return self._training is not None and not self._training.is_strict

    @property
    def _stages(self) -> list[Stage[Any]]:
        return [*self._evaluation_stages, *(self._training.stages.all if self._training is not None else ())]

    def _commit(self, kind: Commit, detail: str, pump: Pump | None = None) -> None:
        """Note a commit of this pump. In a strict run it counts for both, and so does one of neither."""
        pumps = (pump,) if pump is not None and self._has_two_pumps else PUMPS
        self._progress.commit(kind, detail, self._loop.time(), pumps)

    def _report_when_asked(self) -> None:
        look = self._look(self._loop.time(), None)
        path = self._write("What a run does right now, as asked for by SIGQUIT", look)
        self._log("info", "report", path=str(path), waits_for=name_culprit(look))

    def _stall_message(self, now_s: float, blocked_at: str | None) -> str:
        """Write the report and the run's log, and return the report's essence in one line."""
        look = self._look(now_s, blocked_at)
        path = self._write("A run that stalled", look)
        silence = f"nothing was committed for {look.pumps[0].silence_s:,.0f} s, and "
        if len(look.pumps) > 1 and blocked_at is None:  # then the culprit says for how long
            silence = ""
        see = "no report can be written" if path is None else f"see {path}"
        message = f"the run stalled: {silence}{name_culprit(look)}; {see}"
        self._log("error", STALLED, reason=message)
        return message

    def _write(self, title: str, look: RunLook) -> Path | None:
        """Write the report and return where, which is elsewhere if the run directory's disk hangs."""
        for path in (self.directory / REPORT, None):
            if written := in_time(partial(write_report, path, title, look), TELL_S):
                return written
        return None

    def _log(self, level: str, event: str, **fields: object) -> None:
        """Log an event. One that cannot be written in time is lost: what the run waits for may be its log."""
        in_time(lambda: getattr(structlog.get_logger(), level)(event, **fields), TELL_S)

    def _look(self, now_s: float, blocked_at: str | None) -> RunLook:
        counts, problems = {}, {}
        if (training := self._training) is not None:
            book = training.book
            prompts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in book.counts.items())
            counts = {
                "prompts": prompts,
                "supervision queue": f"{book.waiting} prompts",
                "places taken": f"{book.held_prompts}, with {book.held_bytes:,} bytes in the worst case",
            }
            problems = {ordinal: prompt.problem.id for ordinal, prompt in [*training.state.running.items()]}
        return RunLook(
            now_s=now_s,
            step=self._step,
            pumps=self._pumps(now_s),
            stages={stage.name: stage for stage in self._stages},
            open={stage.name: list(stage.open) for stage in self._stages},
            problems=problems,
            tasks=task_views(self._loop),
            blocked_at=blocked_at,
            standing_still=in_time(lambda: [*standing_still(os.getpid())], TELL_S) or (),
            busy_threads=busy_threads(),
            commits=self._progress.last.copy(),
            counts=counts,
            replicas=self._replicas(),
            logs=self.directory / "logs",
        )

    def _watch_loop(self) -> None:
        """Watch the loop from the thread: count the looks at which it gave no sign of life.

        Counting is better than a clock: a process that was frozen as a whole missed looks too, so it does not count as
        a blocked loop.
        """
        beats, missed, reported = self._beats, 0, False
        while not self._is_stalled and not self._ended.wait(BEAT_S):
            missed = missed + 1 if self._beats == beats else 0
            beats, blocked_s = self._beats, missed * BEAT_S
            if blocked_s < BLOCKED_AFTER_S:
                if reported:
                    self._log("warning", "event loop continues", after_s=BLOCKED_AFTER_S)
                reported = False
                continue
            place, now_s = thread_place(self._loop_thread), self._beat_s + blocked_s
            if not reported:
                self._write("A run whose event loop is blocked", self._look(now_s, place))
                self._log("warning", "event loop blocked", seconds=blocked_s, at=place)
            reported = True
            if self._pumps(now_s)[0].is_stalled:
                message = self._stall_message(now_s, place)
                if self.exit_process is not None:
                    self.exit_process(message)
                return  # it is reported, and the process is not ours to end
        if self._is_stalled and self.exit_process is not None:
            self._told.wait(LONGEST_TELLING_S)
            if not self._ended.wait(COME_DOWN_S):
                self.exit_process(self._message)
