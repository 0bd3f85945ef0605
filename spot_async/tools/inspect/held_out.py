"""Makes the part of a run's report about evaluations: the curve, the best student, and the table.

It reads what the run wrote about them; nothing is evaluated or judged here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from spot_async.base.text import counted, visible, with_error
from spot_async.evaluation.metrics import Estimate, EvaluationFigures, Figures, over_all, read_figures
from spot_async.run_directory.layout import evaluated
from spot_async.run_directory.reading import RunFiles
from spot_async.telemetry.bottleneck import percent
from spot_async.telemetry.evaluations import kind_of_row, marked, notes
from spot_async.telemetry.screen import number_table
from spot_async.telemetry.totals import Rows
from spot_async.tools.pages import svg
from spot_async.tools.pages.series import Series


@dataclass(frozen=True)
class ResultTable:
    """Figures before and after training, in percent with standard errors."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # tier or benchmark, problems, figures; the last is over everything
    note: str  # in lines

    def for_terminal(self) -> Table:
        table = number_table(*(heading.replace(" ", "\n") for heading in self.headings))
        for row in self.rows:
            name, *figures = row
            table.add_row(Text(visible(name)), *figures, end_section=row in self.rows[-2:-1])
        return table

    @property
    def headline(self) -> str:
        """Return what training came to over everything, such as `32.5 -> 51.2 % held out (Avg@8), +18.8 ±1.8`."""
        figures = dict(zip(self.headings[2:], self.rows[-1][2:], strict=True))
        name = self.headings[2].rpartition(" ")[0]
        known = [figures[key] for when in ("before", "after") if (key := f"{name} {when}") in figures]
        change = figures.get(f"{name} change")
        values = " \N{RIGHTWARDS ARROW} ".join(each.partition(" ")[0] for each in known)
        if not change:
            return f"{values} % held out ({name}) {known[0].partition(' ')[2]}"
        size, _, error = change.partition(" ±")
        nothing = ": no measurable change" if error and abs(float(size)) < 2 * float(error) else ""
        return f"{values} % held out ({name}), {change}{nothing}"


@dataclass(frozen=True)
class HeldOut:
    """The evaluations that were made during a run."""

    # Each is a figure over all problems by iteration; 0 is before training. The first, Avg@k, picks the best student.
    curves: tuple[Series, ...]

    @property
    def best(self) -> int:
        """The index of the best evaluation of those during training; of equal ones, the first."""
        points = self.curves[0].points
        trained = [i for i, (iteration, _) in enumerate(points) if iteration > 0]
        return max(trained, key=lambda i: points[i][1])

    @property
    def best_words(self) -> str:
        """Return the best student and its figure in words, and whether training improved it."""
        curve, best = self.curves[0], self.best
        iteration, value = curve.points[best]
        words = f"iteration {iteration:g}, {curve.name} {with_error(value, curve.errors[best])} %"
        first, before = curve.points[0]
        return words + (", no better than before training" if first == 0 and value <= before else "")

    @property
    def headline(self) -> str:
        """Return the first and the newest figure."""
        (_, first), (iteration, last) = self.curves[0].points[0], self.curves[0].points[-1]
        at = f"{self.curves[0].name}, iteration {iteration:g}"
        return f"{percent(first)} \N{RIGHTWARDS ARROW} {percent(last)} held out so far ({at})"

    @property
    def note(self) -> str:
        return (
            "All problems; bars: one standard error. "
            f"{'Iteration 0 is before training. ' if self.curves[0].points[0][0] == 0 else ''}"
            f"Upright line: the best by {self.curves[0].name}, picked by these same problems, so it is optimistic."
        )

    def figure(self) -> Markup:
        marked = {self.curves[0].points[self.best][0]: "the best"}
        return svg.line_plot(self.curves, format_y=percent, most=1.0, marked=marked)


