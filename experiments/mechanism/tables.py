"""Makes the tables and pictures of README.md from the records of `run.py`.

Intervals are percentiles of a bootstrap over problems and seeds: each draw takes problems within their tier and seeds,
both with replacement, and the same ones for all rows. So differences are paired.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from forecasts import MeasuredPrompt, Panel, Point, read_forecast
from rows import ALL_SEEDS, ROOT, Setting

from spot_async.evaluation.metrics import pass_at_k_of_counts

DRAWS = 10_000
LAST_LOOKS = 3  # iterations, of those that were looked at, over which final shares of choices are taken
OPD, BASE = "OPD", "base"  # rows; BASE is the untrained student
KS = (1, 2, 4, 8, 16, 32, 64)
COLOURS = 10

Array = np.ndarray
Record = Mapping[str, Any]


class Hypothesis(NamedTuple):
    """Row `more` ends above row `less`, or at most `margin` points below it."""

    name: str
    setting: str
    metric: str
    more: str
    less: str
    margin: float = 0.0


# Registered in README.md.
HYPOTHESES = (
    Hypothesis("H1", "choice", "Pass@8", "SPOT", OPD),
    Hypothesis("H2", "choice", "Pass@8", "SPOT", "gamma 0, no gate"),
    Hypothesis("H3a", "choice", "Pass@8", "SPOT", "gate only"),
    Hypothesis("H3b", "choice", "Pass@8", "SPOT", "tilt only"),
    Hypothesis("H4a", "choice", "Pass@8", "SPOT gamma 4", "SPOT"),
    Hypothesis("H4b", "choice", "Pass@8", "SPOT gamma 4", "shuffled gamma 4"),
    Hypothesis("H5", "choice", "Pass@8", "GRPO 64 x 8", "SPOT"),
    Hypothesis("H6", "knowledge", "Avg@8", "gamma 0, no gate", "SPOT"),
    Hypothesis("W1a", "where-choice", "Avg@8", OPD, BASE),
    Hypothesis("W1b", "where-knowledge", "Avg@8", OPD, BASE),
    Hypothesis("W1c", "where-running-sum", "Avg@8", OPD, BASE),
    Hypothesis("W1d", "where-self", "Avg@8", OPD, BASE),
    Hypothesis("W2a", "where-choice", "Pass@8", "score", "random"),
    Hypothesis("W2b", "where-choice", "Pass@8", "score", "entropy"),
    Hypothesis("W2c", "where-choice", "Pass@8", "score", "earliest"),
    Hypothesis("W3a", "where-running-sum", "Avg@8", "earliest", "score"),
    Hypothesis("W3b", "where-running-sum", "Avg@8", "entropy", "score"),
    Hypothesis("W4a", "where-self", "Avg@8", OPD, "score"),
    Hypothesis("W4b", "where-self", "Avg@8", "random", "score"),
    Hypothesis("W4c", "where-self", "Avg@8", "score, not the answer", "score"),
    *(
        Hypothesis(f"B{number}", f"prior-{setting}", "Avg@8", "alpha*", "alpha 0")
        for number, setting in enumerate(("choice", "knowledge", "running-sum", "self"), 1)
    ),
    *(
        Hypothesis(name + letter, f"prior-{setting}", metric, "alpha*", less, margin)
        for name, metric, less, margin in (("B5", "Avg@8", OPD, 1.0), ("B6", "Pass@8", "alpha 0", 2.0))
        for letter, setting in zip("abcd", ("choice", "knowledge", "running-sum", "self"), strict=True)
    ),
    Hypothesis("B7", "prior-choice", "Avg@8", OPD, "alpha*, shuffled", 1.0),
    Hypothesis("B8a", "prior-choice", "Avg@8", "alpha*", "alpha*, random"),
    Hypothesis("B8b", "prior-running-sum", "Avg@8", "alpha*", "alpha*, random"),
)


def read_records(directory: Path, setting: Setting) -> dict[str, dict[int, Record]]:
    """Return the records by row and seed."""
    found: dict[str, dict[int, Record]] = {row.name: {} for row in setting.rows}
    for path in sorted((directory / "records" / setting.name).glob("*-seed-*.json")):
        record = json.loads(path.read_text())
        found.setdefault(record["row"], {})[record["seed"]] = record
    return {row: seeds for row, seeds in found.items() if seeds}


def read_problems(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def per_problem(record: Record, part: str = "evaluation", k: int | None = None) -> Array:
    """Return Avg@n of each problem, or with k its Pass@k."""
    figures = record[part]
    right = np.array(list(figures["correct"].values()))
    return right / figures["samples"] if k is None else pass_at_k_of_counts(right, figures["samples"], k)


METRICS: Mapping[str, Callable[[Record], Array]] = {
    "Avg@8": per_problem,
    "Pass@8": lambda record: per_problem(record, k=8),
}


def bootstrap(table: Array, strata: Array, *, seed: int = 0) -> Array:
    """Return means (draws,) of a table (seeds, problems). Seeds are redrawn, and problems within their stratum."""
    random = np.random.default_rng(seed)
    seeds, problems = table.shape
    weights = np.zeros((DRAWS, problems), np.float32)
    for stratum in np.unique(strata):
        place = np.flatnonzero(strata == stratum)
        weights[:, place] = random.multinomial(len(place), np.full(len(place), 1 / len(place)), size=DRAWS)
    of_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS)
    return np.asarray(((weights @ table.T.astype(np.float32)) * of_seeds).sum(axis=1) / (seeds * problems))


def mean_with_error(values: Sequence[float], scale: float = 100.0) -> str:
    spread = f" ± {scale * np.std(values, ddof=1) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{scale * float(np.mean(values)):.1f}{spread}"


def results_table(setting: Setting, base: Record | None, rows: Mapping[str, Mapping[int, Record]]) -> list[str]:
    lines = [
        f"## {setting.name}", "",
        "Percent, mean over seeds ± its standard error. CPU seconds and thousands of tokens are those of training.", "",
        "| row | seeds | Avg@8 | Pass@8 | CPU s | wall s | tokens trained | tokens of probes |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    if base is not None:
        lines.append(f"| base | – | {100 * per_problem(base).mean():.1f} | {100 * per_problem(base, k=8).mean():.1f} "
                     "| – | – | – | – |")  # fmt: skip
    for row, seeds in rows.items():
        figures = [mean_with_error([float(of(each).mean()) for each in seeds.values()]) for of in METRICS.values()]
        took = [f"{np.mean([each[name] for each in seeds.values()]):.0f}" for name in ("cpu_s", "wall_s")]
        tokens = [f"{np.mean([each[name] for each in seeds.values()]) / 1000:.0f}"
                  for name in ("trained_tokens", "probe_tokens")]  # fmt: skip
        lines.append(f"| {' | '.join([row, str(len(seeds)), *figures, *took, *tokens])} |")
    return [*lines, ""]


def difference(
    rows: Mapping[str, Mapping[int, Record]], more: str, less: str, metric: str, tiers: Mapping[str, str]
) -> tuple[int, float, float, float, float] | None:
    """Return seeds, difference, its error and the ends of its 95 % interval, in points; None without common seeds."""
    seeds = sorted(set(rows.get(more, {})) & set(rows.get(less, {})))
    if not seeds:
        return None
    of = METRICS[metric]
    table = np.stack([of(rows[more][seed]) - of(rows[less][seed]) for seed in seeds])
    strata = np.array([tiers[problem] for problem in rows[more][seeds[0]]["evaluation"]["correct"]])
    draws = 100 * bootstrap(table, strata)
    low, high = np.quantile(draws, (0.025, 0.975))
    return len(seeds), 100 * float(table.mean()), float(draws.std()), float(low), float(high)


def hypotheses_table(
    rows_of: Mapping[str, Mapping[str, Mapping[int, Record]]], tiers_of: Mapping[str, Mapping[str, str]]
) -> list[str]:
    lines = ["## Hypotheses", "", "| | claim | seeds | difference in points | 95 % interval | verdict |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for each in HYPOTHESES:
        if each.setting not in rows_of:
            continue
        found = difference(rows_of[each.setting], each.more, each.less, each.metric, tiers_of[each.setting])
        claim = f"{each.setting}, {each.metric}: {each.more} > {each.less}"
        claim += f" - {each.margin:g}" if each.margin else ""
        if found is None:
            lines.append(f"| {each.name} | {claim} | 0 | | | not run |")
            continue
        seeds, mean, error, low, high = found
        verdict = "holds" if low > -each.margin else "contradicted" if high < -each.margin else "undecided"
        lines.append(f"| {each.name} | {claim} | {seeds} | {mean:+.1f} ± {error:.1f} | {low:+.1f} to {high:+.1f} "
                     f"| {verdict} |")  # fmt: skip
    return [*lines, ""]


def first_order_table(directory: Path, rows_of: Mapping[str, Mapping[str, Mapping[int, Record]]]) -> list[str]:
    """Return what the forecast says that OPD gains, to first order, beside what it came to. Without forecasts: none."""
    lines = ["## OPD's gain, forecast and reached", "", "Points of accuracy a response.", "",
             "| setting | forecast before training | Avg@8 gained | forecast above 0 by two errors |",
             "|---|---|---|---|"]  # fmt: skip
    first = len(lines)
    for setting in (each.setting for each in HYPOTHESES if each.less == BASE and each.setting in rows_of):
        rows = rows_of[setting]
        file = read_forecast(directory, setting)
        gain = None if file is None else file.forecast.figures.get("opd_gain")
        if gain is None or OPD not in rows or BASE not in rows:
            continue
        reached = [
            float((per_problem(each) - per_problem(rows[BASE][seed])).mean()) for seed, each in rows[OPD].items()
        ]
        says = "yes" if gain.value > 2 * gain.standard_error else "no"
        lines.append(
            f"| {setting} | {with_error(gain.value, gain.standard_error)} | {mean_with_error(reached)} | {says} |"
        )
    return [*lines, ""] if len(lines) > first else []


def differences_table(
    setting: Setting, rows: Mapping[str, Mapping[int, Record]], tiers: Mapping[str, str]
) -> list[str]:
    lines = [f"### {setting.name}: against OPD", "", "| row | seeds | Avg@8 | Pass@8 |", "|---|---|---|---|"]
    for row in rows:
        found = [difference(rows, row, OPD, metric, tiers) for metric in METRICS]
        if row != OPD and (first := found[0]) is not None:
            lines.append(f"| {row} | {first[0]} | "
                         + " | ".join(f"{each[1]:+.1f} ± {each[2]:.1f}" for each in found if each) + " |")  # fmt: skip
    return [*lines, ""]


def last_looks(record: Record) -> list[str]:
    """Return the last iterations at which the student's choices were looked at."""
    return sorted(record["choices"], key=int)[-LAST_LOOKS:]


