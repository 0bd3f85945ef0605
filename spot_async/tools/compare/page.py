"""Makes the page of a comparison: its table, its differences, and the runs' curves over each other."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from spot_async.base.text import visible
from spot_async.run_directory.reading import RunFiles
from spot_async.telemetry.bottleneck import percent
from spot_async.tools.compare import tables
from spot_async.tools.compare.reading import Evaluated
from spot_async.tools.compare.statistics import Comparison, PassCurves
from spot_async.tools.inspect.held_out import held_out
from spot_async.tools.pages import svg
from spot_async.tools.pages.page import Links, Plot, Section, filled, points
from spot_async.tools.pages.series import Format, Series, fine_percent, running_mean, seconds, short_number

MARKS = {"best": Markup("<strong>{}</strong>"), "second": Markup("<u>{}</u>"), "": Markup("{}")}
# Curves of training, by metric: title, and how values are written. Each is a running mean.
CURVES: tuple[tuple[str, str, Format], ...] = (
    ("rollout/accuracy", "Accuracy in training", percent),
    ("rollout/reward", "Reward", short_number),
    ("rollout/entropy_nats", "Entropy of sampled tokens, nats", short_number),
    ("rollout/tokens", "Length of rollouts, tokens", short_number),
    ("train/advantage_mean", "Advantage, nats a token", short_number),
    ("train/grad_norm", "Gradient norm", short_number),
    ("time/iteration_s", "Time of an iteration", seconds),
)


def comparison_page(
    comparison: Comparison,
    runs: Sequence[Evaluated],
    notes: Sequence[str],
    links: Links = (),
    pass_curves: Sequence[PassCurves] = (),
) -> str:
    """Return the page, with `links` to reports. A run without metrics, such as an evaluation's, has no curves."""
    headings = ["method", *(f"{column.benchmark} {column.metric}" for column in comparison.columns)]
    whole = ("", headings, [[visible(name), *cells] for name, *cells in tables.ranked_rows(comparison, MARKS)])
    trained = curves([(run.name, run.trained) for run in runs])
    sections = Section("Pass@k", pass_plots(comparison.methods, pass_curves)), Section("Training", trained)
    return filled(
        "comparison.html",
        tables=[whole, *tables.difference_tables(comparison)],
        notes=[visible(each) for each in notes],
        links=links,
        sections=[section for section in sections if section.plots],
    )


def pass_plots(methods: Sequence[str], curves: Sequence[PassCurves]) -> list[Plot]:
    """Return Pass@k of each benchmark at the powers of two, and at the number of responses."""
    plots = []
    for each in curves:
        ks = sorted({2**i for i in range(each.samples.bit_length())} | {each.samples})
        series = [
            Series(visible(name), [(float(k), float(each.values[k - 1, i])) for k in ks])
            for i, name in enumerate(methods)
        ]
        figure = svg.level_plot(series, x_name="k", format_y=fine_percent)
        note = f"Unbiased, from {each.samples} responses a problem."
        plots.append(Plot(visible(each.benchmark), note, figure))
    return plots


def curves(runs: Sequence[tuple[str, RunFiles | None]]) -> list[Plot]:
    """Return the curves that at least one run has, each run in a colour of its own. None: it did not train."""
    read = [(visible(name), colour, files, files.metrics()) for colour, (name, files) in enumerate(runs) if files]
    evaluated = [
        Series(name, found.curves[0].points, colour, errors=found.curves[0].errors)
        for name, colour, files, rows in read
        if (found := held_out(files, rows)) is not None
    ]
    drawn: list[tuple[str, str, Format, list[Series]]] = []
    drawn.append(("Accuracy on held-out problems", "Bars: one standard error over problems.", percent, evaluated))
    for metric, title, form in CURVES:
        series = [Series(name, running_mean(points(rows, metric)), colour) for name, colour, _, rows in read]
        drawn.append((title, "Running means.", form, series))
    return [
        Plot(title, note, svg.line_plot(series, format_y=form, smooth=False))
        for title, note, form, series in drawn
        if any(each.points for each in series)
    ]
