"""Draws small plots as inline SVG: lines, bars, stacked areas. Pure.

Fonts and line widths come from the page's style sheet. Everything is drawn in a box of 380 by 220, which pages scale a
little. Series differ in colour and in dash. Exact numbers show under the pointer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from spot_async.base.text import shortened
from spot_async.tools.pages.series import (
    SMOOTH_FROM,
    Format,
    Scale,
    Series,
    drawn_series,
    extent,
    nice_ticks,
    running_mean,
    short_number,
    tick_labels,
    whiskers,
)

WIDTH, HEIGHT = 380, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 8, 34
SPAN = HEIGHT - TOP - BOTTOM
ROW_HEIGHT = 20
CHARACTER = 6.3  # most that a character of labels is wide, on average
ROW_LABEL = 92  # room for the labels of rows at least, and at most
MOST_ROW_LABEL = 200
COLOURS = ("#1f6fb4", "#c8500a", "#22804f", "#8e4fa8", "#8a6d00", "#5d6167")
DARK_COLOURS = ("#62aeea", "#ff9350", "#5cc48c", "#c795dd", "#d9b93b", "#a2a7ae")  # on dark screens
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 3")
NOTHING: Mapping[float, str] = MappingProxyType({})


def line_plot(
    series: Sequence[Series],
    *,
    format_y: Format = short_number,
    from_zero: bool = False,
    most: float = math.inf,
    marked: Mapping[float, str] = NOTHING,
    smooth: bool = True,
) -> Markup:
    """Draw lines over iterations. With `smooth`, a long single line is drawn with its running mean.

    `most` is the largest value there can be. `marked` says what happened at some x, where an upright line is.
    """
    drawn = drawn_series(series)
    if not drawn:
        return Markup('<p class="quiet">no data</p>')
    ys = [y for each in drawn for _, low, high in whiskers(each) for y in (low, min(high, most))]
    ys += [y for each in drawn for _, y in each.points] + ([0.0] if from_zero else [])
    x, y, frame = _axes(extent([x for each in drawn for x, _ in each.points]), extent(ys), format_y, most=most)
    marks = [frame]
    marks += [_upright("mark", x(at), TOP, HEIGHT - BOTTOM) for at in marked]
    smoothed = smooth and len(drawn) == 1 and len(drawn[0].points) >= SMOOTH_FROM
    keys = [_key(f"{_line(each)}{' raw' if smoothed else ''}", each.name) for each in drawn if each.name]
    for each in drawn:
        for at, low, high in whiskers(each):
            marks.append(_upright(f"whisker {_colour(each.colour)}", x(at), y(low), y(min(high, most))))
        dots = len(each.points) == 1
        marks.append(_path(each.points, x, y, f"{_line(each)}{' raw' if smoothed else ''}", dots=dots))
        if smoothed:
            marks.append(_path(running_mean(each.points), x, y, _line(each), dots=False))
            keys.append(_key(_line(each), "thick: running mean"))
    tips = [*_strips(drawn, x, format_y), *(Tip(x(at) - 3, TOP, 6, SPAN, what) for at, what in marked.items())]
    return _figure(marks, tips, drawn, keys)


def level_plot(
    series: Sequence[Series], *, x_name: str, marked: float | None = None, format_y: Format = short_number
) -> Markup:
    """Draw dots and lines over powers of two, with y from zero or below; `marked` is the x of a vertical line."""
    drawn = drawn_series([replace(each, points=[(math.log2(x), y) for x, y in each.points]) for each in series])
    if not drawn:
        return Markup('<p class="quiet">no data</p>')
    low, high = extent([x for each in drawn for x, _ in each.points])
    x = Scale(low, high, LEFT + 6, WIDTH - RIGHT - 6)
    ys = [0.0, *(y for each in drawn for _, y in each.points)]
    _, y, frame = _axes(None, extent(ys), format_y, x_name)
    marks = [frame]
    if marked is not None:
        marks.append(_upright("mark", x(math.log2(marked)), TOP, HEIGHT - BOTTOM))
    for each in drawn:
        if len(each.points) > 1:
            marks.append(_path(each.points, x, y, _line(each), dots=False))
        marks += [_path([point], x, y, _line(each), dots=True) for point in each.points]
    for power in range(math.ceil(low), math.floor(high) + 1):
        marks.append(_text(x(power), HEIGHT - BOTTOM + 15, short_number(2**power), "middle"))
    keys = [_key(_line(each), each.name) for each in drawn if each.name]
    return _figure(marks, _strips(drawn, x, format_y, lambda at: f"{2**at:.4g} {x_name}"), drawn, keys)


def stacked_plot(series: Sequence[Series], *, format_y: Format = short_number) -> Markup:
    """Draw areas on top of each other. All series must have the same x."""
    drawn = drawn_series(series)
    if not drawn:
        return Markup('<p class="quiet">no data</p>')
    xs = [x for x, _ in drawn[0].points]
    bounds = np.cumsum([[0.0] * len(xs), *([value for _, value in each.points] for each in drawn)], axis=0)
    x, y, frame = _axes(extent(xs), (0.0, float(bounds[-1].max())), format_y)
    across = [x(at) for at in xs]
    if len(xs) == 1:  # a single iteration has no area, so it is drawn as a bar
        across, bounds = [across[0] - WIDTH / 20, across[0] + WIDTH / 20], bounds.repeat(2, axis=1)
    marks = [frame]
    for each, (lower, upper) in zip(drawn, pairwise(bounds.tolist()), strict=True):
        corners = [*zip(across, upper, strict=True), *reversed([*zip(across, lower, strict=True)])]
        points = " ".join(f"{at:.1f},{y(value):.1f}" for at, value in corners)
        marks.append(Markup('<polygon class="area {}" points="{}"/>').format(_colour(each.colour), points))
    return _figure(marks, _strips(drawn, x, format_y), drawn, _area_keys(drawn))


def histogram(
    edges: Sequence[int],
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    x_name: str,
    format_y: Format = short_number,
) -> Markup:
    """Draw upright bars, with those of several series side by side. Bin i lies between edges i and i + 1."""
    bins = len(edges) - 1
    highest = max((value for _, values in series for value in values), default=0.0)
    _, y, frame = _axes(None, (0.0, highest), format_y, x_name)
    slot = (WIDTH - LEFT - RIGHT) / bins
    width = slot * 0.86 / len(series)
    marks, tips = [frame], []
    for number, (name, values) in enumerate(series):
        for i, value in enumerate(values):
            left = LEFT + slot * (i + 0.07) + width * number
            told = f"{edges[i]} to {edges[i + 1]} {x_name}: {name} {format_y(value)}"
            tips.append(Tip(left, y(value), width, y(0.0) - y(value), told))
            marks.append(_box(f"bar {_colour(number)}", tips[-1]))
    for i in range(0, bins + 1, max(1, bins // 5)):
        marks.append(_text(LEFT + slot * i, HEIGHT - BOTTOM + 15, str(edges[i]), "middle"))
    return _figure(marks, tips, _named(series), _area_keys(_named(series)))


def row_plot(
    labels: Sequence[str], parts: Sequence[tuple[str, Sequence[float]]], *, format_x: Format = short_number
) -> Markup:
    """Draw lying bars that are made of parts, one row for each label."""
    if not labels:
        return Markup('<p class="quiet">no data</p>')
    totals = [sum(values[i] for _, values in parts) for i in range(len(labels))]
    width = min(MOST_ROW_LABEL, max(ROW_LABEL, 6 + _width(labels)))
    figures = [format_x(each) for each in totals]
    x = Scale(0.0, max([*totals, 1e-12]), width, WIDTH - max(52, 5 + _width(figures)))
    marks: list[Markup] = []
    tips: list[Tip] = []
    for i, label in enumerate(labels):
        top = i * ROW_HEIGHT + 4
        fitting = shortened(label, int((MOST_ROW_LABEL - 6) / CHARACTER) - 1)  # titles have the whole
        marks.append(_text(width - 6, top + 11, fitting, "end"))
        start = 0.0
        for number, (name, values) in enumerate(parts):
            told = f"{label}: {name} {format_x(values[i])}".strip()
            tips.append(Tip(x(start), top, x(start + values[i]) - x(start), 14, told))
            marks.append(_box(f"bar {_colour(number)}", tips[-1]))
            start += values[i]
        marks.append(_text(x(start) + 5, top + 11, figures[i], "start"))
    return _figure(marks, tips, _named(parts), _area_keys(_named(parts)), len(labels) * ROW_HEIGHT + 6)


def _width(texts: Sequence[str]) -> float:
    """Return about how much room the longest of the texts takes."""
    return CHARACTER * max(map(len, texts), default=0)


def _named(series: Sequence[tuple[str, Sequence[float]]]) -> list[Series]:
    return [Series(name, (), number) for number, (name, _) in enumerate(series)]


def _axes(
    xs: tuple[float, float] | None,
    ys: tuple[float, float],
    format_y: Format,
    x_name: str = "iteration",
    *,
    most: float = math.inf,
) -> tuple[Scale, Scale, Markup]:
    """Return scales for x and y, and the drawn grid. If `xs` is None, the ticks of x are drawn elsewhere."""
    ticks = nice_ticks(*ys, most=most)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    x = Scale(*(xs or (0.0, 1.0)), LEFT, WIDTH - RIGHT)
    marks: list[Markup] = []
    for tick, label in zip(ticks, tick_labels(ticks, format_y), strict=True):
        at = y(tick)
        marks.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            LEFT, WIDTH - RIGHT, at, at))  # fmt: skip
        marks.append(_text(LEFT - 5, at + 4, label, "end"))
    if xs is not None:
        whole = sorted({round(tick) for tick in nice_ticks(*xs) if xs[0] <= round(tick) <= xs[1]} | {round(xs[0])})
        for number in whole:
            marks.append(_text(x(number), HEIGHT - BOTTOM + 15, str(number), "middle"))
    marks.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_name, "middle"))
    return x, y, Markup("").join(marks)


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale, style: str, *, dots: bool) -> Markup:
    if dots:
        ((at, value),) = points
        return Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(style, x(at), y(value))
    path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    return Markup('<polyline class="{}" points="{}"/>').format(style, path)


class Tip(NamedTuple):
    """A place of a plot, and what it says there by pointing, by tap and by key. In the plot's own units."""

    x: float
    y: float
    width: float
    height: float
    text: str