def shares(record: Record, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the share of each choice by what it depends on, over the iterations that are named."""
    looks = record["choices"]
    places: dict[str, dict[str, float]] = {}
    for name in names:
        for place, made in looks[name].items():
            of_place = places.setdefault(place, {})
            for choice, count in made.items():
                of_place[choice] = of_place.get(choice, 0.0) + count
    return {place: {choice: count / sum(made.values()) for choice, count in made.items()}
            for place, made in places.items()}  # fmt: skip


def decisions(setting: Setting, prompt: MeasuredPrompt, problem: str) -> list[tuple[str, dict[str, float]]]:
    """Return, for each measured position that is a choice, what it depends on and the value of each candidate."""
    found = []
    for position in prompt.positions:
        # A token may have a blank at either end, which is no part of the choice.
        values = {each.token.strip(): each.correct / each.judged for each in position.candidates if each.judged}
        place = setting.place_of(position.position, problem, prompt.tier or "")
        if place is not None and position.sampled.strip() in setting.choices:
            found.append((place, {token: value for token, value in values.items() if token in setting.choices}))
    return found


def value_of_choices(measured: Sequence[tuple[str, dict[str, float]]], record: Record, names: Sequence[str]) -> float:
    """Return E[V] of the student's choices at the iterations named, on the values that the forecast measured."""
    made = shares(record, names)
    return float(np.mean([
        sum(made.get(place, {}).get(choice, 0.0) * value for choice, value in values.items())
        for place, values in measured
    ]))  # fmt: skip


def observed_gain(measured: Sequence[tuple[str, dict[str, float]]], row: Record, opd: Record) -> float:
    """Return E[V] of a row's last choices less that of OPD's, a decision."""
    return value_of_choices(measured, row, last_looks(row)) - value_of_choices(measured, opd, last_looks(opd))


def accuracy_gain(setting: Setting, row: Record, opd: Record) -> float:
    """Return what a response gains in accuracy over OPD's on held-out problems, over its number of decisions.

    If decisions changed little, and each for itself, this would be the gain in E[V] a decision.
    """
    (batch,) = {each.prompts for each in setting.rows if each.name == OPD}
    looks = [opd["choices"][name] for name in last_looks(opd)]
    made = np.mean([sum(sum(place.values()) for place in look.values()) for look in looks])
    return float((per_problem(row).mean() - per_problem(opd).mean()) / (made / batch))


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error over seeds, which one seed does not have."""
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
    return float(np.mean(values)), error


def measured_decisions(
    directory: Path, setting: Setting, problems: Mapping[str, str]
) -> list[tuple[str, dict[str, float]]]:
    """Return all decisions that the setting's forecast measured; none without a forecast."""
    file = read_forecast(directory, setting.name)
    if file is None:
        return []
    return [each for prompt in file.prompts for each in decisions(setting, prompt, problems[prompt.problem_id])]


def calibration(
    directory: Path, setting: Setting, rows: Mapping[str, Mapping[int, Record]], problems: Mapping[str, str]
) -> list[Point]:
    """Return a point for each row that has a forecast and runs."""
    found = []
    measured = measured_decisions(directory, setting, problems)
    for row in setting.rows:
        file = read_forecast(directory, setting.name, row.name)
        seeds = sorted(set(rows.get(row.name, {})) & set(rows.get(OPD, {})))
        if file is None or not seeds:
            continue
        predicted = file.forecast.figures["settled_gain"]
        if predicted is None:
            continue
        pairs = [(rows[row.name][seed], rows[OPD][seed]) for seed in seeds]
        gained = mean_of([observed_gain(measured, *pair) for pair in pairs])
        accuracy = mean_of([accuracy_gain(setting, *pair) for pair in pairs])
        error = predicted.standard_error
        found.append(Point(setting.name, row.name, file.verdict.outcome, predicted.value, error, *gained, *accuracy))
    return found


def calibration_table(points: Sequence[Point]) -> list[str]:
    lines = ["## Forecast against outcome", "",
             "Gain in value a decision over OPD, in points. Observed: by the shares of choices, as registered. The "
             "last column is exploratory: accuracy gained on held-out problems, over the decisions of a response.", "",
             "| setting and row | forecast says | predicted | observed | accuracy gained a decision |",
             "|---|---|---|---|---|"]  # fmt: skip
    lines += [f"| {each.setting}: {each.row} | {each.verdict} | {with_error(each.predicted, each.predicted_error)} | "
              f"{with_error(each.observed, each.observed_error)} | {with_error(each.accuracy, each.accuracy_error)} |"
              for each in points]  # fmt: skip
    if len(points) > 2:
        both = np.corrcoef([(each.predicted, each.observed, each.accuracy) for each in points], rowvar=False)[0]
        lines += ["", f"Correlation with the forecast over {len(points)} rows: {both[1]:.2f} observed, {both[2]:.2f} "
                  "accuracy gained a decision."]  # fmt: skip
    return [*lines, ""]


def with_error(share: float, error: float) -> str:
    return f"{100 * share:.1f}" + ("" if np.isnan(error) else f" ± {100 * error:.1f}")


def pass_curves(setting: Setting, base: Record | None, rows: Mapping[str, Mapping[int, Record]]) -> Panel:
    """Return Pass@k in percent for k = 1 to 64, of the runs in which it was measured."""
    measured = {"base": [base]} if base is not None else {}
    measured |= {row: [each for each in seeds.values() if each["wide"]] for row, seeds in rows.items()}
    curves = {
        name: [(k, 100 * float(np.mean([per_problem(each, "wide", k).mean() for each in records]))) for k in KS]
        for name, records in measured.items()
        if records
    }
    return Panel(setting.name, curves, {"base", *named_rows(setting)}, {})


def choice_curves(
    setting: Setting,
    rows: Mapping[str, Mapping[int, Record]],
    measured: Sequence[tuple[str, dict[str, float]]],
    points: Sequence[Point],
) -> Panel:
    """Return what the student's choices are worth over training, in percent, by the values of the untrained student.

    A forecast is a gain over OPD, so where a row was expected to end depends on where OPD did.
    """
    curves = {}
    for row, seeds in rows.items():
        records = list(seeds.values())
        names = sorted(set.intersection(*(set(each["choices"]) for each in records)), key=int)
        worth = [100 * float(np.mean([value_of_choices(measured, each, [name]) for each in records])) for name in names]
        curves[row] = [(int(name), value) for name, value in zip(names, worth, strict=True)]
    opd = 100 * np.mean([value_of_choices(measured, each, last_looks(each)) for each in rows[OPD].values()])
    forecasts = {
        each.row: (float(opd) + 100 * each.predicted, 100 * each.predicted_error)
        for each in points
        if each.setting == setting.name
    }
    return Panel(setting.name, curves, named_rows(setting), forecasts)


def named_rows(setting: Setting) -> set[str]:
    """Return the rows that are told apart in pictures: all, or if they are too many those that a hypothesis names."""
    few = len(setting.rows) <= COLOURS
    return {row.name for row in setting.rows if few or row.seeds == ALL_SEEDS}


def write_tables(directory: Path, settings: Sequence[Setting]) -> None:
    """Write `tables.md` and the pictures of what has been run."""
    lines: list[str] = []
    rows_of: dict[str, dict[str, dict[int, Record]]] = {}
    tiers_of: dict[str, dict[str, str]] = {}
    points: list[Point] = []
    passes: list[Panel] = []
    choices: list[Panel] = []
    for setting in settings:
        tiers = tiers_of[setting.name] = {each["id"]: each["tier"] for each in read_problems(setting.heldout)}
        problems = {each["id"]: each["problem"] for each in read_problems(setting.train)}
        rows = rows_of[setting.name] = read_records(directory, setting)
        path = directory / "records" / setting.name / "base.json"
        base = json.loads(path.read_text()) if path.exists() else None
        lines += results_table(setting, base, rows) + differences_table(setting, rows, tiers)
        if base is not None:
            rows_of[setting.name] = {**rows, BASE: {seed: base for seeds in rows.values() for seed in seeds}}
        points += calibration(directory, setting, rows, problems)
        passes.append(pass_curves(setting, base, rows))
        if OPD in rows and (measured := measured_decisions(directory, setting, problems)):
            choices.append(choice_curves(setting, rows, measured, points))
    lines = hypotheses_table(rows_of, tiers_of) + first_order_table(directory, rows_of) + lines
    lines += calibration_table(points) if points else []
    (directory / "tables.md").write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines) + "\n")
    try:
        from pictures import write_calibration, write_panels
    except ModuleNotFoundError as error:
        sys.stderr.write(f"no pictures: they need {error.name} (pip install {error.name})\n")
        return
    write_panels(directory / "pass-at-k.svg", passes, x_name="k", y_name="Pass@k, percent", doubling=True)
    if choices:
        write_panels(directory / "choices.svg", choices, x_name="iteration", y_name="value of a choice, percent")
    write_calibration(directory / "calibration.svg", points)
