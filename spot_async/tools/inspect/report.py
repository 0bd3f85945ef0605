"""Reads a run, and makes what its report shows: figures, plots, and the bottleneck.

A run that was stopped, is still going, was not evaluated or trains by another method has gaps. What is not there is
left out, and the page says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from spot_async.base.text import rough_time, visible
from spot_async.config import model_sections
from spot_async.errors import FailureClass
from spot_async.run_directory.dead_letters import described
from spot_async.run_directory.layout import name_of_run
from spot_async.run_directory.reading import RunFiles
from spot_async.run_directory.samples import RELATIVE_BINS, SampleStatistics
from spot_async.spending.run_spending import spending_words
from spot_async.telemetry.bottleneck import Bottleneck, judge, percent
from spot_async.telemetry.failures import kinds_words
from spot_async.telemetry.outcome_slope import outcome_words
from spot_async.telemetry.totals import (
    Rows,
    environments_of,
    is_strict,
    limit_use,
    masked_share,
    of_each,
    performance_words,
    run_performance,
    run_times,
    stage_names,
    total,
)
from spot_async.tools.inspect.held_out import HeldOut, ResultTable, figures_of, held_out, result_table
from spot_async.tools.inspect.troubles import (
    failures_section,
    missing_signal,
    staleness_section,
    staleness_words,
    tallies,
    troubles_at,
    turns_section,
)
from spot_async.tools.inspect.view import PolicySettings
from spot_async.tools.pages import svg
from spot_async.tools.pages.page import Links, Section, filled, lines, points, present, stacked
from spot_async.tools.pages.series import Series, fine_percent, nice_ticks, seconds

LENGTH_BINS = 20  # about so many, since their widths are round numbers
TOP_TOKENS = 14
ADVANTAGE_OF_TEACHER = "Teacher minus student, nats per token. Rises towards 0 as student meets teacher."


@dataclass(frozen=True)
class Report:
    """Everything the page shows."""

    name: str
    headline: str  # what it came to; empty where nothing was evaluated
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]  # what is missing, and why
    bottleneck: Bottleneck
    failures: tuple[str, ...]  # a line for each stage whose attempts failed
    missing_signal: str | None
    results: ResultTable | None
    sections: tuple[Section, ...]
    lengths: tuple[tuple[int, int], ...]  # of each sample: iteration, tokens


def read_report(files: RunFiles, more: Sequence[Section] = ()) -> Report:
    """Return a run's report; the sections `more` follow its own. Raises DataError for damaged files only."""
    config, rows, summary = files.config(), files.metrics(), files.summary()
    samples = files.samples.read()
    lengths = tuple((each.iteration, each.tokens) for each in samples)
    evaluated = held_out(files, rows)
    failed = files.failed_attempts()
    # Throttled attempts have a verdict of their own.
    others = tallies(each for each in failed if each.failure != FailureClass.THROTTLED)
    words = {stage: kinds_words(tally.failed) for stage, tally in others.items()}
    results = result_table(summary, config, figures_of(files, "after") or figures_of(files, "before"))
    sections = (
        learning_section(rows, evaluated),
        probing_section(rows, files.samples.statistics, PolicySettings.of(config)),
        response_section(rows, lengths),
        turns_section(rows, files.samples.statistics),
        time_section(rows, config),
        failures_section(failed, rows),
        staleness_section(rows),
        optimiser_section(rows),
        spending_section(rows),
        *more,
    )
    return Report(
        name=" ".join(dict.fromkeys((name_of_run(files.path), files.path.resolve().name))),
        headline="" if (found := results or evaluated) is None else found.headline,
        facts=facts(config, rows, summary, evaluated),
        notes=notes(files, config, rows, summary, was_evaluated=results is not None or evaluated is not None),
        bottleneck=judge(run_times(rows, config, files.cores, words)),
        failures=tuple(visible(f"{stage}: {each}") for stage, each in tallies(failed, rows).items()),
        missing_signal=missing_signal(rows),
        results=results,
        sections=tuple(section for section in sections if section.plots),
        lengths=lengths,
    )