def _strips(
    series: Sequence[Series], x: Scale, format_y: Format, name: Format = lambda at: f"iteration {at:g}"
) -> list[Tip]:
    """Return a strip over each x that names all values there."""
    values: dict[float, list[str]] = {}
    for each in series:
        for at, value in each.points:
            values.setdefault(at, []).append(f"{each.name} {format_y(value)}".strip())
    xs = sorted(values)
    width = (WIDTH - LEFT - RIGHT) / max(1, len(xs))
    return [Tip(x(at) - width / 2, TOP, width, SPAN, f"{name(at)}: {', '.join(values[at])}") for at in xs]


def _upright(style: str, x: float, start: float, end: float) -> Markup:
    return Markup('<line class="{0}" x1="{1:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{3:.1f}"/>').format(
        style, x, start, end)  # fmt: skip


def _box(style: str, at: Tip) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"></rect>').format(
        style, at.x, at.y, at.width, at.height)  # fmt: skip


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _line(series: Series) -> str:
    """Return the classes of a line. From the seventh on, colours repeat, with another dash."""
    colour = series.colour or 0
    dash = colour + colour // len(COLOURS) if series.dash is None else series.dash
    return f"line {_colour(colour)} d{dash % len(DASHES)}"


def _colour(number: int | None) -> str:
    """Return the classes of a colour. From the seventh on, colours repeat, and bars and areas are paler."""
    again, colour = divmod(number or 0, len(COLOURS))
    return f"c{colour}{' again' if again else ''}"


