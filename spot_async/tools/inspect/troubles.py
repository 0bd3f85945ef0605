"""The parts of a report about what holds a run back: attempts and turns that failed, stale samples, nothing to learn.

Pure. A reason may quote a server or a tool, so it is cut, made visible and escaped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from spot_async.base.text import shortened, visible
from spot_async.checks.score_rows import MOST_MASKED
from spot_async.run_directory.reading import FailedAttempts
from spot_async.run_directory.samples import SampleStatistics
from spot_async.telemetry.bottleneck import PUBLISHES, percent
from spot_async.telemetry.failures import StageTally
from spot_async.telemetry.totals import Rows, lag_shares, masked_share, total
from spot_async.tools.pages import svg
from spot_async.tools.pages.page import Plot, Section, filled, lines, present, stacked
from spot_async.tools.pages.series import Series, seconds

REASON_CHARACTERS = 200
ROWS_SHOWN = 20
TURNS_SHOWN = 10
STORM = 0.2  # attempts made again, as a share of an iteration's requests, that are worth a mark
HEADINGS = ("stage", "class", "what happened", "attempts", "iterations", "time lost", "the newest reason")
NOTE = (
    "Most were made again, so they cost time and no prompt. An iteration is the time until it ended. Time lost is "
    "that of all requests together, with the pauses after them. logs/run.jsonl has each one."
)


def failures_section(failed: Sequence[FailedAttempts], rows: Rows) -> Section:
    """Return a table of equal failures, and a plot of them by iteration; both are empty where none failed."""
    if not failed:
        return Section("Failures", ())
    by_iteration: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for each in failed:
        by_iteration[each.stage][each.iteration] += each.count
    last = max(int(rows[-1]["iteration"]) if rows else 0, *(each.iteration for each in failed))
    series = [
        Series(visible(stage), [(float(i), float(counts[i])) for i in range(1, last + 1)], number)
        for number, (stage, counts) in enumerate(by_iteration.items())
    ]
    shares = ", ".join(f"{stage} {tally}" for stage, tally in tallies(failed, rows).items())
    plots = [
        Plot("Attempts that failed", f"{visible(shares)}. {NOTE}", _table(failed)),
        Plot("Attempts that failed, by iteration", "Of each stage.", svg.line_plot(series, from_zero=True)),
    ]
    return Section("Failures", tuple(plots))


def turns_section(rows: Rows, statistics: SampleStatistics) -> Section:
    """Return plots of a run's episodes, and a table of the most frequent errors; none without an environment."""
    shown = [
        (*(visible(shortened(each, REASON_CHARACTERS)) for each in failed), f"{count:,}")
        for failed, count in statistics.failed_turns.most_common(TURNS_SHOWN)
    ]
    headings = ("kind", "what was answered", "turns")
    kinds = {"anything": "calls", "an error": "errors", "to an unreadable call": "unreadable", "killed": "killed"}
    ends = {"turns": "environment/out_of_turns", "tokens": "environment/out_of_tokens"}
    return Section(
        "Turns",
        present(
            ("Turns", "Mean of the student's turns in a response.",
             lines(rows, {"turns": "environment/turns"}, from_zero=True)),
            ("What the environment answered", "Share of responses in which some turn got it.",
             lines(rows, {what: f"environment/{name}" for what, name in kinds.items()}, percent, from_zero=True,
                   most=1.0)),
            ("Ends without an answer", "Share of responses that used up environment.max_turns, or "
             "sampling.max_response_tokens.", lines(rows, ends, percent, from_zero=True, most=1.0)),
            ("Tokens that were only read", "Share of a response's.",
             lines(rows, {"read": "environment/read_share"}, percent, from_zero=True, most=1.0)),
            ("Reward of the environment", "Mean over responses.", lines(rows, {"reward": "environment/reward"})),
            ("Most frequent errors", f"The first {TURNS_SHOWN}, over all samples that were written.",
             Markup(filled("table.html", name="errors", headings=headings, rows=shown)) if shown else None),
        ),
    )  # fmt: skip


def troubles_at(rows: Rows) -> dict[float, str]:
    """Return in words what bent an iteration's times: limits lowered, servers restarted, many attempts made again."""
    found: dict[float, str] = {}
    for row in rows:
        said = []
        for name, value in row.items():
            area, _, figure = name.rpartition("/")
            if not value or figure not in ("limit_decreases", "restarts", "retried"):
                continue
            of = visible(area.partition("/")[2])
            if figure != "retried":
                said.append(f"{of}: {'limit lowered' if figure == 'limit_decreases' else 'restarted'} {value:.0f} x")
            elif value > STORM * row.get(f"{area}/requests", 0.0):
                said.append(f"{of}: {value:.0f} attempts made again")
        if said:
            found[row["iteration"]] = f"iteration {row['iteration']:.0f}: {', '.join(said)}"
    return found


