"""Writes a comparison as Markdown, LaTeX and CSV, and its cells for the terminal. Pure.

The layout is the paper's. A row for each method has Avg@n of each benchmark and of their mean, then Pass@k likewise.
Values are in percent; the best of a column is bold, the second underlined. Values that look the same rank the same.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from spot_async.tools.compare.statistics import Column, Comparison, PassCurves
from spot_async.types import Float64Array

DECIMALS = 2
Mark = Literal["best", "second", ""]

_LATEX = str.maketrans({c: "\\" + c for c in "&%$#_{}"} | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}",
                        "^": "\\textasciicircum{}"})  # fmt: skip


def marks(values: Float64Array) -> list[list[Mark]]:
    """Return which values (methods, columns) are the best and the second of their column; of one method, none is."""
    shown = rounded(values)
    found: list[list[Mark]] = [[""] * shown.shape[1] for _ in shown]
    if len(shown) == 1:
        return found
    for column in range(shown.shape[1]):
        best, *others = sorted(set(shown[:, column].tolist()), reverse=True)
        for row, value in enumerate(shown[:, column]):
            found[row][column] = "best" if value == best else "second" if others and value == others[0] else ""
    return found


def rounded(shares: npt.ArrayLike) -> Float64Array:
    """Return shares in percent, rounded to `DECIMALS` with halves upwards.

    Shares of few problems, in eighths, often end in 5, which floats would round either way.
    """
    scale = 10.0**DECIMALS
    return np.asarray(np.floor(100 * np.asarray(shares) * scale + 0.5 + 1e-6) / scale)


def ranked_rows(comparison: Comparison, wrap: Mapping[str, str]) -> list[list[str]]:
    """Return a row for each method: its name, then its values, each wrapped as its rank says."""
    every = zip(comparison.methods, marks(comparison.values), comparison.values, strict=True)
    return [
        [name, *(wrap[mark].format(percent(value)) for mark, value in zip(row, values, strict=True))]
        for name, row, values in every
    ]


def percent(share: float) -> str:
    return f"{rounded(share):.{DECIMALS}f}"


def change(difference: float, low: float, high: float) -> str:
    """Return a difference with its interval, and a star if the interval leaves 0 out."""
    star = "*" if low > 0 or high < 0 else ""
    return f"{100 * difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]{star}"


def difference_tables(comparison: Comparison) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield a title, headings and rows for each method but the baseline: its differences, and the exact p of each."""
    low, high = comparison.difference_intervals
    at = {column: number for number, column in enumerate(comparison.columns)}
    for method, of in enumerate(comparison.methods):
        rows = []
        for number, name in enumerate(comparison.benchmarks):
            places = [at[Column(metric, name)] for metric in comparison.metrics]
            avg, *others = (change(comparison.differences[method, i], low[method, i], high[method, i]) for i in places)
            rows.append([name, avg, f"{comparison.p_values[method, number]:.2g}", *others])
        if method != comparison.baseline:
            title = f"{of} minus {comparison.methods[comparison.baseline]}"
            avg, *others = comparison.metrics
            yield title, ["benchmark", avg, "its exact p", *others], rows


def undetectable(comparison: Comparison, method: int) -> str | None:
    """Return a line about the differences of Avg@n that are too small for so many problems; None for no such one."""
    changes = zip(comparison.benchmarks, comparison.differences[method], comparison.detectable[method], strict=False)
    small = [f"{name} {100 * each:+.2f} of {100 * least:.2f}" for name, each, least in changes if 0 < abs(each) < least]
    if not small:
        return None
    return (
        f"{comparison.methods[method]}: in {comparison.metrics[0]} it differs by less than so many problems show in "
        f"80 % of tries (Miller, 2024): {', '.join(small)} points."
    )


def markdown(
    comparison: Comparison, notes: Sequence[str], compute: tuple[Sequence[str], Sequence[Sequence[str]]]
) -> str:
    """Return the whole comparison as one document."""
    columns = [f"{column.metric} {column.benchmark}" for column in comparison.columns]
    rows = ranked_rows(comparison, {"best": "**{}**", "second": "<u>{}</u>", "": "{}"})
    parts = [markdown_table(["method", *columns], rows), *notes]
    for title, headings, cells in difference_tables(comparison):
        parts += [f"## {title}", markdown_table(headings, cells)]
    if compute[1]:
        parts += ["## Compute of training", markdown_table(*compute)]
    return "\n\n".join(parts) + "\n"


def latex(comparison: Comparison, notes: Sequence[str]) -> str:
    r"""Return a `tabular` for `booktabs`, with the notes as comments above it."""
    each = len(comparison.benchmarks)
    spans = [(metric, 2 + number * each, 1 + (number + 1) * each) for number, metric in enumerate(comparison.metrics)]
    lines = [
        *(f"% {note}" for note in notes),
        rf"\begin{{tabular}}{{@{{}}l{('c' * each + ' ') * len(spans)}@{{}}}}".replace(" @", "@"),
        r"\toprule",
        "Method & "
        + " & ".join(rf"\multicolumn{{{each}}}{{c}}{{\textbf{{{metric.translate(_LATEX)}}}}}" for metric, _, _ in spans)
        + r" \\",
        " ".join(rf"\cmidrule(lr){{{first}-{last}}}" for _, first, last in spans),
        "& " + " & ".join(column.benchmark.translate(_LATEX) for column in comparison.columns) + r" \\",
        r"\midrule",
    ]
    for name, *cells in ranked_rows(comparison, {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}):
        lines.append(" & ".join([name.translate(_LATEX), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def long_csv(comparison: Comparison) -> str:
    """Return a line for each method, metric and benchmark, with shares, not percent."""
    rows = [
        (name, *column, *(
            repr(float(values[m, c]))
            for values in (comparison.values, *comparison.intervals, comparison.differences,
                           *comparison.difference_intervals)
        ))
        for m, name in enumerate(comparison.methods)
        for c, column in enumerate(comparison.columns)
    ]  # fmt: skip
    heading = ("method", "metric", "benchmark", "value", "low", "high", "difference", "difference_low",
               "difference_high")  # fmt: skip
    return _csv(heading, rows)


def curves_csv(methods: Sequence[str], curves: Sequence[PassCurves]) -> str:
    """Return a line for each benchmark, k and method."""
    rows = [
        (each.benchmark, k, method, repr(float(value)))
        for each in curves
        for k, row in enumerate(each.values, 1)
        for method, value in zip(methods, row, strict=True)
    ]
    return _csv(("benchmark", "k", "method", "pass_at_k"), rows)


def _csv(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown: names in its first column, and figures."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    rule = ["---", *("---:" for _ in headings[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:]))
