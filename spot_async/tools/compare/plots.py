"""Writes Pass@k curves to files: SVG by our own drawing, PNG by matplotlib if it is installed.

A PNG needs something that draws text. Matplotlib brings its own font, so this works on machines without any. It is an
extra (`spot-async[plots]`), because nothing else here needs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from spot_async.config.evaluation import MACRO, MEAN_COLUMN
from spot_async.tools.compare.statistics import PassCurves
from spot_async.tools.pages import svg
from spot_async.tools.pages.series import Series

MISSING = "no PNG curves: they need matplotlib (pip install matplotlib); the SVG ones are complete"


def write_curves(directory: Path, methods: Sequence[str], curves: Sequence[PassCurves]) -> list[str]:
    """Write `pass-at-k-<benchmark>` in both formats; return what people should be told."""
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    earlier = set(directory.glob("pass-at-k-*"))
    for each in curves:
        path = directory / f"pass-at-k-{MACRO if each.benchmark == MEAN_COLUMN else each.benchmark}.svg"
        path.write_text(curve_svg(methods, each), encoding="utf-8", errors="replace")
        if has_matplotlib:
            write_png(path.with_suffix(".png"), methods, each)
        earlier -= {path, path.with_suffix(".png")} if has_matplotlib else {path}
    left = [f"of an earlier comparison: {', '.join(sorted(path.name for path in earlier))}"] if earlier else []
    return left if has_matplotlib else [MISSING, *left]


def curve_svg(methods: Sequence[str], curves: PassCurves) -> str:
    series = [Series(name, points) for name, points in _points(methods, curves)]
    return svg.level_document(series, x_name="k", title=_title(curves), format_y=lambda value: f"{100 * value:.3g}%")


def write_png(path: Path, methods: Sequence[str], curves: PassCurves) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(_points(methods, curves)):
        colour = svg.COLOURS[number % len(svg.COLOURS)]
        style = (0, tuple(map(float, dash.split()))) if (dash := svg.DASHES[number % len(svg.DASHES)]) else "-"
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    axes.set(title=_title(curves), xlabel="k", ylim=(0, None))
    axes.grid(alpha=0.4)
    axes.legend()
    figure.savefig(path)


def _points(methods: Sequence[str], curves: PassCurves) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the points to show of each curve: k at the powers of two, and at the number of responses."""
    ks = sorted({2**i for i in range(curves.samples.bit_length()) if 2**i <= curves.samples} | {curves.samples})
    return [(name, [(float(k), float(curves.values[k - 1, i])) for k in ks]) for i, name in enumerate(methods)]


def _title(curves: PassCurves) -> str:
    return f"{curves.benchmark}: Pass@k, unbiased from {curves.samples} responses a problem"