def held_out(files: RunFiles, rows: Rows) -> HeldOut | None:
    """Return a run's evaluations, with its metrics' `rows`; None if none was judged while it trained."""
    whens = [when for when in evaluated(files.path) if when.isdigit()]
    found = {int(when): figures for when in whens if (figures := _overall(files, when)) is not None}
    if not found:
        return None
    k = next(iter(found.values())).samples
    for when, iteration in (("before", 0), ("after", int(rows[-1]["iteration"]) if rows else 0)):
        # An evaluation after the last iteration would be the same one as that after the run.
        if iteration not in found and (figures := _overall(files, when)) is not None:
            found[iteration] = figures
    averages = {iteration: each.avg for iteration, each in sorted(found.items())}
    passes = {iteration: each.pass_at.get(k) for iteration, each in sorted(found.items())}
    # With one sample (k = 1) both figures are the same, so one is enough.
    curves = [_curve(f"Avg@{k}", averages), *([_curve(f"Pass@{k}", passes)] if k > 1 else [])]
    return HeldOut(tuple(curve for curve in curves if curve.points))


def figures_of(files: RunFiles, when: str) -> EvaluationFigures | None:
    """Return the figures of the evaluation `before` or `after` a run, or of an iteration's six digits; None without."""
    path = files.path / f"evaluation-{when}.json"
    return read_figures(path) if path.exists() else None


def _overall(files: RunFiles, when: str) -> Figures | None:
    figures = figures_of(files, when)
    return None if figures is None else over_all(figures.rows)


def _curve(name: str, estimates: Mapping[int, Estimate | None]) -> Series:
    known = {float(iteration): each for iteration, each in estimates.items() if each is not None}
    points = [(iteration, each.value) for iteration, each in known.items()]
    errors = [math.nan if each.standard_error is None else each.standard_error for each in known.values()]
    return Series(name, points, errors=errors)


def result_table(
    summary: Mapping[str, Any] | None, config: Mapping[str, Any], evaluation: EvaluationFigures | None
) -> ResultTable | None:
    """Return Avg@k and Pass@k per tier, or per benchmark, before and after; None if nothing was judged.

    `evaluation` is the last one, which has what its figures need as notes.
    """
    if summary is None:
        return None
    evaluations = {when: summary.get(when) for when in ("before", "after")}
    found = {when: each for when, each in evaluations.items() if each and each["tiers"]}
    if not found:
        return None
    whole = next(iter(found.values()))
    k = whole["samples"]
    ks = {tier: each.get("pass_k", k) for tier, each in whole["tiers"].items()}
    is_even = set(ks.values()) <= {k}
    metrics = ("avg", "pass")[: max(ks.values(), default=k)]  # with one sample both figures are the same
    at_k = f"@{k}" if is_even else ""
    changes = summary.get("change") or {}
    part = "tier" if evaluation is None else kind_of_row(evaluation)
    headings = [part, "n", *(f"{metric.capitalize()}{at_k} {when}" for metric in metrics for when in found)]
    behind_avg = 2 + len(found)  # where the change stands, so that a phone shows it
    headings[behind_avg:behind_avg] = [f"Avg{at_k} change"] if changes else []
    evaluated = {} if evaluation is None else evaluation.rows
    rows = []
    for tier in whole["tiers"]:
        figures = [each["tiers"][tier] for each in found.values()]
        cells = [with_error(f[m], f[f"{m}_standard_error"]) for m in metrics for f in figures]
        if changes:
            change = changes[tier]
            cells.insert(len(found), with_error(change["avg"], change["avg_standard_error"], signed=True))
        name = tier if is_even else f"{tier} (Pass@{ks[tier]})"
        rows.append((marked(name, evaluated.get(tier)), str(figures[0]["problems"]), *cells))
    paired = " The change is paired on problems." if changes else ""
    note = f"Held-out problems: percent ± standard error over the n problems of a {part}."
    note += paired + sampling_note(config, evaluation)
    return ResultTable(tuple(headings), tuple(rows), "\n".join([note, *(notes(evaluation) if evaluation else ())]))


def sampling_note(config: Mapping[str, Any], evaluation: EvaluationFigures | None) -> str:
    """Return how responses were drawn in the evaluation and in training, since their accuracies differ for that."""
    given = {} if evaluation is None else evaluation.settings
    settings = {name.rpartition(".")[2]: value for name, value in given.items() if name.count(".") == 1}
    if "temperature" not in settings:
        return ""
    samples = f", {counted(settings['samples'], 'sample')} a problem" if "samples" in settings else ""
    return f" Drawn at {_drawn_at(settings)}{samples}; training draws at {_drawn_at(config.get('sampling', {}))}."


def _drawn_at(settings: Mapping[str, Any]) -> str:
    return f"temperature {settings.get('temperature', 1):g}, top-p {settings.get('top_p', 1):g}"
