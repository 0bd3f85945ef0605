"""Shows a forecast to people: tables in the terminal, and a page with plots."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from spot_async.base.text import visible
from spot_async.telemetry.screen import number_table
from spot_async.tools.forecast.estimates import Estimate
from spot_async.tools.forecast.forecast import Forecast, KeyRow, RankRow, TierRow
from spot_async.tools.forecast.verdict import ForecastFile, ends, words
from spot_async.tools.pages import svg
from spot_async.tools.pages.page import Plot, Section, filled
from spot_async.tools.pages.series import Series, fine_percent, short_number

HEADINGS = ("figure", "estimate", "± SE", "95 % interval", "what it is")
TIER_HEADINGS = ("tier", "prompts", "student", "Var_p(V)", "kept", "gain", "reached", "95 % interval")
KEY_HEADINGS = ("keys of policy", "gain", "kept", "reached", "95 % interval", "probes")
OUTCOME_STYLES = {"helps": "bold green", "cannot help": "bold red", "unclear": "bold yellow"}
SHARE, PLAIN = "share", "plain"
# Figures in groups: name, how it is written, its title and what it is.
FIGURES: tuple[tuple[str, tuple[tuple[str, str, str, str], ...]], ...] = (
    ("What methods bring a response, to first order", (
        ("opd_gain", SHARE, "OPD", "sum_t sum_v (p_T - p_S) V, from rollouts and their scores"),
        ("opd_reward_gain", SHARE, "OPD and a reward", "the row above and GRPO's, if both weigh 1"),
        ("tilt_gain", SHARE, "SPOT, beside OPD", "gamma Var_p(V) at its positions"),
        ("reward_gain", SHARE, "GRPO", "sum_t Var(V) under the student, which is Var(R)"),
        ("mixed_groups", SHARE, "GRPO's mixed groups", "groups of rollouts with a correct and a wrong one"),
        ("headroom", SHARE, "KD, at most", "the teacher's accuracy minus the student's, on the same problems"),
        ("capped_share", SHARE, "weights capped", "tokens with p_T / p_S above 10, which count as 10"),
    )),
    ("Values at the selected positions", (
        ("value_of_student", SHARE, "value under the student", "success from here if the student chooses a candidate"),
        ("value", SHARE, "value under the teacher's prior", "success from here if the teacher does; where OPD leads"),
        ("value_variance", PLAIN, "Var_p(V)", "variance of the candidates' values under the prior"),
        ("kept_share", SHARE, "B+ keeps", "of the positions, with policy.probes probes a candidate"),
    )),
    ("Expected gain a decision", (
        ("gain", SHARE, "of the target", "over the prior, tilted by what training's probes would show"),
        ("branch_weight", PLAIN, "beta T / M", "weight of a kept position over its weight in OPD's mean"),
        ("reach", SHARE, "reached", "of the way to the target, where OPD and branches settle"),
        ("settled_gain", SHARE, "gain reached", "the two multiplied; the verdict is about this one"),
    )),
    ("Student and teacher", (
        ("student_accuracy", SHARE, "student, a response", "of the rollouts, as the training verifier judges them"),
        ("student_pass", SHARE, "student, any response", "problems that one of the rollouts solves"),
        ("teacher_accuracy", SHARE, "teacher, a response", ""),
        ("response_tokens", PLAIN, "T", "tokens of a response"),
    )),
    ("Where to probe: Var_p(V) at the best of random positions", (
        ("at_score", PLAIN, "by score", "the mean over as many as are configured, or over the best quarter"),
        ("over_JS", PLAIN, "by JS, minus score", "by the part of the score that compares student and teacher"),
        ("over_entropy", PLAIN, "by entropy, minus score", "on the same responses, as in the other rows"),
        ("over_earliest", PLAIN, "the earliest, minus score", ""),
        ("over_random", PLAIN, "at random, minus score", ""),
        ("at_random", PLAIN, "at random", "the mean over all of them"),
        ("at_oracle", PLAIN, "an oracle, at least", "half of the probes choose, the others judge"),
        ("agreed_share", SHARE, "where both agree", "share of all of it where JS is below 0.01 bits"),
        ("answer_share", SHARE, "inside the answer", "share of all of it from the last box on"),
    )),
    ("Price of SPOT's probes", (
        ("selected", PLAIN, "selected positions", "of a rollout"),
        ("probe_requests", PLAIN, "probes", "of a prompt"),
        ("probe_tokens", PLAIN, "probe tokens", "of a prompt"),
        ("probe_share", PLAIN, "probe tokens over rollout tokens", ""),
        ("probe_money", PLAIN, "money", "of a prompt, at student.backend.prices"),
    )),
)  # fmt: skip


def figure_rows(found: Forecast, group: Sequence[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of one group of figures. What is unknown, or has no price, is left out."""
    rows = []
    for name, kind, title, note in group:
        each = found.figures[name]
        if each is None or (name == "probe_money" and not each.value):
            continue
        rows.append((title, written(each.value, kind), written(each.standard_error, kind), interval(each, kind), note))
    return rows


def written(value: float, kind: str) -> str:
    return fine_percent(value) if kind == SHARE else short_number(value)


def interval(each: Estimate, kind: str) -> str:
    low, high = (f"{100 * end:.3g}" if kind == SHARE else short_number(end) for end in (each.low, each.high))
    return f"{low} to {high}"


def key_row(row: KeyRow) -> tuple[str, ...]:
    return (
        words(row).replace("policy.", "") or "as configured",
        *gain_cells(row),
        str(row.probes_per_prompt),
    )