def _area_keys(series: Sequence[Series]) -> list[Markup]:
    return [_key(f"bar {_colour(each.colour)}", each.name) for each in series if each.name]


def _key(style: str, name: str) -> Markup:
    """Draw an entry of the legend: a piece of line or area, and what it stands for."""
    shape = Markup('<rect class="{}" x="4" width="10" height="10"/>' if style.startswith("bar") else
                   '<line class="{}" x1="0" x2="18" y1="5" y2="5"/>').format(style)  # fmt: skip
    return Markup('<span><svg class="key" viewBox="0 0 18 10">{}</svg>{}</span>').format(shape, name)


def _figure(
    marks: Sequence[Markup], tips: Sequence[Tip], named: Sequence[Series], keys: Sequence[Markup], height: int = HEIGHT
) -> Markup:
    """Return the drawing under its legend, and over it its tips, which lie in the order of the text."""
    legend = Markup('<div class="keys">{}</div>').format(Markup("").join(keys)) if keys else Markup("")
    label = ", ".join(each.name for each in named)
    drawing = Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, Markup("").join(marks)
    )
    return legend + Markup('<div class="figure">{}{}</div>').format(drawing, Markup("").join(_over(height, tips)))


def leading(drawn: str, listed: str, iterations: Set[int]) -> str:
    """Return what was drawn with ways from the tips of these iterations to their samples on the page `listed`.

    A way shows where its tip has the focus. It stands before the tip, so that keys go from tip to tip.
    """
    way = rf'<a class="way" href="{listed}#iteration-\1">samples of iteration \1</a>\g<0>'
    known = "|".join(map(str, iterations))
    return re.sub(rf'<i class="tip whole"[^>]* aria-label="iteration ({known}):', way, drawn)


def _over(height: int, tips: Sequence[Tip]) -> Iterator[Markup]:
    """Yield what shows the text of a tip to pointer, tap and key; the style sheet places those of the whole height."""
    for tip in tips:
        is_whole = (tip.y, tip.height, height) == (TOP, SPAN, HEIGHT)
        place = f"left:{100 * tip.x / WIDTH:.1f}%;width:{100 * tip.width / WIDTH:.2f}%"
        place += "" if is_whole else f";top:{100 * tip.y / height:.1f}%;height:{100 * tip.height / height:.1f}%"
        kind = "tip whole" if is_whole else "tip"
        yield Markup('<i class="{}" tabindex="0" role="img" style="{}" aria-label="{}"></i>').format(
            kind, place, tip.text
        )
