"""What is wrong with an iteration is said once: on the console, in the log, and from there in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from iterations import finished_iteration

from spot_async.loop.events import IterationFinished
from spot_async.models.precision import precision
from spot_async.run_directory.layout import FELL, MISMATCHED
from spot_async.run_directory.reading import RunFiles
from spot_async.telemetry.failures import EntropyHistory, IterationWarning, mismatch_words
from spot_async.telemetry.run_log import log_events_to
from spot_async.types import Sample


@pytest.mark.parametrize(
    ("trainer", "served", "usual", "wrong"),
    [
        ("float32", "float32", 1e-3, 0.02),
        ("float32", "bfloat16", 0.03, 0.2),
        ("bfloat16", "float32", 0.03, 0.2),
        ("float32", None, 0.03, 0.2),  # perhaps 16 bits
    ],
)
def test_a_mismatch_is_judged_by_the_less_precise_of_trainer_and_server(
    trainer: str, served: str | None, usual: float, wrong: float
) -> None:
    compared = precision(trainer, served)
    assert mismatch_words({"mismatch_mean": usual, "mismatch_max": 9.0}, compared) == ""
    assert "0.2 nats apart" in mismatch_words({"mismatch_mean": 0.2, "mismatch_max": 9.0}, compared)
    assert mismatch_words({"mismatch_mean": wrong, "mismatch_max": 9.0}, compared)
    assert mismatch_words({}, compared) == ""  # no token was compared, as in KD


def test_it_is_said_once_and_the_report_says_it_too(tmp_path: Path) -> None:
    said: list[str] = []
    compared = precision("float32", "float32")

    def words(finished: IterationFinished) -> str:
        return mismatch_words(finished.report.metrics, compared)

    (tmp_path / "logs").mkdir()
    (tmp_path / "run.json").write_text('{"format": 1, "command": "train"}')
    with log_events_to(tmp_path / "logs" / "run.jsonl"):
        listener = IterationWarning(MISMATCHED, words, said.append)
        listener.on(finished_iteration(1))
        for iteration in (2, 3):
            listener.on(finished_iteration(iteration, mismatch_mean=0.58, mismatch_max=2.0))
    (line,) = said
    assert line.startswith("iteration 2: trainer and student's server give the same tokens log-probabilities that are")
    assert "0.58 nats apart on average (2 at most), where float32 makes less than 0.01" in line
    for cause in ("weights are not the served ones", "bends what it samples", "quantised", "temperature"):
        assert cause in line
    (reported,) = RunFiles(tmp_path).mismatches()
    assert reported.startswith("After iteration 2, trainer and student's server")


@pytest.mark.parametrize(
    ("before", "nats", "said"),
    [
        ([], [1.0, 0.4, 0.11, 0.05], None),  # falls, and never to a tenth at once
        ([], [1.0, 0.1, 0.9, 0.01], "iteration 2: the student's entropy fell from 1 to 0.1 nats a token within"),
        ([0.8, 0.5], [0.04], "iteration 3: the student's entropy fell from 0.5 to 0.04 nats"),  # a run that goes on
        ([0.0], [0.0, 0.0], None),
        ([1.0], [None, 0.09], "iteration 3: the student's entropy fell from 1 to 0.09 nats"),  # nobody knows 2's
    ],
)
def test_a_student_that_collapses_beside_a_baseline_is_told_of_once_with_the_key(
    before: list[float], nats: list[float | None], said: str | None
) -> None:
    lines: list[str] = []
    name = "rollout/entropy_nats"
    history = EntropyHistory([{"iteration": n, name: each} for n, each in enumerate(before, start=1)], 0.8)
    listener = IterationWarning(FELL, history.warning, lines.append)
    for iteration, each in enumerate(nats, start=len(before) + 1):
        one = Sample(supervision=None, metrics={} if each is None else {name: each}, record={})
        listener.on(finished_iteration(iteration, [one, one]))
    assert len(lines) == (said is not None)
    if said is not None:
        assert lines[0].startswith(said)
        assert "policy.baseline=0.8" in lines[0]
