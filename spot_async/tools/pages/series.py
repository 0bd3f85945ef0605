"""Computes what plots are made of: series, scales, round ticks, short numbers. Pure arithmetic; `svg.py` draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_POINTS = 200  # most points of a line; more are averaged in groups
SMOOTH_FROM = 24  # a single line with so many points or more gets a running mean

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """Values over iterations."""

    name: str
    points: Sequence[tuple[float, float]]  # by ascending x
    colour: int | None = None  # its number in the style sheet; default: its place among the series
    dash: int | None = None  # its number in the style sheet; default: that of its colour
    errors: Sequence[float] = ()  # one per point, drawn to both sides of it unless it is not finite


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to pixels [start, end]. If low and high are equal, everything lands in the middle."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 5, *, most: float = math.inf) -> list[float]:
    """Return about `count` round numbers that reach from `low` to `high` or beyond.

    They are 1, 2 or 5 times a power of ten apart. If `low` and `high` are equal, there is room around them in
    proportion to the value. `most` is the largest value there can be; that room does not exceed it.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        value = low if math.isfinite(low) else 0.0
        margin = abs(value) / 2
        low, high = value - margin, min(value + (margin or 0.1), max(value, most))
    rough = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short_number(value: float) -> str:
    """Return a number with three digits, and thousands as k, for axes and titles."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e3:
        return f"{value / 1e3:.3g}k"
    return scientific(value) if size < 1e-3 else f"{value:.3g}"


def scientific(value: float) -> str:
    """Return a number with two digits and a power of ten, such as 5e-4."""
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def seconds(value: float) -> str:
    return f"{short_number(value)} s"


def fine_percent(value: float) -> str:
    """Return a share in percent, with digits for shares that may all be small or close together."""
    return f"{100 * value:.3g} %"


def tick_labels(ticks: Sequence[float], format_y: Format) -> list[str]:
    """Return the labels of one axis. They are exact and all different.

    If one needs a power of ten, all but zero have one.
    """
    labels = [format_y(tick) for tick in ticks]
    if all(label.endswith(" %") for label in labels):
        return labels if len(set(labels)) == len(labels) else [f"{tick} %" for tick in plain([100 * t for t in ticks])]
    write = short_number
    if any(short_number(tick) in label and "e-" in label for tick, label in zip(ticks, labels, strict=True)):
        write = scientific
    numbers = [write(tick) if tick else "0" for tick in ticks]
    if len(set(numbers)) < len(numbers) or any(_is_rounded(tick, write) for tick in ticks):
        numbers = plain(ticks)
    return [
        label.replace(short_number(tick), number) for tick, label, number in zip(ticks, labels, numbers, strict=True)
    ]


def plain(ticks: Sequence[float]) -> list[str]:
    """Return numbers with all the digits that the steps between them need."""
    step = min((abs(high - low) for low, high in pairwise(ticks)), default=1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    return [f"{round(tick, decimals):.12g}" for tick in ticks]


def _is_rounded(tick: float, write: Format) -> bool:
    digits = ".1e" if write is scientific else ".3g"
    return abs(float(format(tick, digits)) - tick) > 1e-9 * abs(tick)


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in points if math.isfinite(point[1])]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line of at most `MAX_POINTS` points, which are means of neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return each point's mean with its neighbours, over a twelfth of all points.

    The window is narrower at the ends, so that it always has as many points on both sides.
    """
    half = max(1, len(points) // 24)
    means: list[tuple[float, float]] = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        near = points[i - reach : i + reach + 1]
        means.append((x, sum(y for _, y in near) / len(near)))
    return means


def drawn_series(series: Sequence[Series]) -> list[Series]:
    """Return the series that have points, thinned, each with a colour."""
    colours = [i if each.colour is None else each.colour for i, each in enumerate(series)]
    thin = [
        Series(each.name, thinned(finite(each.points)), colour, each.dash, _thinned_errors(each))
        for each, colour in zip(series, colours, strict=True)
    ]
    return [each for each in thin if each.points]


def _thinned_errors(series: Series) -> list[float]:
    """Return the errors of the points that thinning has left."""
    known = zip(series.points, series.errors, strict=True) if series.errors else ()
    return [error for _, error in thinned([(x, error) for (x, y), error in known if math.isfinite(y)])]


def whiskers(series: Series) -> list[tuple[float, float, float]]:
    """Return (x, low, high) for each error that is known."""
    known = zip(series.points, series.errors, strict=True) if series.errors else ()
    return [(x, y - error, y + error) for (x, y), error in known if math.isfinite(error)]


def extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)
