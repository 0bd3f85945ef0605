"""Keeps a sink from ending or holding up its run: whatever only shows must never end what works.

A sink that fails, or that takes nothing any more, is dropped. That is said once when it happens and once more at the
end. Nothing is lost with it, since metrics.jsonl holds all that a sink gets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, Self

import structlog

from spot_async.base.tasks import error_words, in_time
from spot_async.base.text import shortened
from spot_async.errors import ConfigError

FINISH_TIMEOUT_S = 60.0  # W&B still sends what it has
ABANDON_TIMEOUT_S = 1.0
MOST_WAITING = 1000  # calls; a sink behind which more wait has stopped to take any
REASON_CHARACTERS = 300

Warn = Callable[[str], None]


class MetricSink(Protocol):
    """Takes the metrics of each iteration, and texts of an evaluation by name (Markdown), which it may leave out."""

    def write(self, iteration: int, metrics: Mapping[str, float], texts: Mapping[str, str] = {}) -> None: ...

    def go_back(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Continue after these rows of metrics.jsonl, the run's so far. Later iterations are written once more."""

    def conclude(self, iteration: int, figures: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
        """Take the evaluation after training, of the weights of the last iteration, which is written already."""


def split_row(row: Mapping[str, float]) -> tuple[int, dict[str, float]]:
    """Return the iteration of a row of metrics.jsonl, and the metrics that sinks get."""
    return int(row["iteration"]), {name: value for name, value in row.items() if name not in ("iteration", "time")}


@dataclass(eq=False)
class SideSink:
    """A context manager around one that gives a sink. What is called on it never raises, but for a ConfigError.

    The sink works on a thread of its own, so that a disk or a server that hangs holds up nothing. Leaving waits for it,
    but no longer than `FINISH_TIMEOUT_S`.
    """

    name: str
    opened: AbstractContextManager[MetricSink]
    warn: Warn
    _: KW_ONLY
    # Called in place of waiting longer for a sink that is lost. It may hang or raise too.
    abandon: Callable[[], object] = lambda: None
    _lost: str = field(default="", init=False)  # why
    _sink: MetricSink | None = field(default=None, init=False)  # while it takes something

    def __post_init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)

    def __enter__(self) -> Self:
        try:
            self._sink = self.opened.__enter__()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code, whose failures are its own
            self._lose(error_words(error))
        self._thread.start()
        return self

    def write(self, iteration: int, metrics: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
        self._call(lambda sink: sink.write(iteration, metrics, texts))

    def go_back(self, rows: Sequence[Mapping[str, float]]) -> None:
        self._call(lambda sink: sink.go_back(rows))

    def conclude(self, iteration: int, figures: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
        self._call(lambda sink: sink.conclude(iteration, figures, texts))

    def __exit__(self, *exc_info: Any) -> None:
        self._calls.put(partial(self._try, partial(self.opened.__exit__, *exc_info)))
        self._calls.put(None)
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._lose(f"it did not finish within {FINISH_TIMEOUT_S:g} s")
        if self._lost:
            in_time(partial(self._try, self.abandon), ABANDON_TIMEOUT_S)
            self.warn(f"{self.name} was lost during the run ({self._lost}); metrics.jsonl has everything")

    def _call(self, call: Callable[[MetricSink], object]) -> None:
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(partial(self._try, lambda: self._sink and call(self._sink)))
        else:
            self._lose(f"it has not taken the last {MOST_WAITING} iterations")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - as above
            self._lose(error_words(error))

    def _lose(self, reason: str) -> None:
        self._sink = None
        if self._lost:
            return
        self._lost = shortened(reason, REASON_CHARACTERS)
        structlog.get_logger().warning("sink lost", sink=self.name, reason=self._lost)
        self.warn(f"{self.name} is lost, and the run continues without it: {self._lost}")
