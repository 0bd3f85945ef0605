"""`spot-async compare`: puts reading, computing, printing and writing together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.base.text import visible
from spot_async.errors import DataError
from spot_async.telemetry.screen import shown
from spot_async.tools.compare import tables
from spot_async.tools.compare.compute import Compute, compute_rows, read_compute
from spot_async.tools.compare.page import comparison_page
from spot_async.tools.compare.reading import (
    Evaluated,
    PairedBenchmark,
    different_settings,
    different_versions,
    judged_by,
    paired,
    read_evaluated,
    same_measurements,
)
from spot_async.tools.compare.statistics import Comparison, PassCurves, compare, pass_curves
from spot_async.tools.inspect.inspect_command import write_linked
from spot_async.tools.inspect.report import read_report
from spot_async.tools.pages.page import Links, address, folder_of, is_plain, write_page

STYLES = {"best": "bold", "second": "underline", "": ""}
NAME_WIDTH = 12  # names are not folded to fewer characters, however narrow the screen is
BETWEEN = 3  # characters between two columns of a table


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command. The command line has checked their ranges."""

    baseline: str | None = None  # a row's name; default: the first
    benchmarks: Sequence[str] = ()  # default: those that count for the first run's mean
    pass_k: int | None = None
    draws: int = 10_000
    seed: int = 0
    confidence: float = 0.95
    output: Path | None = None
    html: Path | None = None  # also a page, with the curves of training runs


def run(screen: Console, arguments: Sequence[str], options: CompareOptions) -> None:
    """Compare runs, and print and write the comparison. Raises DataError for what cannot be compared."""
    runs = [read_evaluated(argument) for argument in arguments]
    benchmarks = paired(runs, options.benchmarks)
    methods = [run.name for run in runs]
    comparison = compare(
        methods,
        benchmarks,
        baseline=_baseline(methods, options.baseline),
        k=options.pass_k,
        draws=options.draws,
        seed=options.seed,
        confidence=options.confidence,
    )
    took = [(run.name, read_compute(run.path, Path(run.figures.model))) for run in runs]
    computed = [(name, compute) for name, compute in took if compute is not None]  # of training runs that are there
    notes = _notes(comparison, benchmarks, runs)
    curves = pass_curves(benchmarks)
    if options.output is not None:
        write(options.output, comparison, curves, notes, computed)
    show(screen, comparison, notes, computed)
    if options.output is not None:
        screen.print(shown(f"written: {options.output}"), soft_wrap=True)
    if options.html is not None:
        reports = write_reports(screen, options.html, runs)
        page = comparison_page(comparison, runs, notes, reports, pass_curves=curves)
        write_page(screen, options.html, page, is_named=True)


def write_reports(screen: Console, page: Path, runs: Sequence[Evaluated]) -> Links:
    """Write the reports of the training runs into a folder beside the page, and return links to them."""
    links = []
    for number, run in enumerate(runs if is_plain(page) else ()):
        if (files := run.trained) is not None:
            folder = folder_of(page, "runs")
            path = folder / f"run-{number}.html"
            write_linked(screen, files, path, read_report(files), [("comparison", address(page, folder))])
            links.append((f"report of {visible(run.name)}", address(path, page.parent)))
    return links


def write(
    directory: Path,
    comparison: Comparison,
    curves: Sequence[PassCurves],
    notes: Sequence[str],
    computed: Sequence[tuple[str, Compute]],
) -> None:
    """Write all files of a comparison. Raises DataError."""
    texts = {
        "comparison.md": tables.markdown(comparison, notes, compute_rows(computed)),
        "comparison.tex": tables.latex(comparison, notes),
        "comparison.csv": tables.long_csv(comparison),
        "pass_at_k.csv": tables.curves_csv(comparison.methods, curves),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"--output {directory}: cannot be written: {error.strerror}") from None


