"""Makes the page of a comparison: its table, its differences, and the runs' curves over each other."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from markupsafe import Markup

from spot_async.base.text import visible
from spot_async.run_directory.reading import evaluated_iteration
from spot_async.telemetry.bottleneck import percent
from spot_async.telemetry.totals import Rows
from spot_async.tools.compare import tables
from spot_async.tools.compare.reading import Evaluated
from spot_async.tools.compare.statistics import Comparison
from spot_async.tools.pages import svg
from spot_async.tools.pages.page import Links, Plot, filled, points
from spot_async.tools.pages.series import Format, Series, running_mean, seconds, short_number

MARKS = {"best": Markup("<strong>{}</strong>"), "second": Markup("<u>{}</u>"), "": Markup("{}")}
# Curves of training, by metric: title, and how values are written. Each is a running mean.
CURVES: tuple[tuple[str, str, Format], ...] = (
    ("rollout/accuracy", "Accuracy in training", percent),
    ("rollout/reward", "Reward", short_number),
    ("rollout/entropy_nats", "Entropy of sampled tokens, nats", short_number),
    ("rollout/tokens", "Length of rollouts, tokens", short_number),
    ("train/advantage_mean", "Advantage, nats a token", short_number),
    ("train/grad_norm", "Gradient norm", short_number),
    ("time/iteration_s", "Time of an iteration", seconds),
)


def comparison_page(comparison: Comparison, runs: Sequence[Evaluated], notes: Sequence[str], links: Links = ()) -> str:
    """Return the page, with `links` to reports. A run without metrics, such as an evaluation's, has no curves."""
    headings = ["method", *(f"{column.benchmark} {column.metric}" for column in comparison.columns)]
    ranked = zip(comparison.methods, tables.marks(comparison.values), comparison.values, strict=True)
    rows = [
        [visible(name), *(MARKS[mark].format(tables.percent(value)) for mark, value in zip(row, values, strict=True))]
        for name, row, values in ranked
    ]
    whole = ("", headings, rows)
    return filled(
        "comparison.html",
        tables=[whole, *tables.difference_tables(comparison)],
        notes=[visible(each) for each in notes],
        links=links,
        plots=curves([(run.name, files.metrics() if (files := run.trained) else []) for run in runs]),
    )


def curves(runs: Sequence[tuple[str, Rows]]) -> list[Plot]:
    """Return the curves that at least one run has, each run in a colour of its own."""
    drawn: list[tuple[str, str, Format, list[Series]]] = []
    held_out = [_held_out(name, rows, colour) for colour, (name, rows) in enumerate(runs)]
    drawn.append(("Accuracy on held-out problems", "Bars: one standard error over problems.", percent, held_out))
    for metric, title, form in CURVES:
        means = [(name, running_mean(points(rows, metric))) for name, rows in runs]
        series = [Series(visible(name), found, colour) for colour, (name, found) in enumerate(means)]
        drawn.append((title, "Running means.", form, series))
    return [
        Plot(title, note, svg.line_plot(series, format_y=form, smooth=False))
        for title, note, form, series in drawn
        if any(each.points for each in series)
    ]


def _held_out(name: str, rows: Rows, colour: int) -> Series:
    """Return a run's accuracy on held-out problems, by the iteration whose weights were measured."""
    k = next((name for row in rows for name in row if re.fullmatch(r"evaluation/avg@\d+", name)), "")
    found = [row for row in rows if k in row]
    places = [(float(evaluated_iteration(int(row["iteration"]), row)), row[k]) for row in found]
    errors = [row.get(f"{k}_standard_error", math.nan) for row in found]
    return Series(visible(name), places, colour, errors=errors)
