"""Reads a run into what its report shows: figures, plots, and a verdict on where the time went.

A run that was stopped, is still going, was not evaluated or trains another way has gaps: what is not
there is left out, and the page says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from spot_async.dead_letters import described
from spot_async.inspection import svg
from spot_async.inspection.bottleneck import BottleneckVerdict, judge, percent
from spot_async.inspection.reading import RunFiles
from spot_async.inspection.totals import (
    RELATIVE_BINS,
    Rows,
    SampleStatistics,
    run_times,
    stage_limit,
    stage_names,
    total,
)
from spot_async.spending.records import spending_words
from spot_async.text import visible

LENGTH_BINS = 16
TOP_TOKENS = 14
ADVANTAGE_OF_TEACHER = "Teacher minus student, nats per token. Rises towards 0 as student meets teacher."


@dataclass(frozen=True)
class Plot:
    """One card of the page."""

    title: str
    note: str  # how to read it
    figure: Markup


@dataclass(frozen=True)
class Section:
    title: str
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class ResultRow:
    """One tier before and after, in percent with standard errors."""

    tier: str
    problems: int
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything the page shows."""

    name: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]  # what is missing, and why
    verdict: BottleneckVerdict
    result_headings: tuple[str, ...]
    results: tuple[ResultRow, ...]
    sections: tuple[Section, ...]


def read_report(files: RunFiles, more: Sequence[Section] = ()) -> Report:
    """Read all files of a run; `more` follows its own sections. Raises DataError only for files that are damaged."""
    config, rows, summary = files.config(), files.metrics(), files.summary()
    statistics = SampleStatistics()
    for sample in files.samples():
        statistics.add(sample)
    headings, results = result_table(summary)
    sections = (
        learning_section(rows),
        probing_section(rows, statistics),
        response_section(rows, statistics),
        time_section(rows, config),
        optimiser_section(rows),
        spending_section(rows),
        *more,
    )
    return Report(
        name=files.path.resolve().name,
        facts=facts(config, rows, summary),
        notes=notes(files, config, rows, summary),
        verdict=judge(run_times(rows, config)),
        result_headings=headings,
        results=results,
        sections=tuple(section for section in sections if section.plots),
    )


def learning_section(rows: Rows) -> Section:
    scored = any("teacher/entropy_nats" in row for row in rows)
    advantages = any(row.get("train/advantage_mean") for row in rows)  # none where all is soft targets
    return Section(
        "Learning",
        _present(
            ("Accuracy in training", "Share of the sampled responses that are correct.",
             _lines(rows, {"rollouts": "rollout/accuracy", "teacher": "teacher/accuracy"}, percent, most=1.0)),
            ("Loss and its parts", "What the optimiser minimised; parts that are zero throughout are left out.",
             _lines(rows, {"loss": "train/loss", "policy": "train/loss_policy", "soft targets": "train/loss_branch",
                           "reference": "train/loss_reference"})),
            ("Advantage", ADVANTAGE_OF_TEACHER if scored else "Mean per token, as the policy gives it.",
             _lines(rows, {"mean advantage": "train/advantage_mean"}) if advantages else None),
            ("Teacher entropy", "Nats per token, mean.",
             _lines(rows, {"teacher entropy": "teacher/entropy_nats"})),
        ),
    )  # fmt: skip