def tier_row(row: TierRow) -> tuple[str, ...]:
    variance = "–" if row.value_variance is None else short_number(row.value_variance.value)
    accuracy = "–" if row.student_accuracy is None else f"{row.student_accuracy.value:.0%}"
    kept, gain, *reached = (gain_cells(row)[i] for i in (1, 0, 2, 3))
    return visible(row.tier), str(row.prompts), accuracy, variance, kept, gain, *reached


def gain_cells(row: KeyRow | TierRow) -> tuple[str, str, str, str]:
    """Return the gain, the share that B+ keeps, the gain that is reached, and the interval of this."""

    def share(each: Estimate | None) -> str:
        return "–" if each is None else f"{round(100 * each.value, 9) + 0.0:.2f} %"

    kept = "–" if row.kept_share is None else f"{row.kept_share.value:.0%}"
    reached = row.settled_gain
    return share(row.gain), kept, share(reached), "–" if reached is None else ends(reached)


def terminal_tables(found: Forecast) -> list[Table]:
    """Return a table of each group of figures, one of values by rank, and one of other keys."""
    tables = []
    for title, group in FIGURES:
        if rows := figure_rows(found, group):
            tables.append(_table(title, HEADINGS[:-1], [row[:-1] for row in rows]))
    ranks = rank_table(found)
    if ranks:
        tables.append(
            _table("Value by rank of the candidate", ("rank", "by teacher", "share", "by student", "share"), ranks)
        )
    if found.by_tier:
        tables.append(_table("By tier", TIER_HEADINGS, [tier_row(row) for row in found.by_tier]))
    tables.append(_table("With other keys", KEY_HEADINGS, [key_row(row) for row in found.by_keys]))
    return tables


def rank_table(found: Forecast) -> list[tuple[str, ...]]:
    """Return the value and the mean share of each rank, by the teacher's probability and by the student's."""

    def cells(rows: Sequence[RankRow], rank: int) -> tuple[str, str]:
        if rank >= len(rows):
            return "–", "–"
        value = rows[rank].value
        shown = "–" if value is None else f"{100 * value.value:.1f} ± {100 * value.standard_error:.1f} %"
        return shown, f"{rows[rank].share:.0%}"

    return [
        (str(rank + 1), *cells(found.by_teacher_rank, rank), *cells(found.by_student_rank, rank))
        for rank in range(len(found.by_teacher_rank))
    ]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = number_table(*headings, title=title)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def sections(found: Forecast) -> list[Section]:
    """Return the plots of the page."""
    return [each for each in (value_section(found), gain_section(found), position_section(found)) if each.plots]


def value_section(found: Forecast) -> Section:
    plots = []
    for title, rows in (("teacher", found.by_teacher_rank), ("student", found.by_student_rank)):
        if not rows:
            continue
        names = [f"rank {rank} ({row.share:.0%})" for rank, row in enumerate(rows, 1)]
        means = [0.0 if row.value is None else max(0.0, row.value.value) for row in rows]
        note = f"Mean value of the candidate that the {title} likes best, second best, ...; in brackets its mean share."
        plots.append(Plot(f"Value by {title}'s rank", note, svg.row_plot(names, [("", means)], format_x=fine_percent)))
    return Section("Values", tuple(plots))


def gain_section(found: Forecast) -> Section:
    """Return a plot of the gain by gamma."""
    exact = [(row.changes["gamma"], row.gain) for row in found.by_gamma if row.gain is not None]
    if not exact:
        return Section("Expected gain", ())
    variance = found.figures["value_variance"]
    highest = max(each.high for _, each in exact)
    # Where it leaves the picture the first order says nothing any more.
    first = [] if variance is None else [
        (gamma, gain) for gamma, _ in exact if (gain := gamma * variance.value) <= 1.5 * highest
    ]  # fmt: skip
    errors = [each.standard_error for _, each in exact]
    lines = [
        Series("target", [(gamma, each.value) for gamma, each in exact], 0, errors=errors),
        Series("first order", first, 1),
    ]
    note = (
        f"Of the target over the prior, with policy.probes={found.keys.probes}. Upright lines are standard errors; the "
        "dashed one is the gamma that is configured."
    )
    figure = svg.level_plot(lines, x_name="gamma", marked=found.keys.gamma or None, format_y=fine_percent)
    return Section("Expected gain", (Plot("Gain a decision by gamma", note, figure),))


def position_section(found: Forecast) -> Section:
    """Return a plot of what the score selects."""
    if not found.positions:
        return Section("Selected positions", ())
    names = [f"“{visible(row.token)}”".replace("\n", "⏎") for row in found.tokens]
    kept = [row.positions * row.kept_share for row in found.tokens]
    dropped = [row.positions - each for row, each in zip(found.tokens, kept, strict=True)]
    note = "The student's token there, most frequent first, and how many B+ would keep."
    figure = svg.row_plot(names, [("kept", kept), ("left out", dropped)])
    return Section("Selected positions", (Plot("Which tokens are selected", note, figure),))


def forecast_page(found: ForecastFile) -> str:
    """Return the page of a forecast."""
    groups = [(title, rows) for title, group in FIGURES if (rows := figure_rows(found.forecast, group))]
    return filled(
        "forecast.html",
        found=found,
        headings=HEADINGS,
        groups=groups,
        tier_headings=TIER_HEADINGS,
        tier_rows=[tier_row(row) for row in found.forecast.by_tier],
        key_headings=KEY_HEADINGS,
        key_rows=[key_row(row) for row in found.forecast.by_keys],
        sections=sections(found.forecast),
    )
