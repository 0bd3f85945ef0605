"""The cards of a report, and the plots that are drawn of an iteration's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from spot_async.telemetry.totals import Rows, total
from spot_async.tools.pages import svg
from spot_async.tools.pages.series import Series, seconds, short_number


@dataclass(frozen=True)
class Plot:
    """One card of the page."""

    title: str
    note: str  # how to read it
    figure: Markup


@dataclass(frozen=True)
class Section:
    title: str
    plots: tuple[Plot, ...]


def present(*plots: tuple[str, str, Markup | None]) -> tuple[Plot, ...]:
    return tuple(Plot(title, note, figure) for title, note, figure in plots if figure is not None)


def lines(
    rows: Rows,
    names: Mapping[str, str],
    format_y: Callable[[float], str] = short_number,
    *,
    from_zero: bool = False,
    most: float = math.inf,
    level: tuple[str, float] | None = None,
    smooth: bool = True,
) -> Markup | None:
    """Return a plot with a line per metric that is there. Lines of zeros are drawn only if there are no others."""
    series = [Series(name, points(rows, metric), i) for i, (name, metric) in enumerate(names.items())]
    series = [each for each in series if each.points]
    moving = [each for each in series if any(value for _, value in each.points)]
    if not series:
        return None
    return svg.line_plot(
        moving or series[:1], format_y=format_y, from_zero=from_zero, most=most, level=level, smooth=smooth
    )


def stacked(rows: Rows, names: Mapping[str, str]) -> Markup | None:
    """Return a plot of times, stacked on top of each other."""
    with_times = [row for row in rows if any(metric in row for metric in names.values())]
    if not with_times:
        return None
    series = [
        Series(name, [(row["iteration"], row.get(metric, 0.0)) for row in with_times], i)
        for i, (name, metric) in enumerate(names.items())
        if total(rows, metric) > 0
    ]
    return svg.stacked_plot(series, format_y=seconds)


def points(rows: Rows, metric: str) -> list[tuple[float, float]]:
    return [(row["iteration"], row[metric]) for row in rows if metric in row]
