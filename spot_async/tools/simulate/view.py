"""Shows a simulation to people: a table, and lines that say what it means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from spot_async.config import Config, teacher_role
from spot_async.evaluation.metrics import standard_error
from spot_async.run_directory.reading import RunFiles
from spot_async.telemetry.bottleneck import percent
from spot_async.telemetry.screen import number_table
from spot_async.telemetry.totals import shares_cores, training_s
from spot_async.tools.simulate.rates import ClusterRates
from spot_async.tools.simulate.simulation import WARM_UP, Outcome, sufficient


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the simulations as a table with a column for each, since figures are more than simulations."""
    table = number_table("max_staleness", *(str(each.max_staleness) for each in outcomes))
    rows = {
        "iteration": [f"{each.iteration_s:.3g} s" for each in outcomes],
        "bound": [f"{each.bound.seconds:.3g} s" for each in outcomes],
        "by": [each.bound.by for each in outcomes],
        "trainer idle": [percent(each.trainer_idle) for each in outcomes],
        **{f"{role} busy": [percent(each.busy[role]) for each in outcomes] for role in outcomes[0].busy},
        "lag, mean": [f"{each.lag_mean:.2f}" for each in outcomes],
        "lag, largest": [str(each.lag_max) for each in outcomes],
        "queue, mean": [f"{each.queue_mean:.0f}" for each in outcomes],
        "queue, largest": [str(each.queue_max) for each in outcomes],
        "orchestrator's core": [f"{100 * each.orchestrator_cores:.1f} %" for each in outcomes],
    }
    for lag in sorted({lag for each in outcomes for lag in each.lags}):
        shares = [each.lags.get(lag, 0) / max(1, sum(each.lags.values())) for each in outcomes]
        rows[f"tokens with lag {lag}"] = [percent(share) for share in shares]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def staleness_words(outcomes: Sequence[Outcome]) -> str:
    """Return what staleness brings."""
    strict, enough = outcomes[0], sufficient(outcomes)
    if not enough.max_staleness:
        return f"staleness brings next to nothing here: an iteration takes {strict.iteration_s:.3g} s without"
    return (
        f"max_staleness={enough.max_staleness} brings an iteration from {strict.iteration_s:.3g} to "
        f"{enough.iteration_s:.3g} s; at these rates none can be shorter than {enough.bound.seconds:.3g} s "
        f"({enough.bound.by})"
    )


def core_words(outcome: Outcome) -> str:
    """Return how many times the servers that were simulated one orchestrator, which is one thread, could lead."""
    return (
        f"one orchestrator, which has one core, leads about {1 / outcome.orchestrator_cores:,.0f} times as many such "
        "servers on this machine"
    )


def sharing_words(config: Config, run: Path) -> str:
    """Return what a simulation does not know of a run whose trainer and servers share cores; empty for others."""
    cores = RunFiles(run).cores
    if not shares_cores(config.model_dump(), cores):
        return ""
    return (
        f"trainer and servers share the {cores or 'few'} cores of {run}: where several work at a time they slow each "
        "other down, which is not simulated: its rates are those of its own max_staleness"
    )


def own_words(run: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Return how far the simulation is off the run whose rates it has, if it was simulated with that staleness."""
    files = RunFiles(run)
    rows, given = files.metrics(), files.config().get("max_staleness")
    staleness = max(0, given) if isinstance(given, int) else 0
    steady = rows[1 + WARM_UP * staleness : len(rows) - staleness] or rows  # neither fills up nor comes to its end
    times_s = [*map(training_s, steady)]
    own_s, error_s = sum(times_s) / len(times_s), standard_error(times_s)
    if staleness >= len(outcomes) or own_s <= 0:
        return []
    off = outcomes[staleness].iteration_s / own_s - 1
    took = f"{own_s:.3g}" + (f" ±{error_s:.1g}" if math.isfinite(error_s) else "")
    return [f"that run itself took {took} s an iteration with max_staleness={staleness}: simulated is {off:+.0%}"]


def binding(outcome: Outcome) -> list[str]:
    """Return what holds the simulated run up, and what helps most against it."""
    return [outcome.bottleneck, *(f"* {line}" for line in outcome.advice[:2])]


def rate_lines(rates: ClusterRates, mean_tokens: float) -> list[str]:
    """Return the rates that were simulated, in words."""
    lines = []
    for role in ("student", *(map(teacher_role, rates.teachers) if rates.teachers else ["teacher"]), "reference"):
        own = rates.of(role)
        if own.tokens_per_s is None or own.tokens_per_s_each is None:
            continue
        parts = [f"{own.replicas or 1} x {own.tokens_per_s:,.0f} tokens/s", f"{own.tokens_per_s_each:,.0f} each"]
        parts += [f"{own.slots} at a time"] if own.slots else []
        parts += [f"{own.request_s:.2g} s a request"] if own.request_s else []
        lines.append(f"{role}: {', '.join(parts)}")
    if (played := rates.environment) is not None:
        lines.append(f"environment: {played.workers} x {played.answer_s:.2g} s an answer, {played.turns:.2f} turns")
    trainer = f"trainer: {rates.trainer.tokens_per_s:,.0f} tokens/s and {rates.trainer.fixed_s:.2g} s"
    others = (
        f"weight update {rates.update_s:.2g} s, candidates {rates.candidates_s:.2g} s, verdict {rates.verdict_s:.2g} s"
    )
    return [*lines, f"{trainer}; {others}; responses of {mean_tokens:.0f} tokens on average"]
