"""Sums up what the training of a method took, as its run directory recorded it.

The sums are over the iterations that led to the evaluated student, without evaluations; only money includes those.
Request-seconds are the time that all requests spent at servers. A server that answers 64 at once spends 64 a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from spot_async.run_directory.reading import RunFiles
from spot_async.stages.services import stage_kind, stage_server
from spot_async.telemetry.totals import Rows, of_each, stage_names, total, training_s

METRICS_FILE = "metrics.jsonl"
# Files with figures of the run's own student, after all iterations or after some.
MID_OR_AFTER = re.compile(r"evaluation-(?:after|(\d+))\.json")
PUBLISHED = re.compile(r"(?:step|best)-(\d+)")


@dataclass(frozen=True)
class Compute:
    """What one training run took."""

    iterations: int
    generated_tokens: float  # by rollouts, probes and the teacher's responses
    probe_tokens: float  # the part of these by probes
    scored_tokens: float  # tokens of responses that the teacher scored, without prompts
    trained_tokens: float
    hours: float  # wall time
    trainer_s: float
    request_s: Mapping[str, float]  # request-seconds by role: student, teacher, reference
    money: Mapping[str, float]  # by currency; empty if nothing had a price
    domains: Mapping[str, float]  # means over the last quarter of the iterations, by words; empty for a single domain


def read_compute(figures: Path, model: Path) -> Compute | None:
    """Return what it took to train the `model` that the file `figures` is about; None if no run here trained it.

    Raises DataError for damaged files, and for those of newer programs.
    """
    found = MID_OR_AFTER.fullmatch(figures.name)
    place, iteration = (figures.parent, found[1]) if found else (model, None)
    run = next((each for each in (place, *place.parents) if (each / METRICS_FILE).is_file()), None)
    if run is None:
        return None
    if not found:
        of_run = PUBLISHED.fullmatch(model.resolve().name)
        if of_run is None:  # nothing says which of the run's students it is
            return None
        iteration = of_run[1]
    return _until(run, None if iteration is None else int(iteration))


def _until(run: Path, iteration: int | None) -> Compute | None:
    """Return what the run took until `iteration`, or altogether; None if the training run is gone from there."""
    if not (run / "run.json").is_file():
        return None
    files = RunFiles(run)
    every = files.metrics()
    rows = [row for row in every if iteration is None or row["iteration"] <= iteration]
    if not rows:
        return None
    return compute_of(rows, _money(files.spending(), None if len(rows) == len(every) else iteration))


def compute_of(rows: Rows, money: Mapping[str, float]) -> Compute:
    """Return the sums over lines of metrics.jsonl, with the money that was paid by then."""
    request_s: dict[str, float] = {}
    for stage in stage_names(rows):
        role = stage_server(stage)
        if role is not None:
            busy = sum(row.get(f"stage/{stage}/mean_in_flight", 0.0) * training_s(row) for row in rows)
            request_s[role] = request_s.get(role, 0.0) + busy
    return Compute(
        iterations=len(rows),
        generated_tokens=sum(row.get("throughput/generated_tokens_per_s", 0.0) * training_s(row) for row in rows),
        probe_tokens=sum(row.get("probe/tokens", 0.0) * row.get("train/trajectories", 0.0) for row in rows),
        scored_tokens=sum(
            row.get(f"stage/{stage}/requests", 0.0) * row.get("rollout/tokens", row.get("teacher/tokens", 0.0))
            for row in rows
            for stage in stage_names(rows)
            if stage_kind(stage) == "score"
        ),
        trained_tokens=total(rows, "train/tokens"),
        hours=sum(map(training_s, rows)) / 3600,
        trainer_s=total(rows, "time/train_s"),
        request_s=request_s,
        money=money,
        domains=_domains(rows[3 * len(rows) // 4 :]),
    )


def _domains(rows: Rows) -> dict[str, float]:
    """Return the accuracy in each domain, and the teachers' entropies and pulls, as means over these iterations."""
    return {
        f"{figure.removesuffix('_nats')} at the end: {of}": total(rows, metric) / sum(metric in row for row in rows)
        for area, figure in (("rollout", "accuracy"), ("teacher", "entropy_nats"), ("teacher", "pull_nats"))
        for of, metric in of_each(rows, area, figure).items()
        if of != area
    }


def _money(spending: Sequence[Mapping[str, Any]], iteration: int | None) -> dict[str, float]:
    """Return money by currency from lines of spending.jsonl, which are running totals of each endpoint.

    In a run that was resumed, an iteration may have several lines, and a start comes after other lines.
    """
    if iteration is not None:
        until = [row for row in spending if row["iteration"] is not None and row["iteration"] <= iteration]
        spending = sorted(until, key=itemgetter("iteration"))
    last = {(row["role"], row["server"]): row for row in spending}
    found: dict[str, float] = {}
    for row in last.values():
        found[row["currency"]] = found.get(row["currency"], 0.0) + row["money"]
    return found


def compute_rows(computed: Sequence[tuple[str, Compute]]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row of texts for each method."""
    currencies = list(dict.fromkeys(currency for _, each in computed for currency in each.money))
    roles = list(dict.fromkeys(role for _, each in computed for role in each.request_s))
    headings = ["method", "iterations", "tokens generated", "by probes", "scored", "trained", "hours", "trainer s"]
    domains = list(dict.fromkeys(words for _, each in computed for words in each.domains))
    headings += [f"{role} request-s" for role in roles] + currencies + domains
    rows = [
        [
            name,
            f"{each.iterations:,}",
            *(
                f"{tokens:,.0f}"
                for tokens in (each.generated_tokens, each.probe_tokens, each.scored_tokens, each.trained_tokens)
            ),
            _rounded(each.hours),
            _rounded(each.trainer_s),
            *(_rounded(each.request_s.get(role, 0.0)) for role in roles),
            *(f"{each.money.get(currency, 0.0):,.4g}" for currency in currencies),
            *(f"{each.domains[words]:.3g}" if words in each.domains else "" for words in domains),
        ]
        for name, each in computed
    ]
    return headings, rows


def _rounded(amount: float) -> str:
    """Return an amount with three digits, or with all digits before the point."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
