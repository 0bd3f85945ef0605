"""Makes the report's section of attempts that failed: by stage, class and iteration, with the newest reasons.

A reason may quote a server, so it is cut, made visible and escaped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from spot_async.base.text import shortened, visible
from spot_async.errors import FailureClass
from spot_async.run_directory.reading import FailedAttempts
from spot_async.telemetry.bottleneck import percent
from spot_async.telemetry.failures import kinds_words
from spot_async.telemetry.totals import Rows, total
from spot_async.tools.inspect.plots import Plot, Section
from spot_async.tools.pages import svg
from spot_async.tools.pages.series import Series, seconds

REASON_CHARACTERS = 200
ROWS_SHOWN = 20
HEADINGS = ("stage", "class", "what happened", "attempts", "iterations", "time lost", "the newest reason")
NOTE = (
    "Most were made again, so they cost time and no prompt. An iteration is the time until it ended. Time lost is "
    "that of all requests together, with the pauses after them. logs/run.jsonl has each one."
)


def failures_section(failed: Sequence[FailedAttempts], rows: Rows) -> Section:
    """Return a table of equal failures, and a plot of them by iteration; both are empty where none failed."""
    if not failed:
        return Section("Failures", ())
    by_iteration: dict[str, Counter[int]] = defaultdict(Counter)
    for each in failed:
        by_iteration[each.stage][each.iteration] += each.count
    last = max(int(rows[-1]["iteration"]) if rows else 0, *(each.iteration for each in failed))
    series = [
        Series(visible(stage), [(float(i), float(counts[i])) for i in range(1, last + 1)], number)
        for number, (stage, counts) in enumerate(by_iteration.items())
    ]
    shares = ", ".join(f"{visible(stage)} {_share(stage, counts, rows)}" for stage, counts in by_iteration.items())
    plots = [
        Plot("Attempts that failed", f"{shares}. {NOTE}", _table(failed)),
        Plot("Attempts that failed, by iteration", "Of each stage.", svg.line_plot(series, from_zero=True)),
    ]
    return Section("Failures", tuple(plots))


def failures_by_stage(failed: Sequence[FailedAttempts]) -> Mapping[str, str]:
    """Return what happened at each stage in words. Throttled attempts have a verdict of their own."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for each in failed:
        if each.failure != FailureClass.THROTTLED:
            kinds[each.stage][each.brief] += each.count
    return {stage: kinds_words(counts) for stage, counts in kinds.items()}


def _share(stage: str, counts: Counter[int], rows: Rows) -> str:
    """Return how many of a stage's attempts failed. Evaluations count no requests in `rows`, so they have no share."""
    failed, answered = counts.total(), total(rows, f"stage/{stage}/requests")
    return (
        f"{failed:,} of {failed + answered:,.0f} ({percent(failed / (failed + answered))})"
        if answered
        else f"{failed:,}"
    )


def _table(failed: Sequence[FailedAttempts]) -> Markup:
    same: dict[tuple[str, str, str], list[FailedAttempts]] = defaultdict(list)
    for each in failed:
        same[each.stage, each.failure, each.brief].append(each)
    ordered = sorted(same.items(), key=lambda item: -sum(each.count for each in item[1]))
    lines = [
        (
            *map(visible, what),
            f"{sum(each.count for each in those):,}",
            _span(sorted({each.iteration for each in those})),
            seconds(sum(each.lost_s for each in those)),
            visible(shortened(those[-1].reason, REASON_CHARACTERS)),
        )
        for what, those in ordered[:ROWS_SHOWN]
    ]
    head = Markup("").join(Markup("<th>{}</th>").format(each) for each in HEADINGS)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in line))
        for line in lines
    )
    return Markup('<div class="scroll"><table><tr>{}</tr>{}</table></div>').format(head, body)


def _span(iterations: Sequence[int]) -> str:
    first, last = iterations[0], iterations[-1]
    return f"{first}" if first == last else f"{len(iterations)} from {first} to {last}"
