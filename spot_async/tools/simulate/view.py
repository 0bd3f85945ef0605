"""Shows a simulation to people: a table in the terminal, and a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from spot_async.config import Config, teacher_role
from spot_async.run_directory.reading import RunFiles
from spot_async.telemetry.bottleneck import percent
from spot_async.telemetry.screen import number_table
from spot_async.telemetry.totals import shares_cores
from spot_async.tools.pages import svg
from spot_async.tools.pages.page import Plot, Section, filled
from spot_async.tools.pages.series import Series, seconds, short_number
from spot_async.tools.simulate.rates import ClusterRates
from spot_async.tools.simulate.simulation import Outcome, sufficient


def headings(outcomes: Sequence[Outcome]) -> list[str]:
    return ["max_staleness", "iteration", "bound", "by", "trainer idle", *(f"{role} busy" for role in outcomes[0].busy),
            "lag, mean", "lag, largest", "queue, mean", "queue, largest"]  # fmt: skip


def cells(outcome: Outcome) -> list[str]:
    return [
        str(outcome.max_staleness),
        f"{outcome.iteration_s:.3g} s",
        f"{outcome.bound.seconds:.3g} s",
        outcome.bound.by,
        percent(outcome.trainer_idle),
        *(percent(share) for share in outcome.busy.values()),
        f"{outcome.lag_mean:.2f}",
        str(outcome.lag_max),
        f"{outcome.queue_mean:.0f}",
        str(outcome.queue_max),
    ]


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the simulations as a table with a column for each, since figures are more than simulations."""
    names, *columns = headings(outcomes), *map(cells, outcomes)
    table = number_table(names[0], *(column[0] for column in columns))
    for line in zip(names[1:], *(column[1:] for column in columns), strict=True):
        table.add_row(*line)
    for lag in sorted({lag for outcome in outcomes for lag in outcome.lags}):
        table.add_row(f"tokens with lag {lag}", *(percent(share) for share in lag_shares(outcomes, lag)))
    return table


def lag_shares(outcomes: Sequence[Outcome], lag: int) -> list[float]:
    return [outcome.lags.get(lag, 0) / max(1, sum(outcome.lags.values())) for outcome in outcomes]


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


def sharing_words(config: Config, run: Path) -> str:
    """Return what a simulation does not know of a run whose trainer and servers share cores; empty for others."""
    cores = RunFiles(run).cores
    if not shares_cores(config.model_dump(), cores):
        return ""
    return (
        f"trainer and servers share the {cores or 'few'} cores of {run}: above max_staleness=0 they slow each other "
        "down, which is not simulated"
    )


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
    trainer = f"trainer: {rates.trainer.tokens_per_s:,.0f} tokens/s and {rates.trainer.fixed_s:.2g} s"
    others = (
        f"weight update {rates.update_s:.2g} s, candidates {rates.candidates_s:.2g} s, verdict {rates.verdict_s:.2g} s"
    )
    return [*lines, f"{trainer}; {others}; responses of {mean_tokens:.0f} tokens on average"]


def simulation_section(outcomes: Sequence[Outcome]) -> Section:
    """Return plots that compare the simulations."""
    names = [f"max_staleness {each.max_staleness}" for each in outcomes]
    lags = range(1 + max(outcome.lag_max for outcome in outcomes))
    shares = [
        (name, [lag_shares([outcome], lag)[0] for lag in lags]) for name, outcome in zip(names, outcomes, strict=True)
    ]
    times, queued = (
        [
            Series(name, [(i, getattr(row, figure)) for i, row in enumerate(outcome.rows, 1)])
            for name, outcome in zip(names, outcomes, strict=True)
        ]
        for figure in ("seconds", "queued")
    )
    return Section(
        "By max_staleness",
        (
            Plot("Seconds of an iteration", "The bound, and what is lost above it.",
                 svg.row_plot(names, [("bound", [each.bound.seconds for each in outcomes]),
                                      ("above it", [each.iteration_s - each.bound.seconds for each in outcomes])],
                              format_x=seconds)),
            Plot("What an iteration needs", "Seconds of work at full rate, of each server and of the trainer.",
                 svg.row_plot(list(outcomes[0].bound.parts), [("", list(outcomes[0].bound.parts.values()))],
                              format_x=seconds)),
            Plot("Trainer idle", "Share of the time.",
                 svg.row_plot(names, [("", [each.trainer_idle for each in outcomes])], format_x=percent)),
            Plot("Lag", "Share of the response tokens by the iterations that their weights are behind.",
                 svg.histogram(list(range(len(lags) + 1)), shares, x_name="iterations", format_y=percent)),
            Plot("Iterations", "Batches that were admitted together may finish together.",
                 svg.line_plot(times, format_y=seconds, from_zero=True, smooth=False)),
            Plot("Supervision queue", "Prompts that are finished and in no batch yet, mean of each iteration.",
                 svg.line_plot(queued, format_y=short_number, from_zero=True, smooth=False)),
        ),
    )  # fmt: skip


def simulation_page(name: str, outcomes: Sequence[Outcome], lines: Sequence[str]) -> str:
    """Return the page of a simulation."""
    return filled(
        "simulation.html",
        name=name,
        lines=lines,
        headings=headings(outcomes),
        rows=[cells(outcome) for outcome in outcomes],
        section=simulation_section(outcomes),
    )