def tallies(failed: Iterable[FailedAttempts], rows: Rows = ()) -> Mapping[str, StageTally]:
    """Return the attempts of each stage of which some failed.

    Evaluations count no requests in `rows`, so nothing says how many attempts they made.
    """
    found: defaultdict[str, StageTally] = defaultdict(StageTally)
    for each in failed:
        found[each.stage].failed[each.brief] += each.count
    for stage, tally in found.items():
        if answered := int(total(rows, f"stage/{stage}/requests")):
            tally.attempts = answered + tally.failed.total()
    return found


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
    return Markup(filled("table.html", name="attempts that failed", headings=HEADINGS, rows=lines))


def _span(iterations: Sequence[int]) -> str:
    first, last = iterations[0], iterations[-1]
    return f"{first}" if first == last else f"{len(iterations)} from {first} to {last}"


def staleness_section(rows: Rows) -> Section:
    """Return plots of how far training, its samples and the served weights are apart; none for a strict run."""
    shares = lag_shares(rows)
    work: dict[str, str] = {phase: f"publish/{phase.replace(' ', '_')}_s" for phase in ("wait for weights", *PUBLISHES)}
    return Section(
        "Staleness",
        present(
            ("Lag of tokens", "Share of all tokens trained on, by the iterations that the weights which sampled them "
             "were behind.",
             svg.row_plot([f"lag {lag}" for lag in shares], [("", [*shares.values()])], format_x=percent)
             if shares else None),
            ("Lag by iteration", "Of the tokens trained on: mean and largest. Never above max_staleness.",
             lines(rows, {"mean": "train/lag_mean", "largest": "train/lag_max"}, from_zero=True)),
            ("Weights trained and served", "By the iterations that made them, as each iteration ends.",
             lines(rows, {"trained": "iteration", "served": "weights/served"}, from_zero=True, smooth=False)
             if any("weights/served" in row for row in rows) else None),
            ("What publishing did", "Seconds of each iteration, beside the trainer. While it waits for weights, it "
             "holds nothing up.",
             stacked(rows, work)),
            ("What old samples are worth", "Effective sample size of the tokens, as a share of their number. 1 is "
             "as good as on-policy.",
             lines(rows, {"effective": "train/effective_sample_share"}, percent, most=1.0)),
            ("What staleness changes", "KL from the weights that sampled to those that train, nats per token: lagging "
             "tokens, and beside them the server's own mismatch.",
             lines(rows, {"staleness": "train/staleness_kl", "server": "train/mismatch_kl"}, from_zero=True)
             if any("train/staleness_kl" in row for row in rows) else None),
        ),
    )  # fmt: skip


def staleness_words(config: Mapping[str, Any], rows: Rows) -> str | None:
    """Return how stale samples could be, and how stale they were; None for a strict run."""
    if not config.get("max_staleness"):
        return None
    shares = lag_shares(rows)
    lags = ", ".join(f"{percent(share)} lag {lag}" for lag, share in shares.items())
    mean = sum(lag * share for lag, share in shares.items())
    return f"at most {config['max_staleness']}" + (f"; of the tokens {lags} (mean {mean:.2f})" if shares else "")


NO_SIGNAL_REASONS = (
    "too hard problems, too small a sampling.max_response_tokens, or a verifier that finds no answers; "
    "`spot-async inspect` shows what was written"
)


def missing_signal(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Return that line, from the iterations' metrics.

    None if outcomes taught something, or if the policy asks for none.
    """
    if rows and all(row.get("train/updates") == 0 for row in rows):
        return (
            "No iteration made a step: nothing could be trained on, and the weights are those of the start. "
            "`left_out` in samples.jsonl says why of each sample; `spot-async inspect` shows it."
        )
    masked = masked_share(rows)
    if masked is not None and masked > MOST_MASKED:
        return (
            f"The teacher masked {masked:.1%} of the positions: little or nothing was learned from it. `spot-async "
            "check` says why; use a server that takes and names tokens by id."
        )
    selected, retained = (sum(row.get(f"spot/{name}", 0.0) for row in rows) for name in ("selected", "retained"))
    if selected and not retained:
        return (
            "No probed position was retained, because no candidate was judged to lead to a correct answer: this was "
            f"OPD, at the price of the probes. That comes of {NO_SIGNAL_REASONS}."
        )
    shares = [row["grpo/no_signal"] for row in rows if "grpo/no_signal" in row]
    if shares and min(shares) == 1.0:
        return (
            "All responses of each prompt had the same reward: there was no advantage to learn from. That comes of too "
            f"easy or {NO_SIGNAL_REASONS}."
        )
    return None
