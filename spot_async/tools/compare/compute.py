"""Sums up what the training of a method took, as its run directory recorded it.

The sums are over the iterations that led to the evaluated student, without evaluations; only money includes those.
Request-seconds are the time that all requests spent at servers. A server that answers 64 at once spends 64 a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from spot_async.run_directory.reading import RunFiles
from spot_async.stages.services import stage_kind, stage_server
from spot_async.telemetry.totals import Rows, of_each, stage_names, total, training_s

METRICS_FILE = "metrics.jsonl"
# Files with figures of the run's own student, after all iterations or after some.
MID_OR_AFTER = re.compile(r"evaluation-(?:after|(\d+))\.json")
PUBLISHED = re.compile(r"(?:step|best)-(\d+)")


Compute: TypeAlias = dict[str, float]  # what one training run took, by headings of the table


def read_compute(figures: Path, model: Path) -> Compute | None:
    """Return what it took to train the `model` that the file `figures` is about; None if no run here trained it.

    Raises DataError for damaged files, and for those of newer programs.
    """
    found = MID_OR_AFTER.fullmatch(figures.name)
    place = figures.parent if found else model
    run = next((each for each in (place, *place.parents) if (each / METRICS_FILE).is_file()), None)
    named = found or PUBLISHED.fullmatch(model.resolve().name)  # without it nothing says which of the students it is
    if run is None or named is None or not (run / "run.json").is_file():
        return None
    iteration = None if named[1] is None else int(named[1])  # None: after all
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
    return {
        "iterations": len(rows),
        "tokens generated": sum(row.get("throughput/generated_tokens_per_s", 0.0) * training_s(row) for row in rows),
        "by probes": sum(row.get("probe/tokens", 0.0) * row.get("train/trajectories", 0.0) for row in rows),
        "scored": sum(  # of responses, by the teacher, without prompts
            row.get(f"stage/{stage}/requests", 0.0) * row.get("rollout/tokens", row.get("teacher/tokens", 0.0))
            for row in rows
            for stage in stage_names(rows)
            if stage_kind(stage) == "score"
        ),
        "trained": total(rows, "train/tokens"),
        "hours": sum(map(training_s, rows)) / 3600,
        "trainer s": total(rows, "time/train_s"),
        **{f"{role} request-s": busy_s for role, busy_s in request_s.items()},
        **money,
        **_domains(rows[3 * len(rows) // 4 :]),
    }


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
    """Return headings, and a row of texts for each method; empty ones for what it did not have."""
    headings = list(dict.fromkeys(heading for _, each in computed for heading in each))
    rows = [[name, *(_rounded(each[key]) if key in each else "" for key in headings)] for name, each in computed]
    return ["method", *headings], rows


def _rounded(amount: float) -> str:
    """Return an amount with four digits, or with all digits before the point."""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.4g}"
