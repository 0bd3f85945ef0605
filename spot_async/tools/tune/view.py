"""Shows a tuning to people: tables in the terminal, and a page."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from spot_async.tools.inspect.plots import Plot, Section
from spot_async.tools.pages import svg
from spot_async.tools.pages.series import Series, short_number
from spot_async.tools.pages.templates import templates
from spot_async.tools.tune.measurement import Ramp
from spot_async.tools.tune.recommendation import duration, shares
from spot_async.tools.tune.results import Tuning

HEADINGS = ("in flight", "req/s", "tokens/s", "p50", "p95", "answers", "failed")
ENDED = {
    "flat": "more in flight gave no more",
    "demand": "the run never has more in flight",
    "instant": "answers at once",
    "time": "its time was used up",
    "requests": "its requests were used up",
    "budget": "its budget is spent",
    "throttled": "the server asked to be left alone",
    "failed": "requests failed",
}


@dataclass(frozen=True)
class RampTable:
    """The levels of one server as rows of text."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    at_knee: int | None  # the row of the knee
    note: str


def ramp_table(ramp: Ramp) -> RampTable:
    rows = tuple(
        (
            str(level.concurrency),
            short_number(level.throughput),
            short_number(level.tokens_per_s),
            duration(level.p50_s),
            duration(level.p95_s),
            str(level.requests),
            str(level.failures),
        )
        for level in ramp.levels
    )
    at_knee = next((i for i, level in enumerate(ramp.levels) if level.concurrency == ramp.knee), None)
    note = f"ended: {ENDED[ramp.ended]}{f' ({ramp.failure})' if ramp.failure else ''}"
    if (level := ramp.at_knee) is not None and len(level.stages) > 1:
        parts = ", ".join(f"{stage} {share:.0%}" for stage, share in shares(level).items())
        note += f"; in flight at the knee: {parts}"
    return RampTable(ramp.server, rows, at_knee, note)


def terminal_tables(tuning: Tuning) -> list[Table]:
    """Return one table per server, with the knee marked, and one of what is recommended."""
    tables = []
    for found in map(ramp_table, tuning.ramps):
        table = Table(title=found.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, caption=found.note)
        for heading in (*HEADINGS, ""):
            table.add_column(heading, justify="right", no_wrap=True)
        for i, row in enumerate(found.rows):
            is_knee = i == found.at_knee
            table.add_row(*row, "knee" if is_knee else "", style="bold green" if is_knee else None)
        tables.append(table)
    if tuning.recommendations:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("key", "configured", "recommended"):
            table.add_column(heading, justify="left" if heading == "key" else "right")
        for each in tuning.recommendations:
            changed = each.recommended != each.configured
            table.add_row(each.key, str(each.configured), Text(str(each.recommended), "bold" if changed else ""))
        tables.append(table)
    return tables


def tuning_section(tuning: Tuning) -> Section:
    """Return plots of throughput and latency against concurrency, with the knee as a vertical line.

    Servers for which a limit does not matter have none.
    """
    plots: list[Plot] = []
    for ramp in (each for each in tuning.ramps if each.ended != "instant"):
        rates = [(float(level.concurrency), level.throughput) for level in ramp.levels]
        halves, most = (
            [(float(level.concurrency), getattr(level, name)) for level in ramp.levels] for name in ("p50_s", "p95_s")
        )
        figures = {
            "throughput": ("Answers per second.", [Series("", rates)], short_number),
            "latency": ("Of half of the answers, and of 95 %.", [Series("p50", halves), Series("p95", most)],
                        duration),
        }  # fmt: skip
        for what, (note, series, form) in figures.items():
            knee = f" The knee, {ramp.knee}, is marked." if ramp.knee is not None else ""
            figure = svg.level_plot(series, x_name="in flight", marked=ramp.knee, format_y=form)
            plots.append(Plot(f"{ramp.server}: {what}", note + knee, figure))
    return Section(f"Servers by requests in flight, measured {tuning.measured}", tuple(plots))


def tuning_page(tuning: Tuning, name: str) -> str:
    """Return the page about what `tune` measured."""
    return (
        templates()
        .get_template("tuning.html")
        .render(
            name=name,
            tuning=tuning,
            section=tuning_section(tuning),
            headings=HEADINGS,
            tables=[ramp_table(ramp) for ramp in tuning.ramps],
        )
    )