def show(
    screen: Console, comparison: Comparison, notes: Sequence[str], computed: Sequence[tuple[str, Compute]]
) -> None:
    """Print the paper's columns, in one table for each metric so that they fit a terminal."""
    ranks = tables.marks(comparison.values)
    for metric in comparison.metrics:
        places = [i for i, column in enumerate(comparison.columns) if column.metric == metric]
        rows = [
            [shown(name), *(Text(tables.percent(values[i]), style=STYLES[row[i]]) for i in places)]
            for name, row, values in zip(comparison.methods, ranks, comparison.values, strict=True)
        ]
        _show_table(screen, metric, ["method", *(comparison.columns[i].benchmark for i in places)], rows)
    for title, headings, differences in tables.difference_tables(comparison):
        _show_table(screen, title, headings, [[*map(shown, cells)] for cells in differences])
    if computed:
        headings, of_methods = compute_rows(computed)
        _, *lines = zip(headings, *of_methods, strict=True)  # methods become columns, since they are fewer than figures
        rows = [[*map(shown, line)] for line in lines]
        _show_table(screen, "Compute of training", ["", *(name for name, _ in computed)], rows)
    for note in notes:
        screen.print(shown(note), soft_wrap=True)


def _show_table(screen: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print a table, in parts if the screen is too narrow. Names are folded; figures are neither cut nor folded."""
    names, *columns = (
        [shown(heading), *cells] for heading, cells in zip(headings, zip(*rows, strict=True), strict=True)
    )
    longest_name = max(each.cell_len for each in names)
    widths = [max(min(heading.cell_len, NAME_WIDTH), *(each.cell_len for each in cells)) for heading, *cells in columns]
    begin = 0
    while begin < len(columns):
        end, room = begin, screen.width - BETWEEN
        while end < len(columns) and (end == begin or room - widths[end] - BETWEEN >= min(longest_name, NAME_WIDTH)):
            room -= widths[end] + BETWEEN
            end += 1
        table = Table(title=shown(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(names[0], overflow="fold", width=max(1, min(longest_name, room)))
        for column, width in zip(columns[begin:end], widths[begin:end], strict=True):
            table.add_column(column[0], justify="right", overflow="fold", width=width)
        for cells in zip(names[1:], *(column[1:] for column in columns[begin:end]), strict=True):
            table.add_row(*cells)
        screen.print(table)
        begin = end


def _baseline(methods: Sequence[str], wanted: str | None) -> int:
    if wanted is None:
        return 0
    if wanted not in methods:
        raise DataError(f"--baseline {wanted}: no such row; there are {', '.join(methods)}")
    return methods.index(wanted)


def _notes(comparison: Comparison, benchmarks: Sequence[PairedBenchmark], runs: Sequence[Evaluated]) -> list[str]:
    sizes = ", ".join(f"{each.name} {len(each.correct)}" for each in benchmarks)
    if len(benchmarks) == 1:  # the table's heading names it already
        sizes = str(len(benchmarks[0].correct))
    names = [each.name for each in benchmarks]
    judges = f", judged by {judged}" if (judged := judged_by(runs, names)) else ""
    problems = f"Problems: {sizes}; {comparison.samples} responses each{judges}."
    baseline, share = comparison.methods[comparison.baseline], f"{comparison.confidence:.0%}"
    notes = [f"Percent; best bold, second underlined. {problems}" if len(runs) > 1 else f"Percent. {problems}"]
    if len(runs) > 1:
        notes.append(
            f"Differences from {baseline}: points with a {share} percentile interval of {comparison.draws:,} bootstrap "
            f"draws of problems, paired by problem and stratified by benchmark (seed {comparison.seed}); * leaves 0 "
            "out. They say how another set of such problems would differ, not another training run. The exact p is "
            "that of McNemar's test; with several responses, of the sign test on which method has more right ones."
        )
        notes += filter(None, (tables.undetectable(comparison, number) for number in range(len(runs))))
    else:
        notes.append("This is one run: give another behind it (NAME=RUN) for differences between them.")
    for each in benchmarks:
        said = {run.name: run.figures.benchmarks[each.name].note for run in runs}
        if len(set(said.values())) == 1:
            said = {"": said[runs[0].name]}
        notes += [f"{each.name}{run and f' of {run}'}: {note}." for run, note in said.items() if note is not None]
    if differences := different_settings(runs, names):
        notes.append(f"Warning: evaluated differently: {'; '.join(differences)}.")
    if versions := different_versions(runs):
        notes.append(f"Warning: made by different versions, which may judge differently: {'; '.join(versions)}.")
    notes += [
        f"Warning: {one} and {other} are the same weights, evaluated with the same settings."
        for one, other in same_measurements(runs, names)
    ]
    return notes
