"""What only shows a run must never end it: sinks that fail or hang are dropped, and people are told."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager

import pytest

from spot_async.errors import ConfigError
from spot_async.telemetry.side_sink import SideSink


class Sink:
    """Keeps what it is given, and fails or waits where it is told to."""

    def __init__(self, fails_at=(), hangs_at=None):
        self.given, self.is_closed, self._fails_at, self._hangs_at = [], False, fails_at, hangs_at

    def write(self, iteration, metrics, texts):
        self._do(iteration)
        self.given.append(iteration)

    def go_back(self, rows):
        self._do("go back")

    def conclude(self, iteration, figures, texts):
        self._do("conclude")

    def _do(self, step):
        if step in self._fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if step == self._hangs_at:
            threading.Event().wait()

    @contextmanager
    def opened(self):
        self._do("start")
        try:
            yield self
        finally:
            self.is_closed = True
            self._do("finish")


LOST = [
    "tb is lost, and the run continues without it: OSError: [Errno 28] No space left on device",
    "tb was lost during the run (OSError: [Errno 28] No space left on device); metrics.jsonl has everything",
]


@pytest.mark.parametrize(
    ("fails_at", "given"),
    [
        (["start"], []),
        (["go back"], []),
        ([2, 3, "finish"], [1]),
        (["conclude", "finish"], [1, 2, 3]),
        (["finish"], [1, 2, 3]),
    ],
)
def test_a_sink_that_fails_is_dropped_and_said_once_and_once_more_at_the_end(fails_at, given):
    sink, said = Sink(fails_at), []
    with SideSink("tb", sink.opened(), said.append) as beside:
        beside.go_back([])
        for iteration in (1, 2, 3):
            beside.write(iteration, {})
        beside.conclude(3, {})
    assert said == LOST
    assert sink.given == given
    assert sink.is_closed or "start" in fails_at


def test_a_sink_that_hangs_holds_up_neither_the_run_nor_its_end(monkeypatch):
    monkeypatch.setattr("spot_async.telemetry.side_sink.FINISH_TIMEOUT_S", 0.1)
    sink, said = Sink(hangs_at=2), []
    with SideSink("wandb", sink.opened(), said.append) as beside:
        for iteration in (1, 2, 3):
            beside.write(iteration, {})
    assert said[-1] == ("wandb was lost during the run (it did not finish within 0.1 s); metrics.jsonl has everything")
    assert sink.given == [1]


def test_a_sink_that_takes_nothing_any_more_is_dropped_before_its_backlog_grows(monkeypatch):
    monkeypatch.setattr("spot_async.telemetry.side_sink.MOST_WAITING", 3)
    monkeypatch.setattr("spot_async.telemetry.side_sink.FINISH_TIMEOUT_S", 0.1)
    sink, said = Sink(hangs_at=1), []
    with SideSink("wandb", sink.opened(), said.append) as beside:
        for iteration in range(1, 9):
            beside.write(iteration, {})
        assert said == [
            "wandb is lost, and the run continues without it: it has not taken the last 3 iterations",
        ]


def test_what_ends_the_run_reaches_the_sink_and_is_not_hidden():
    sink, said = Sink(["finish"]), []
    with pytest.raises(KeyError), SideSink("tb", sink.opened(), said.append):
        raise KeyError("the run's own")
    assert said == LOST


def test_bad_input_is_still_refused():
    @contextmanager
    def refused():
        raise ConfigError("telemetry.wandb: no key")
        yield

    with pytest.raises(ConfigError, match="no key"), SideSink("wandb", refused(), print):
        pass
