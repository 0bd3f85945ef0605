"""The table that `spot-async eval` prints of an `evaluation.json`, and the notes that belong below it."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from spot_async.evaluation.figures import BenchmarkFigures, Estimate, EvaluationFigures, Figures
from spot_async.types import Verdict

NOT_JUDGED = (Verdict.TIMEOUT, Verdict.ERROR)
COUNTED = (Verdict.NO_ANSWER, *NOT_JUDGED)  # the other classes follow from the accuracy


def figures_table(figures: EvaluationFigures) -> Table:
    """One row per benchmark, the tiers of an only one above it, the mean of several below."""
    ks = sorted({k for each in figures.benchmarks.values() for k in each.pass_at if k > 1})
    table = Table(
        title="Percent ± standard error over the n problems of a benchmark; mean tokens of a response",
        title_justify="left",
        title_style="bold",
        caption="\n".join(notes(figures)) or None,
        caption_justify="left",
        caption_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("benchmark", no_wrap=True)
    counted = [verdict.value.replace("_", " ") for verdict in COUNTED]
    for heading in ("n", "samples", "Avg", *(f"Pass@{k}" for k in ks), "tokens", "cut off", *counted):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = list(_rows(figures))
    for number, (name, each) in enumerate(rows):
        table.add_row(name, *_cells(each, ks), end_section=number == len(rows) - 1)
    if figures.macro is not None and len(figures.benchmarks) > 1:
        passed = [words(figures.macro.pass_at.get(k)) for k in ks]
        responses = sum(each.problems * each.samples for each in figures.benchmarks.values())
        counts = [str(figures.verdicts.get(verdict.value, 0)) for verdict in COUNTED]
        pooled = [f"{figures.tokens / responses:,.0f}", f"{100 * figures.truncated:.1f}", *counts]
        table.add_row("macro", str(len(figures.macro.benchmarks)), "", words(figures.macro.avg), *passed, *pooled)
    return table


def _rows(figures: EvaluationFigures) -> Iterator[tuple[str, Figures]]:
    only = len(figures.benchmarks) == 1
    for name, each in figures.benchmarks.items():
        if only:
            yield from each.tiers.items()
        yield ("all" if only else f"{name}{_mark(each)}"), each


def _cells(figures: Figures, ks: list[int]) -> list[str]:
    return [
        str(figures.problems),
        str(figures.samples),
        words(figures.avg),
        *(words(figures.pass_at.get(k)) for k in ks),
        f"{figures.mean_tokens.value:,.0f}",
        f"{100 * figures.truncated:.1f}",
        *(str(figures.verdicts[verdict.value]) if figures.verdicts else "" for verdict in COUNTED),
    ]


def notes(figures: EvaluationFigures) -> Iterator[str]:
    """What the figures are not comparable without."""
    for name, each in figures.benchmarks.items():
        if each.note is not None:
            yield f"* {name}: {each.note}"
    macro = figures.macro
    if macro is not None and len(figures.benchmarks) > 1:
        yield f"macro: unweighted mean over {', '.join(macro.benchmarks)}; counts below it are of all benchmarks"
    missing = sum(figures.verdicts.get(verdict.value, 0) for verdict in NOT_JUDGED)
    if missing:
        yield f"{missing} responses could not be judged (timeout, error) and count as incorrect"


def words(estimate: Estimate | None) -> str:
    """In percent; nothing where there is no figure."""
    if estimate is None:
        return ""
    error = "" if estimate.standard_error is None else f" ±{100 * estimate.standard_error:.1f}"
    return f"{100 * estimate.value:.1f}{error}"


def _mark(figures: BenchmarkFigures) -> str:
    return "" if figures.note is None else " *"