def probing_section(rows: Rows, statistics: SampleStatistics) -> Section:
    if not any("spot/selected" in row for row in rows):
        return Section("Probing", ())
    tokens = [token for token, _ in statistics.probed_tokens.most_common(TOP_TOKENS)]
    names = [f"“{visible(token)}”".replace("\n", "⏎") for token in tokens]
    retained = [float(statistics.retained_tokens[token]) for token in tokens]
    dropped = [float(statistics.probed_tokens[token]) - kept for token, kept in zip(tokens, retained, strict=True)]
    edges = [100 * i // RELATIVE_BINS for i in range(RELATIVE_BINS + 1)]
    means = [total / count if count else 0.0
             for total, count in zip(statistics.score_sums, statistics.score_counts, strict=True)]  # fmt: skip
    place = "percent of the response"
    probed = sum(statistics.selected)
    shares = [count / probed for count in statistics.selected] if probed else []
    return Section(
        "Probing",
        _present(
            ("Positions probed and kept", "Per rollout. Kept (B+): at least one candidate led to a correct answer.",
             _lines(rows, {"probed": "spot/selected", "kept": "spot/retained"}, from_zero=True)),
            ("Accuracy of probes", "Share of continuations that end correct.",
             _lines(rows, {"probes": "probe/accuracy", "rollouts": "rollout/accuracy"}, percent, most=1.0)),
            ("Calibration shift", "How far outcomes move the target from the teacher's prior: total variation, 0 to 1.",
             _lines(rows, {"shift": "spot/calibration_shift"}, from_zero=True)),
            ("Where the score looks", "Mean acquisition score by place in the response.",
             svg.histogram(edges, [("", means)], x_name=place) if any(means) else None),
            ("Where positions were probed", "Share of probed positions by place in the response.",
             svg.histogram(edges, [("", shares)], x_name=place, format_y=percent) if shares else None),
            ("Which tokens were probed", "The student's token at the position, most frequent first.",
             svg.row_plot(names, [("kept", retained), ("left out", dropped)]) if names else None),
        ),
    )  # fmt: skip


def response_section(rows: Rows, statistics: SampleStatistics) -> Section:
    return Section(
        "Responses",
        _present(
            ("Length of responses", "Mean tokens per response.",
             _lines(rows, {"rollouts": "rollout/tokens", "teacher": "teacher/tokens"}, from_zero=True)),
            ("Lengths, early and late", "Share of responses by tokens, in the first and the last third of the run.",
             length_histogram(statistics.lengths)),
            ("Cut off and not judged", "Responses that met the token limit, and those the verifier could not decide.",
             _lines(rows, {"cut off": "rollout/truncated", "not judged": "rollout/unverified"}, percent, most=1.0)),
        ),
    )  # fmt: skip


def time_section(rows: Rows, config: Mapping[str, Any]) -> Section:
    stages = stage_names(rows)
    limits = {stage: stage_limit(config, stage) for stage in stages}
    utilisation = [
        svg.Series(stage, [(at, value / limits[stage]) for at, value in _points(rows, f"stage/{stage}/mean_in_flight")])
        for stage in stages
    ]
    used = svg.line_plot(utilisation, format_y=percent, from_zero=True) if any(u.points for u in utilisation) else None
    return Section(
        "Time",
        _present(
            ("Time per phase", "Seconds of each iteration, as the trainer spends them.",
             _stacked(rows, {"wait for batch": "time/wait_for_batch_s", "train": "time/train_s",
                             "update weights": "time/update_weights_s", "evaluate": "time/evaluate_s"})),
            ("What the trainer waited for", "The wait by the stage that most prompts were at.",
             _stacked(rows, {stage: f"wait/{stage}_s" for stage in (*stages, "nothing")})),
            ("Stages: use of their limits", "Mean requests in flight over the stage's limit.",
             used),
            ("Stages: queues", "Mean requests that waited for their turn.",
             _lines(rows, {stage: f"stage/{stage}/mean_queued" for stage in stages}, from_zero=True)),
            ("Stages: latency", "Mean seconds of a request, from its turn to its answer.",
             _lines(rows, {stage: f"stage/{stage}/mean_latency_s" for stage in stages}, from_zero=True)),
            ("Event loop: lag", "How long an event waits for the loop: half of them, one in a hundred, the longest.",
             _lines(rows, {"p50": "loop/lag_p50_s", "p99": "loop/lag_p99_s", "longest": "loop/lag_max_s"},
                    from_zero=True)),
            ("Tokens generated per second", "Rollouts and probes, over the whole iteration.",
             _lines(rows, {"tokens/s": "throughput/generated_tokens_per_s"}, from_zero=True)),
        ),
    )  # fmt: skip


def optimiser_section(rows: Rows) -> Section:
    return Section(
        "Optimiser",
        _present(
            ("Gradient norm", "Before clipping, mean over the iteration's updates.",
             _lines(rows, {"norm": "train/grad_norm"}, from_zero=True)),
            ("Ratio of new to old policy", "Per token; the mean stays near 1, the largest shows outliers.",
             _lines(rows, {"mean": "train/ratio_mean", "largest": "train/ratio_max"})),
            ("Server against trainer", "Mean difference of the two's log-probabilities of one token, same weights.",
             _lines(rows, {"mean": "train/mismatch_mean"}, from_zero=True)),
            ("Clipped tokens", "Share of tokens whose gradient the clip removed.",
             _lines(rows, {"clipped": "train/clip_fraction"}, lambda share: f"{100 * share:.2g} %", from_zero=True)),
            ("Learning rate", "Of the iteration's updates.",
             _lines(rows, {"learning rate": "train/learning_rate"}, from_zero=True)),
        ),
    )  # fmt: skip


def spending_section(rows: Rows) -> Section:
    """What endpoints with prices were paid, and what the score cache saved."""
    paid = {name.split("/")[1]: name for row in rows for name in row if name.endswith("/total_money")}
    unknown = {role: f"spending/{role}/unknown" for role in paid}
    hits = {"kept already": "score_cache/hits", "asked for": "score_cache/misses"}
    return Section(
        "Spending",
        _present(
            ("Money spent", "For answers, since the start of the run.", _lines(rows, paid, from_zero=True)),
            ("Requests without an answer", "Of each iteration: billed or not, which only the provider knows.",
             _lines(rows, unknown, from_zero=True) if any(row.get(name) for row in rows for name in unknown.values())
             else None),
            ("Teacher scores", "By iteration: those that the cache had, and those that were asked for.",
             _lines(rows, hits, from_zero=True)),
        ),
    )  # fmt: skip


def length_histogram(lengths: Sequence[tuple[int, int]]) -> Markup | None:
    """Response lengths of the first and last third of the iterations; of all when there are fewer than three."""
    if not lengths:
        return None
    last, longest = max(i for i, _ in lengths), max(max(tokens for _, tokens in lengths), 1)
    parts = {"first third": (1, last // 3), "last third": (last - last // 3 + 1, last)}
    if last < 3:
        parts = {"all": (1, last)}
    series = []
    for name, (begin, end) in parts.items():
        counts = [0] * LENGTH_BINS
        for iteration, tokens in lengths:
            if begin <= iteration <= end:
                counts[min(LENGTH_BINS - 1, tokens * LENGTH_BINS // longest)] += 1
        series.append((name, [count / max(1, sum(counts)) for count in counts]))
    edges = [i * longest // LENGTH_BINS for i in range(LENGTH_BINS + 1)]
    return svg.histogram(edges, series, x_name="tokens", format_y=percent)


def result_table(summary: Mapping[str, Any] | None) -> tuple[tuple[str, ...], tuple[ResultRow, ...]]:
    """Avg@k and Pass@k per tier, before and after; empty without an evaluation."""
    found = {when: summary[when] for when in ("before", "after") if summary and summary.get(when)}
    if not found:
        return (), ()
    whole = next(iter(found.values()))
    k = whole["samples"]
    ks = {tier: each.get("pass_k", k) for tier, each in whole["tiers"].items()}
    is_even = set(ks.values()) <= {k}
    headings = ["tier", "problems"]
    headings += [f"{metric}{f'@{k}' if is_even else ''} {when}" for metric in ("Avg", "Pass") for when in found]
    rows = []
    for tier in whole["tiers"]:
        figures = [each["tiers"][tier] for each in found.values()]
        cells = [with_error(f[m], f[f"{m}_standard_error"]) for m in ("avg", "pass") for f in figures]
        name = tier if is_even else f"{tier} (Pass@{ks[tier]})"
        rows.append(ResultRow(name, int(figures[0]["problems"]), tuple(cells)))
    return tuple(headings), tuple(rows)


def with_error(share: float, standard_error: float | None) -> str:
    """In percent. One problem has no standard error."""
    return f"{100 * share:.1f}" + (f" ±{100 * standard_error:.1f}" if standard_error is not None else "")


def facts(config: Mapping[str, Any], rows: Rows, summary: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    """The run in a few words."""
    training = config.get("training", {})
    prompts = (summary or {}).get("prompts", {})
    seconds = total(rows, "time/iteration_s")
    found = {
        "policy": config.get("policy", {}).get("kind"),
        "student": config.get("student", {}).get("model"),
        "teacher": (config.get("teacher") or {}).get("model"),
        "iterations": f"{len(rows)} of {training['iterations']}" if training.get("iterations") else str(len(rows)),
        "batch": f"{training.get('batch_size')} prompts, {training.get('mini_batch_size')} per update",
        "time": f"{seconds:.0f} s of training" if rows else None,
        "prompts": ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in prompts.items()) or None,
        **{f"{role} spent": spending_words(spent) for role, spent in (summary or {}).get("spending", {}).items()},
        "ended early": (summary or {}).get("ended_early"),
    }
    return tuple((name, visible(str(value))) for name, value in found.items() if value is not None)


def notes(files: RunFiles, config: Mapping[str, Any], rows: Rows, summary: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What is not on the page."""
    found = []
    if not rows:
        found.append("No iteration has finished: there are no curves.")
    if summary is None:
        found.append("The run has no summary: it is still going, or it was stopped before its end.")
    elif not summary.get("after"):
        found.append("The run was not evaluated: there is no table of results.")
    if rows and not any("spot/selected" in row for row in rows):
        found.append(f"The policy ({visible(str(config.get('policy', {}).get('kind')))}) probes no positions.")
    dead = files.dead_letters()
    if dead:
        found.append(visible(described(dead)))
    for reason, count in Counter(each.reason for each in dead).most_common(3):
        found.append(f"{count} of them: {visible(reason)}")
    return tuple(found)


def _present(*plots: tuple[str, str, Markup | None]) -> tuple[Plot, ...]:
    return tuple(Plot(title, note, figure) for title, note, figure in plots if figure is not None)


def _lines(
    rows: Rows,
    names: Mapping[str, str],
    format_y: Callable[[float], str] = svg.short_number,
    *,
    from_zero: bool = False,
    most: float = math.inf,
) -> Markup | None:
    """A line per metric that is there; those that are zero throughout only when nothing else is."""
    series = [svg.Series(name, _points(rows, metric), i) for i, (name, metric) in enumerate(names.items())]
    series = [each for each in series if each.points]
    moving = [each for each in series if any(value for _, value in each.points)]
    if not series:
        return None
    return svg.line_plot(moving or series[:1], format_y=format_y, from_zero=from_zero, most=most)


def _stacked(rows: Rows, names: Mapping[str, str]) -> Markup | None:
    with_times = [row for row in rows if any(metric in row for metric in names.values())]
    if not with_times:
        return None
    series = [
        svg.Series(name, [(row["iteration"], row.get(metric, 0.0)) for row in with_times], i)
        for i, (name, metric) in enumerate(names.items())
        if total(rows, metric) > 0
    ]
    return svg.stacked_plot(series)


def _points(rows: Rows, metric: str) -> list[tuple[float, float]]:
    return [(row["iteration"], row[metric]) for row in rows if metric in row]
