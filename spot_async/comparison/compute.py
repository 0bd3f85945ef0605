"""What training a method took, as far as its run directory recorded it.

Sums over the iterations that were run; evaluation is left out. Request-seconds are the time that requests spent at
servers, all together: a server that answers 64 at once spends 64 of them a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spot_async.errors import DataError
from spot_async.inspection.reading import RunFiles
from spot_async.inspection.totals import Rows, stage_names, total, training_s
from spot_async.stages import STAGE_SERVERS

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Compute:
    """Of one training run."""

    iterations: int
    generated_tokens: float  # by rollouts, probes and the teacher's responses
    probe_tokens: float  # of these, by probes
    scored_tokens: float  # of responses, by the teacher; prompts are not counted
    trained_tokens: float
    hours: float  # of wall time
    trainer_s: float
    request_s: Mapping[str, float]  # by role: student, teacher, reference
    money: Mapping[str, float]  # by currency; empty where nothing had a price


def training_run(model: Path) -> Path | None:
    """The run directory that an evaluated model was trained in; None for one that no run here trained."""
    return next((each for each in (model, *model.parents) if (each / METRICS_FILE).is_file()), None)


def read_compute(run: Path) -> Compute | None:
    """None where the directory is no training run any more. Raises DataError for damaged files."""
    try:
        files = RunFiles(run)
    except DataError:
        return None
    rows = files.metrics()
    return compute_of(rows, files.summary() or {}) if rows else None


def compute_of(rows: Rows, summary: Mapping[str, Mapping[str, Mapping[str, float | str]]]) -> Compute:
    """From the lines of metrics.jsonl and summary.json."""
    request_s: dict[str, float] = {}
    for stage in stage_names(rows):
        role = STAGE_SERVERS.get(stage)
        if role is not None:
            busy = sum(row.get(f"stage/{stage}/mean_in_flight", 0.0) * training_s(row) for row in rows)
            request_s[role] = request_s.get(role, 0.0) + busy
    return Compute(
        iterations=len(rows),
        generated_tokens=sum(row.get("throughput/generated_tokens_per_s", 0.0) * training_s(row) for row in rows),
        probe_tokens=sum(row.get("probe/tokens", 0.0) * row.get("train/trajectories", 0.0) for row in rows),
        scored_tokens=sum(row.get("stage/score/requests", 0.0) * _response_tokens(row) for row in rows),
        trained_tokens=total(rows, "train/tokens"),
        hours=sum(map(training_s, rows)) / 3600,
        trainer_s=total(rows, "time/train_s"),
        request_s=request_s,
        money=_money(summary.get("spending", {})),
    )


def _response_tokens(row: Mapping[str, float]) -> float:
    return row.get("rollout/tokens", row.get("teacher/tokens", 0.0))


def _money(spending: Mapping[str, Mapping[str, float | str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for spent in spending.values():
        currency = str(spent.get("currency", ""))
        found[currency] = found.get(currency, 0.0) + float(spent.get("money", 0.0))
    return found


def compute_rows(computed: Sequence[tuple[str, Compute]]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of words for each method."""
    currencies = list(dict.fromkeys(currency for _, each in computed for currency in each.money))
    roles = list(dict.fromkeys(role for _, each in computed for role in each.request_s))
    headings = ["method", "iterations", "generated", "by probes", "scored", "trained", "hours", "trainer s"]
    headings += [f"{role} request-s" for role in roles] + currencies
    rows = [
        [
            name,
            f"{each.iterations:,}",
            *(
                f"{tokens:,.0f}"
                for tokens in (each.generated_tokens, each.probe_tokens, each.scored_tokens, each.trained_tokens)
            ),
            f"{each.hours:,.2f}",
            f"{each.trainer_s:,.0f}",
            *(f"{each.request_s.get(role, 0.0):,.0f}" for role in roles),
            *(f"{each.money.get(currency, 0.0):,.4g}" for currency in currencies),
        ]
        for name, each in computed
    ]
    return headings, rows