def learning_section(rows: Rows, evaluated: HeldOut | None) -> Section:
    scored = bool(of_each(rows, "teacher", "entropy_nats"))

    def each(figure: str, area: str = "teacher", *, whole: str = "teacher") -> dict[str, str]:
        found = of_each(rows, area, figure)
        return {whole if name == area else visible(name): metric for name, metric in found.items()}

    advantages = any(row.get("train/advantage_mean") for row in rows)  # a method with only soft targets has none
    return Section(
        "Learning",
        present(
            ("Accuracy on held-out problems", *((evaluated.note, evaluated.figure()) if evaluated else ("", None))),
            ("Accuracy in training", "Share of the sampled responses that are correct.",
             lines(rows, {"rollouts": "rollout/accuracy", **each("accuracy")}, percent, most=1.0)),
            ("Accuracy by domain", "The same of each value of policy.route, or of each category.",
             lines(rows, {of: name for of, name in each("accuracy", "rollout").items() if name != "rollout/accuracy"},
                   percent, most=1.0)),
            ("Reward", "Mean of the verifier's numbers.", lines(rows, {"rollouts": "rollout/reward"})
             if any(row.get("rollout/reward") != row.get("rollout/accuracy") for row in rows) else None),
            ("Loss and its parts", "What the optimiser minimised; parts that are zero throughout are left out.",
             lines(rows, {"loss": "train/loss", "policy": "train/loss_policy", "soft targets": "train/loss_branch",
                           "reference": "train/loss_reference", "entropy bonus": "train/loss_entropy"})),
            ("Advantage", ADVANTAGE_OF_TEACHER if scored else "Mean per token, as the policy gives it.",
             lines(rows, {"mean advantage": "train/advantage_mean"}) if advantages else None),
            ("Gated positions", "Share whose teacher entropy exceeds policy.tau_nats, where the forward KL is on; "
             "uncertain: those whose entropy is known only within bounds that hold it.",
             lines(rows, {"gated": "eopd/gated", "uncertain": "eopd/uncertain"}, fine_percent, most=1.0)),
            ("Responses without a signal", "Share of those trained whose group's rewards are all equal (advantage 0), "
             "and share of all that were left out for want of a verdict.",
             lines(rows, {"advantage 0": "grpo/no_signal", "left out": "grpo/left_out"}, percent, most=1.0)),
            ("Does the teacher point to right answers?", "Covariance of the verdict and log p_T / p_S of a response: "
             "what a step towards the teacher adds to the accuracy, to first order. Where it is 0, its advice is no "
             "use.",
             lines(rows, each("outcome_slope"))),
            ("Agreement with the teacher", "Share of tokens whose two log-probabilities are less than 0.1 nats apart.",
             lines(rows, {"right responses": "teacher/agreement_right", "wrong ones": "teacher/agreement_wrong"}
                   if "teacher" in each("agreement") else each("agreement"), percent, most=1.0)),
            ("Teacher entropy", "Nats per token, mean.",
             lines(rows, each("entropy_nats", whole="teacher entropy"))),
            ("Pull", "Mean of log p_T - log p_S per token: how far each teacher pulls, in each domain.",
             lines(rows, each("pull_nats"))),
            ("Masked positions", "Share of which the teacher's server gave no log-probabilities; they teach nothing.",
             lines(rows, each("masked", whole="masked"), fine_percent, from_zero=True, most=1.0)),
        ),
    )  # fmt: skip


def probing_section(rows: Rows, statistics: SampleStatistics, policy: PolicySettings) -> Section:
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
    looks = {
        "score": ("Where the score looks", "Mean acquisition score by place in the response."),
        "entropy": ("Where the teacher is uncertain", "Mean entropy, share of the largest possible, by place."),
    }.get(policy.selection)  # None for rules without scores, and for random ones, which prefer no place
    if ":" in policy.selection:
        looks = ("Where your score looks", f"Mean score of {visible(policy.selection)} by place in the response.")
    counts = {"probed": "spot/selected", "kept": "spot/retained"} if policy.guided else {"selected": "spot/selected"}
    kept = [("kept", retained), ("left out", dropped)] if policy.guided else [("", retained)]
    return Section(
        "Probing" if policy.guided else "Positions",
        present(
            ("Positions probed and kept", "Per rollout. Kept (B+): at least one candidate led to a correct answer."
             if policy.gated else "Per rollout. All that have evidence are kept: policy.gate is false.",
             lines(rows, counts, from_zero=True)) if policy.guided else
            ("Positions selected", "Per rollout. All are trained, none is probed: policy.verifier_guidance is false.",
             lines(rows, counts, from_zero=True)),
            ("Accuracy of probes", "Share of continuations that end correct.",
             lines(rows, {"probes": "probe/accuracy", "rollouts": "rollout/accuracy"}, percent, most=1.0)
             if any("probe/accuracy" in row for row in rows) else None),
            ("Calibration shift", "How far outcomes move the target from the teacher's prior: total variation, 0 to 1.",
             lines(rows, {"shift": "spot/calibration_shift"}, from_zero=True) if policy.guided else None),
            ("Kept share", "Of a rollout's probed positions, those that are trained.",
             lines(rows, {"kept": "spot/kept_share"}, percent, from_zero=True, most=1.0)),
            ("Variance of the values", "Under the teacher's prior, without the noise of the probes. gamma times it is "
             "about what the tilt gains a position.",
             lines(rows, {"variance": "spot/value_variance"}) if policy.probes > 1 else None),
            ("Branch weight", "Of a probed position, over its weight in OPD's mean: beta T / M.",
             lines(rows, {"beta T / M": "spot/branch_weight"}, from_zero=True)),
            (*(looks or ("", "")), svg.histogram(edges, [("", means)], x_name=place) if looks and any(means) else None),
            (f"Where positions were {policy.chosen}", f"Share of {policy.chosen} positions by place in the response.",
             svg.histogram(edges, [("", shares)], x_name=place, format_y=percent) if shares else None),
            (f"Which tokens were {policy.chosen}", "The student's token at the position, most frequent first.",
             svg.row_plot(names, kept) if names else None),
        ),
    )  # fmt: skip


