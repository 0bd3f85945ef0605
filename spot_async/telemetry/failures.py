"""Says what goes wrong while a run continues: attempts that failed, a server that differs from its trainer, and a
student that collapses.

Failed attempts are added up: on the console once a minute, at the end, and in the run's log. Most are made again and
cost only time, so nothing else would tell of them. The report reads the log. What a server said is foreign text, which
must be made visible before it is shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from spot_async.base.events import Event
from spot_async.base.text import shortened, visible
from spot_async.errors import FailureClass
from spot_async.loop.events import IterationFinished
from spot_async.models.precision import Precision
from spot_async.run_directory.layout import ATTEMPTS_FAILED
from spot_async.run_directory.reading import FailedAttempts
from spot_async.stages.events import AttemptFailed, RequestEnded
from spot_async.telemetry.bottleneck import percent
from spot_async.telemetry.totals import Rows

SAY_EVERY_S = 60.0
FIRST_AFTER_S = 10.0  # from the first failure on, so that the line is of more than that one
KINDS_SHOWN = 5
ENTROPY = "rollout/entropy_nats"
NEVER_CALLS = (
    "more than half of the responses got no answer from the environment. What a student never calls it is not taught: "
    "if its calls do not grow, begin with one that calls more often, or show it in the prompt"
)
COLLAPSED = 0.1  # share of an iteration's entropy that the next one has left
REASON_CHARACTERS = 160
CAUSES = (
    "perhaps the trainer's weights are not the served ones (another directory, missing tensors, a tied head), or the "
    "server bends what it samples (penalties, biases), serves quantised weights, or is at another temperature; "
    "spot-async check asks it"
)


@dataclass
class StageTally:
    """The attempts of one stage."""

    attempts: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by what happened

    def __str__(self) -> str:
        """`512 of 3,200 (16 %: HTTP 500, 502, reset)`, without the share where nobody counted the other attempts."""
        failed, kinds = self.failed.total(), kinds_words(self.failed)
        if not self.attempts:
            return f"{failed:,} ({kinds})"
        return f"{failed:,} of {self.attempts:,} ({percent(failed / self.attempts)}: {kinds})"


class Tally:
    """The attempts of all stages, since it was made."""

    hears = (RequestEnded, AttemptFailed)

    def __init__(self) -> None:
        self.stages: defaultdict[str, StageTally] = defaultdict(StageTally)

    def on(self, event: Event) -> None:
        match event:
            case RequestEnded(outcome="done"):
                self.stages[event.stage].attempts += 1
            case AttemptFailed():
                stage = self.stages[event.stage]
                stage.attempts += 1
                stage.failed[event.brief] += 1

    def __str__(self) -> str:
        return ", ".join(f"{name} {each}" for name, each in self.stages.items() if each.failed)


class FailureLog:
    """The listener that adds up failed attempts. `close` it when the run ends, whatever ends it."""

    hears = (*Tally.hears, IterationFinished)

    def __init__(self, say: Callable[[str], None], iteration: int = 0) -> None:
        """`say` gets the lines for people. `iteration` is the last one that an earlier part of the run finished."""
        self._say = say
        self._iteration = iteration + 1
        self._all = Tally()
        self._lately = Tally()
        self._said_s: float | None = None
        self._to_log: dict[tuple[str, FailureClass, str], FailedAttempts] = {}

    def on(self, event: Event) -> None:
        self._all.on(event)
        self._lately.on(event)
        match event:
            case AttemptFailed():
                same = FailedAttempts(stage=event.stage, failure=event.failure, brief=event.brief)
                logged = self._to_log.setdefault((event.stage, event.failure, event.brief), same)
                logged.count += 1
                logged.lost_s += event.lost_s
                logged.reason = event.reason
                if self._said_s is None:
                    self._said_s = event.failed_s + FIRST_AFTER_S - SAY_EVERY_S
                if event.failed_s >= self._said_s + SAY_EVERY_S:
                    self._said_s = event.failed_s
                    self._tell(event.reason)
            case IterationFinished():
                self._write()
                self._iteration = event.iteration + 1

    def _tell(self, newest: str) -> None:
        self._write()
        reason = visible(shortened(newest, REASON_CHARACTERS)).replace("\n", " ")
        self._say(f"attempts that failed lately: {self._lately}; the newest: {reason}")
        self._lately = Tally()

    def close(self) -> None:
        self._write()
        if failed := str(self._all):
            self._say(f"attempts that failed in all: {failed}")

    def _write(self) -> None:
        for each in self._to_log.values():
            each.iteration = self._iteration
            structlog.get_logger().info(ATTEMPTS_FAILED, **msgspec.structs.asdict(each))
        self._to_log.clear()


def kinds_words(kinds: Counter[str]) -> str:
    """Return what happened, the most frequent first: `HTTP 500, 502, reset`."""
    names = [name for name, _ in kinds.most_common(KINDS_SHOWN)]
    statuses = [name.removeprefix("HTTP ") for name in names if name.startswith("HTTP ")]
    words = dict.fromkeys(f"HTTP {', '.join(statuses)}" if name.startswith("HTTP ") else name for name in names)
    return ", ".join(words) + (" and others" if len(kinds) > KINDS_SHOWN else "")


def mismatch_words(metrics: Mapping[str, float], precision: Precision) -> str:
    """Return what is wrong with the mismatch of one iteration (`trainer/metrics.py`); empty if rounding explains it."""
    mean = metrics.get("mismatch_mean", 0.0)
    if mean <= precision.mean_nats:
        return ""
    return (
        f"trainer and student's server give the same tokens log-probabilities that are {mean:.2g} nats apart on "
        f"average ({metrics['mismatch_max']:.2g} at most), where {precision.words} makes less than "
        f"{precision.mean_nats:g}: {CAUSES}"
    )


class EntropyHistory:
    """Remembers the student's entropy, to say when a branch loss that has no bound (`baseline`) makes it collapse."""

    def __init__(self, rows: Rows, baseline: float) -> None:
        """Begin with the rows of the iterations that the run has already."""
        self._nats = {int(row["iteration"]): row.get(ENTROPY, 0.0) for row in rows}
        self._baseline = baseline

    def warning(self, finished: IterationFinished) -> str:
        """Return how far it fell since the iteration before; empty while that is not to a tenth."""
        before = self._nats.get(finished.iteration - 1, 0.0)
        now = self._nats[finished.iteration] = finished.means.get(ENTROPY, before)
        if now > COLLAPSED * before or not before:
            return ""
        return (
            f"the student's entropy fell from {before:.2g} to {now:.2g} nats a token within an iteration. With "
            f"policy.baseline={self._baseline:g} nothing ends the branch's push: lower policy.baseline, or policy.beta"
        )


def unplayed_words(means: Mapping[str, float]) -> str:
    """Return what is wrong if most responses got nothing from the environment, or no answer; empty if they did."""
    if means.get("environment/calls", 1.0) < 1 / 2:
        return NEVER_CALLS
    if means.get("environment/out_of_turns", 0.0) > 1 / 2:
        return "more than half of the responses ran out of turns, and have no answer: raise environment.max_turns"
    return ""


class IterationWarning:
    """The listener that says what is wrong with an iteration, after the first one with which something is.

    `words` returns what; empty if nothing is. The run's log names it `event`.
    """

    def __init__(self, event: str, words: Callable[[IterationFinished], str], warn: Callable[[str], None]) -> None:
        self._event = event
        self._words = words
        self._warn = warn
        self._has_spoken = False

    def on(self, event: Event) -> None:
        if not isinstance(event, IterationFinished) or self._has_spoken:
            return
        if words := self._words(event):
            self._has_spoken = True
            self._warn(f"iteration {event.iteration}: {words}")
            structlog.get_logger().warning(self._event, step=event.iteration, reason=words)
