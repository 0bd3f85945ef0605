"""The plots' arithmetic, and that they are well-formed whatever they are given."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.telemetry.bottleneck import percent
from spot_async.tools.pages import svg
from spot_async.tools.pages.series import (
    MAX_POINTS,
    Scale,
    Series,
    nice_ticks,
    running_mean,
    seconds,
    short_number,
    thinned,
    tick_labels,
)


def parsed(markup):
    return ElementTree.fromstring(f"<div>{markup}</div>")


def drawn_y(markup):
    """Data values of the first line, read back from pixels and the axis labels."""
    root = parsed(markup)
    labels = [(float(t.get("y")) - 4, float(t.text)) for t in root.iter("text") if t.get("text-anchor") == "end"]
    (low_at, low), (high_at, high) = labels[0], labels[-1]
    points = next(root.iter("polyline")).get("points").split()
    at = [float(point.split(",")[1]) for point in points]
    return [low + (y - low_at) / (high_at - low_at) * (high - low) for y in at]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_even_and_reach_around_the_data(low, extent):
    high = low + extent
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-6 * extent
    assert ticks[-1] >= high - 1e-6 * extent
    assert 2 <= len(ticks) <= 12
    step = ticks[1] - ticks[0]
    assert step / 10 ** math.floor(math.log10(step) + 1e-9) == pytest.approx(
        min((1, 2, 5, 10), key=lambda f: abs(f - step / 10 ** math.floor(math.log10(step) + 1e-9))), rel=1e-3
    )


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (3.0, 3.0), (math.nan, 1.0), (0.0, math.inf)])
def test_ticks_of_a_degenerate_range_are_still_ticks(low, high):
    ticks = nice_ticks(low, high)
    assert len(ticks) >= 2
    assert all(map(math.isfinite, ticks))


@pytest.mark.parametrize("value", [0.0, 0.25, 0.98, 1.0])
def test_a_constant_share_stands_among_shares_of_its_size(value):
    ticks = nice_ticks(value, value, most=1.0)
    assert 0.0 <= ticks[0] <= value <= ticks[-1] <= 1.0
    assert ticks[-1] <= max(0.1, 2 * value)
    figure = svg.line_plot([Series("share", [(1, value), (2, value)])], most=1.0)
    assert max(float(t.text) for t in parsed(figure).iter("text") if t.get("text-anchor") == "end") <= 1.0


def test_a_scale_maps_ends_to_ends_and_a_single_value_to_the_middle():
    scale = Scale(10.0, 20.0, 0.0, 100.0)
    assert [scale(10.0), scale(15.0), scale(20.0)] == [0.0, 50.0, 100.0]
    assert Scale(0.0, 1.0, 200.0, 0.0)(0.25) == 150.0  # downwards, as y is
    assert Scale(5.0, 5.0, 0.0, 100.0)(5.0) == 50.0


def test_a_line_is_where_its_axis_says():
    values = [0.31, 0.12, 0.44, 0.2]
    plot = svg.line_plot([Series("loss", list(enumerate(values, start=1)))])
    assert drawn_y(plot) == pytest.approx(values, abs=0.003)


def test_stacked_areas_end_at_the_sum():
    x = [1.0, 2.0]
    plot = svg.stacked_plot([Series("a", list(zip(x, [1.0, 2.0], strict=True))), Series("b", [(1.0, 3.0), (2.0, 2.0)])])
    below, above = (p.get("points").split() for p in parsed(plot).iter("polygon"))
    assert above[2:] == below[1::-1]  # the second area stands on the first
    assert {point.split(",")[1] for point in above[:2]} == {above[0].split(",")[1]}  # 1 + 3 = 2 + 2


@pytest.mark.parametrize(
    ("points", "is_drawn"),
    [([], False), ([(1, 0.5)], True), ([(1, math.nan), (2, math.nan)], False), ([(1, math.nan), (2, 1.0)], True)],
)
def test_few_points_are_drawn_and_none_are_said_to_be_none(points, is_drawn):
    for plot in (svg.line_plot, svg.stacked_plot):
        markup = plot([Series("a", points)])
        assert (len(parsed(markup).findall(".//*[@class='plot']")), "no data" in markup) == (is_drawn, not is_drawn)


def test_the_labels_of_an_axis_are_of_one_kind():
    assert tick_labels([0.0, 0.0005, 0.001, 0.0015], seconds) == ["0 s", "5e-4 s", "1e-3 s", "1.5e-3 s"]
    assert tick_labels([0.098, 0.1, 0.102], percent) == ["9.8 %", "10 %", "10.2 %"]
    assert tick_labels([0.0, 0.05, 0.1], short_number) == ["0", "0.05", "0.1"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1312, 0.1327, ["0.131", "0.1315", "0.132", "0.1325", "0.133"]),
        (0.9988, 1.0012, ["0.998", "0.999", "1", "1.001", "1.002"]),
        (1234.2, 1237.1, ["1234", "1235", "1236", "1237", "1238"]),
        (3.01e-4, 3.04e-4, ["0.000301", "0.000302", "0.000303", "0.000304"]),
        (1000.0, 3000.0, ["1k", "1.5k", "2k", "2.5k", "3k"]),
    ],
)
def test_labels_have_the_digits_that_their_steps_need(low, high, expected):
    assert tick_labels(nice_ticks(low, high), short_number) == expected
    assert tick_labels(nice_ticks(low, high), seconds) == [f"{label} s" for label in expected]


def test_shares_close_together_have_the_digits_that_their_steps_need():
    assert tick_labels(nice_ticks(0.9988, 1.0), percent) == ["99.85 %", "99.9 %", "99.95 %", "100 %"]


def test_only_a_long_single_line_is_smoothed_and_the_legend_says_so():
    rates = Series("rate", [(i, float(i % 3)) for i in range(1, 31)])
    assert "thick: running mean" in svg.line_plot([rates])
    for plot in (svg.line_plot([rates], smooth=False), svg.line_plot([rates, rates])):
        assert "running mean" not in plot
        assert "raw" not in plot


@pytest.mark.parametrize("label", ["lag 0", "max_staleness 10", "a token of more letters than any row has room for"])
def test_labels_of_rows_and_their_figures_are_within_the_drawing(label):
    narrow = 5.0  # a character is wider than this on average
    root = parsed(svg.row_plot([label], [("", [0.123456])], format_x=lambda value: f"{value} of everything"))
    shown, figure = root.iter("text")
    assert float(shown.get("x")) - narrow * len(shown.text) >= 0
    assert float(figure.get("x")) + narrow * len(figure.text) <= svg.WIDTH
    (bar,) = (each for each in root.iter("rect") if "bar" in each.get("class"))
    assert float(bar.get("width")) > 0
    (tip,) = (
        each for each in root.iter() if each.get("class") == "tip"
    )  # it lies over the bar, and has the whole label
    assert label in tip.get("aria-label")
    left, width = (float(part) for part in re.findall(r"(?:left|width):([\d.]+)%", tip.get("style")))
    assert left / 100 * svg.WIDTH == pytest.approx(float(bar.get("x")), abs=0.3)
    assert width / 100 * svg.WIDTH == pytest.approx(float(bar.get("width")), abs=0.3)


def test_names_are_escaped():
    hostile = '</svg><script>alert("x")</script>'
    pages = [
        svg.line_plot([Series(hostile, [(1, 1.0), (2, 2.0)])]),
        svg.row_plot([hostile], [(hostile, [1.0])]),
        svg.histogram([0, 1], [(hostile, [1.0])], x_name=hostile),
    ]
    for page in pages:
        assert "<script" not in page
        assert not list(parsed(page).iter("script"))
        assert hostile in "".join(parsed(page).itertext())


def test_long_lines_are_averaged_and_their_mean_stays():
    points = [(float(i), float(i % 7)) for i in range(5000)]
    thin = thinned(points)
    assert len(thin) <= MAX_POINTS
    assert sum(y for _, y in thin) / len(thin) == pytest.approx(3.0, abs=0.02)
    assert [y for _, y in running_mean([(i, 2.0 * i) for i in range(50)])] == pytest.approx(
        [2.0 * i for i in range(50)]
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (5000, "5k"), (15_300, "15.3k"), (2e6, "2M"), (0.00012, "1.2e-4")]
)
def test_numbers_are_short(value, text):
    assert short_number(value) == text