def response_section(rows: Rows, lengths: Sequence[tuple[int, int]]) -> Section:
    return Section(
        "Responses",
        present(
            ("Length of responses", "Mean tokens per response.",
             lines(rows, {"rollouts": "rollout/tokens", **{
                 visible(name): metric for name, metric in of_each(rows, "teacher", "tokens").items()}},
                   from_zero=True)),
            ("Lengths, early and late", "Share of responses by tokens, in the first and the last third of the "
             "iterations that have samples; of fewer than three, of all.",
             length_histogram(lengths)),
            ("Written by others", "Share of a response's tokens that no student sampled; they have no policy term.",
             lines(rows, {"by others": "rollout/foreign"}, percent, most=1.0)),
            ("Cut off and not judged", "Responses that met the token limit, and those the verifier could not decide.",
             lines(rows, {"cut off": "rollout/truncated", "not judged": "rollout/unverified"}, percent, most=1.0)),
        ),
    )  # fmt: skip


def time_section(rows: Rows, config: Mapping[str, Any]) -> Section:
    stages = stage_names(rows)
    utilisation = [
        Series(stage, [(row["iteration"], use) for row in rows if (use := limit_use(row, config, stage)) is not None])
        for stage in stages
    ]
    names = sorted({name.split("/")[1] for row in rows for name in row if name.startswith("replica/")})
    figures = {"in flight": "mean_in_flight", "limit": "limit"}
    servers = [  # a colour for each server, a dash for each metric; colours that come again have other dashes
        Series(f"{name}: {label}", found, server, dash + len(figures) * (server // len(svg.COLOURS)))
        for server, name in enumerate(names)
        for dash, (label, key) in enumerate(figures.items())
        if (found := points(rows, f"replica/{name}/{key}"))
    ]
    lags = {"p50": "loop/lag_p50_s", "p99": "loop/lag_p99_s", "longest": "loop/lag_max_s"}
    # In short iterations with few events, p99 is the longest lag, and one line would hide the other.
    if 2 * sum(row.get(lags["p99"]) == row.get(lags["longest"]) for row in rows) > len(rows):
        lags = {"p50": lags["p50"], "p99 and longest": lags["longest"]}
    waits_for_publishing = "" if is_strict(config) else (
        " For weight updates and evaluations it waits only until publishing is close enough behind it."
    )  # fmt: skip
    of_wait = " while the trainer waited for a batch" if is_strict(config) else ""
    bent = troubles_at(rows)
    used = svg.line_plot(utilisation, format_y=percent, from_zero=True, marked=bent)
    told = " Upright lines: limits lowered, restarts, many attempts made again." if bent else ""
    return Section(
        "Time",
        present(
            ("Time per phase", "Seconds of each iteration, as the trainer spends them." + waits_for_publishing,
             stacked(rows, {"wait for batch": "time/wait_for_batch_s", "train": "time/train_s",
                             "update weights": "time/update_weights_s", "evaluate": "time/evaluate_s"})),
            ("What the trainer waited for", "Seconds of each iteration, by the stage that most prompts were at.",
             stacked(rows, {stage: f"wait/{stage}_s" for stage in (*stages, "nothing")})),
            ("Stages: use of their limits", f"Mean requests in flight{of_wait}, over the "
             "stage's limit or, where it is less, what its servers let in. For the bottleneck above, only the time "
             "counts in which most prompts were at the stage.",
             used if any(each.points for each in utilisation) else None),
            ("Stages: queues", "Mean requests that waited for their turn.",
             lines(rows, {stage: f"stage/{stage}/mean_queued" for stage in stages}, from_zero=True)),
            ("Stages: latency", "Mean seconds of a request, from its turn to its answer.",
             lines(rows, {stage: f"stage/{stage}/mean_latency_s" for stage in stages}, seconds, from_zero=True,
                   marked=bent)),
            ("Servers: requests let in", "Of all stages: mean in flight during the iteration, the limit as it ended."
             + told, svg.line_plot(servers, from_zero=True, marked=bent) if servers else None),
            ("Event loop: lag", "How long an event waits for the loop: half of them, one in a hundred, the longest. "
             "Of few events the last two are one.",
             lines(rows, lags, seconds, from_zero=True)),
            ("Trainer: tokens per second", "Of prompts and responses, by each rank (a GPU, where there are any), while "
             "it trains.",
             lines(rows, {"tokens/s": "perf/tokens_per_s_per_rank"}, from_zero=True)),
            ("Trainer: share of the GPUs' arithmetic", "MFU: what training needs, over the dense bfloat16 rate of the "
             "data sheets. Layers computed again count once.",
             lines(rows, {"MFU": "perf/mfu"}, percent, from_zero=True)),
            ("Trainer: peak memory", "GiB of the fullest GPU among the ranks.",
             lines(rows, {"tensors": "perf/max_memory_allocated_gib", "held by torch": "perf/max_memory_reserved_gib"},
                   from_zero=True)),
            ("Tokens generated per second", "Rollouts and probes, over the whole iteration.",
             lines(rows, {"tokens/s": "throughput/generated_tokens_per_s"}, from_zero=True)),
        ),
    )  # fmt: skip


def optimiser_section(rows: Rows) -> Section:
    return Section(
        "Optimiser",
        present(
            ("Gradient norm", "Before it is scaled down to training.max_grad_norm, mean over the iteration's updates.",
             lines(rows, {"norm": "train/grad_norm"}, from_zero=True)),
            ("Ratio of new to old policy", "Per token; the mean stays near 1, the largest shows outliers.",
             lines(rows, {"mean": "train/ratio_mean", "largest": "train/ratio_max"})),
            ("Server against trainer", "Mean difference of the two's log-probabilities of one token, same weights.",
             lines(rows, {"mean": "train/mismatch_mean"}, from_zero=True)),
            ("Clipped tokens", "Share of tokens whose gradient the clip removed.",
             lines(rows, {"clipped": "train/clip_fraction"}, fine_percent, from_zero=True)),
            ("Learning rate", "Of the iteration's updates.",
             lines(rows, {"learning rate": "train/learning_rate"}, from_zero=True, smooth=False)),
        ),
    )  # fmt: skip


def spending_section(rows: Rows) -> Section:
    """Return plots of what endpoints with prices were paid, and of what the score cache saved."""
    paid = {name.split("/")[1]: name for row in rows for name in row if name.endswith("/total_money")}
    unknown = {role: f"spending/{role}/unknown" for role in paid}
    hits = {"kept already": "score_cache/hits", "asked for": "score_cache/misses"}
    return Section(
        "Spending",
        present(
            ("Money spent", "For answers, since the start of the run.", lines(rows, paid, from_zero=True)),
            ("Requests without an answer", "Of each iteration: billed or not, which only the provider knows.",
             lines(rows, unknown, from_zero=True) if any(row.get(name) for row in rows for name in unknown.values())
             else None),
            ("Teacher scores", "By iteration: those that the cache had, and those that were asked for.",
             lines(rows, hits, from_zero=True)),
        ),
    )  # fmt: skip


def length_histogram(lengths: Sequence[tuple[int, int]]) -> Markup | None:
    """Return a histogram of response lengths in the first and the last third of the iterations.

    Iterations without samples are left out. With fewer than three iterations there is one histogram of all.
    """
    if not lengths:
        return None
    longest = max(max(tokens for _, tokens in lengths), 1)
    iterations = sorted({iteration for iteration, _ in lengths})
    third = len(iterations) // 3
    parts = {"first third": iterations[:third], "last third": iterations[-third:]} if third else {"all": iterations}
    edges = [round(tick) for tick in nice_ticks(0.0, max(longest, LENGTH_BINS), LENGTH_BINS)]
    series = []
    for name, part in parts.items():
        counted, _ = np.histogram([tokens for iteration, tokens in lengths if part[0] <= iteration <= part[-1]], edges)
        series.append((name, (counted / counted.sum()).tolist()))
    return svg.histogram(edges, series, x_name="tokens", format_y=percent)


def _episode_facts(config: Mapping[str, Any]) -> dict[str, str]:
    environments = environments_of(config).values()
    is_exact = all(each.get("replayable", True) for each in environments)
    are_shut_in = all(each.get("sandbox") != "none" for each in environments)
    return ({} if is_exact else {"resuming": "not exact: environment.replayable=false"}) | (
        {} if are_shut_in else {"episodes": "not shut in: environment.sandbox=none"}
    )


def facts(
    config: Mapping[str, Any], rows: Rows, summary: Mapping[str, Any] | None, evaluated: HeldOut | None
) -> tuple[tuple[str, str], ...]:
    """Return facts about the run, each with its name."""
    training = config.get("training", {})
    prompts = (summary or {}).get("prompts", {})
    seconds = total(rows, "time/iteration_s")
    masked = masked_share(rows)
    found = {
        "policy": config.get("policy", {}).get("kind"),
        "selection": config.get("policy", {}).get("selection"),
        **{role: section.get("model") for role, section in model_sections(config).items() if role != "reference"},
        "iterations": f"{len(rows)} of {training['iterations']}" if training.get("iterations") else str(len(rows)),
        "outcome slope": outcome_words(rows) or None,
        "best": evaluated and evaluated.best_words,
        "staleness": staleness_words(config, rows),
        **_episode_facts(config),
        "masked": None if masked is None else f"{percent(masked)} of the positions, by the teacher's server",
        "batch": f"{training.get('batch_size')} prompts, {training.get('mini_batch_size')} per update",
        "time": f"{seconds:.0f} s of training" if rows else None,
        "left": None if summary is not None else time_left(rows, training.get("iterations")),
        "trainer": performance_words(run_performance(rows)) or None,
        "prompts": ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in prompts.items()) or None,
        **{f"{role} spent": spending_words(spent) for role, spent in (summary or {}).get("spending", {}).items()},
        "ended early": (summary or {}).get("ended_early"),
    }
    return tuple((name, visible(str(value))) for name, value in found.items() if value is not None)


def time_left(rows: Rows, iterations: int | None) -> str | None:
    """Return how long a run will still train at its pace so far; None where nobody knows."""
    if not rows or not iterations or len(rows) >= iterations:
        return None
    return f"about {rough_time(total(rows, 'time/iteration_s') / len(rows) * (iterations - len(rows)))}"


def notes(
    files: RunFiles,
    config: Mapping[str, Any],
    rows: Rows,
    summary: Mapping[str, Any] | None,
    *,
    was_evaluated: bool,
) -> tuple[str, ...]:
    """Return what is not on the page, and why; `was_evaluated` says that it has figures of evaluations."""
    found = []
    if not rows:
        found.append("No iteration has finished: there are no curves.")
    if summary is None:
        found.append(visible(files.early_end() or "The run is still going."))
    elif not summary.get("after"):
        found.append("The trained student was not evaluated at the end." if was_evaluated else
                     "The run was not evaluated: there is no table of results.")  # fmt: skip
    elif not was_evaluated:
        found.append("The responses of its evaluations were not judged: there is no table of results.")
    found += map(visible, (*files.interruptions(), *files.mismatches()))
    if rows and not any("spot/selected" in row for row in rows):
        found.append(f"The policy ({visible(str(config.get('policy', {}).get('kind')))}) probes no positions.")
    sampled = {each.iteration for each in files.samples.read()}
    if rows and not sampled:
        probing = ", of where the score looks, of where positions were probed, of which tokens"
        missing = "lengths early and late" + (probing if any("spot/selected" in row for row in rows) else "")
        found.append(f"There are no samples: {files.samples_rhythm()}. So there is no plot of {missing}.")
    elif sampled and len(sampled) < len(rows):
        found.append(
            f"Only {len(sampled)} of the {len(rows)} iterations have samples: {files.samples_rhythm()}. "
            "Plots by length, place and token are of these."
        )
    dead = files.dead_letters()
    if dead:
        found.append(visible(described(dead)))
    for reason, count in Counter(each.reason for each in dead).most_common(3):
        found.append(f"{count} of them: {visible(reason)}")
    return tuple(found)


def report_page(report: Report, *, written: str = "", reload_s: float | None = None, links: Links = ()) -> str:
    """Return the page of a whole run, `written` at a time of day, which loads itself again after `reload_s`.

    Its points lead to their iterations' samples, if `links` has the page of these.
    """
    listed = dict(links)
    page = filled(
        "report.html", report=report, sections=report.sections, written=written, reload_s=reload_s, links=links
    )
    return svg.leading(page, listed["samples"], {i for i, _ in report.lengths}) if "samples" in listed else page
