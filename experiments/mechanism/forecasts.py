"""Reads the forecasts that were made before the runs, as the archives in `results/` keep them.

`spot-async forecast` made them: it computed from probes of the untrained student what SPOT would gain. Its gain was too
high in 11 of 11 rows, and it is gone. What is measured before a run today is `spot-async check --slope`'s. A file is of
a setting, or of one of its rows, which were computed from the setting's measurement and are kept without it. Only what
the tables need is read. At the end is what is drawn of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its standard error over prompts."""

    value: float
    standard_error: float


class ProbedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One of the teacher's candidates at a position."""

    token: str
    token_id: int
    correct: int  # of its probes
    judged: int  # probes with a verdict


class ProbedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """One position that the policy selected."""

    position: int
    sampled: str
    candidates: list[ProbedCandidate]


class MeasuredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and the rollout that was probed."""

    problem_id: str
    tier: str | None = None
    prompt_tokens: int
    prompt_ids: list[int]
    response_ids: list[int]
    positions: list[ProbedPosition]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    prompts: list[MeasuredPrompt]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    figures: dict[str, Estimate | None]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Verdict
    forecast: Figures
    measurement: Measurement | None = None  # None in the file of a row

    @property
    def prompts(self) -> list[MeasuredPrompt]:
        assert self.measurement is not None  # of a setting
        return self.measurement.prompts


def read_forecast(directory: Path, setting: str, row: str = "") -> Forecast | None:
    """Return the forecast of a setting or of one of its rows; None if there is none."""
    name = f"{setting}-{row.replace(' ', '-')}" if row else setting
    path = directory / "forecasts" / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Forecast) if path.exists() else None


class Point(NamedTuple):
    """A forecast beside what happened: gains in value a decision over OPD, as shares, with standard errors."""

    setting: str
    row: str
    verdict: str  # of the forecast
    predicted: float
    predicted_error: float
    observed: float  # by the shares of choices, as registered
    observed_error: float
    accuracy: float  # gained by a response on held-out problems, over its number of decisions; exploratory
    accuracy_error: float


class Panel(NamedTuple):
    """The curves of one setting, in percent, by row. Rows that are not `named` are drawn grey, without a name."""

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    named: Collection[str]
    forecasts: Mapping[str, tuple[float, float]]  # where a row was expected to end, and the standard error
