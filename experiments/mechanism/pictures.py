"""Draws the pictures of README.md from what `tables.py` computed. It reads no file.

It needs matplotlib, which nothing else does and which is no requirement of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from forecasts import Panel, Point
from matplotlib import rc_context
from matplotlib.figure import Figure

MARKERS = {"choice": "o", "knowledge": "s", "running-sum": "^"}
# Text stays text, and the same curves give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "spot-async", "font.family": "sans-serif", "font.size": 9}


def write_panels(path: Path, panels: Sequence[Panel], *, x_name: str, y_name: str, doubling: bool = False) -> None:
    """Draw the panels beside each other. With `doubling` each step of the horizontal axis is twice the one before."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(panels), 6.2), layout="constrained")
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            _draw(axes, panel)
            if doubling:
                axes.set_xscale("log", base=2)
                axes.set_xticks(xs := sorted({x for curve in panel.curves.values() for x, _ in curve}), map(str, xs))
            axes.set(title=panel.title, xlabel=x_name, ylabel=y_name)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8, frameon=False)
        _save(figure, path)


def _draw(axes: Any, panel: Panel) -> None:
    unnamed = "other rows"
    for row, curve in panel.curves.items():
        xs, ys = zip(*curve, strict=True)
        if row not in panel.named:
            axes.plot(xs, ys, color="lightgrey", linewidth=1, zorder=1, label=unnamed)
            unnamed = "_"  # one entry of the legend for all
            continue
        (line,) = axes.plot(xs, ys, color="black" if row == "base" else None, label=row)
        if row in panel.forecasts:
            end, error = panel.forecasts[row]
            axes.errorbar(xs[-1] * 1.03, end, yerr=error, fmt="x", color=line.get_color(), label=f"{row}, forecast")
    axes.grid(visible=True, linewidth=0.3)


def write_calibration(path: Path, points: Sequence[Point]) -> None:
    """Draw observed gains over predicted ones: as registered, and by accuracy."""
    ways = {
        "observed by the shares of choices": [(each.observed, each.observed_error) for each in points],
        "accuracy gained a decision (exploratory)": [(each.accuracy, each.accuracy_error) for each in points],
    }
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 5.4), layout="constrained")
        for axes, (way, observed) in zip(figure.subplots(1, 2), ways.items(), strict=True):
            for point, (gain, error) in zip(points, observed, strict=True):
                axes.errorbar(
                    100 * point.predicted,
                    100 * gain,
                    xerr=100 * point.predicted_error,
                    yerr=0.0 if np.isnan(error) else 100 * error,
                    fmt=MARKERS[point.setting],
                    label=f"{point.setting}: {point.row}",
                )
            axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
            axes.set(xlabel="predicted gain a decision, points", ylabel=f"{way}, points")
        if points:
            axes.legend(fontsize=7)
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
