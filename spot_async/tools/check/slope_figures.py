"""Is the teacher worth it? Figures with standard errors over prompts, from what was measured before any training. Pure.

What a teacher thinks of responses is `telemetry/outcome_slope`'s, as during a run. docs/check.md says what the others
mean. None of them says how accurate a student will become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from spot_async.base.text import with_error
from spot_async.telemetry.outcome_slope import (
    REWARDS,
    Opinion,
    areas,
    figures_by_teacher,
    opinions_of,
    ratio_with_error,
)
from spot_async.telemetry.screen import number_table
from spot_async.terms import value_variance
from spot_async.types import Sample

OF_PROBED = 4  # a rule takes the best position of so many that were probed


class Place(NamedTuple):
    """A position that was probed, each of whose candidates has two verdicts or more."""

    position: int
    score_parts: Mapping[str, float]  # those that are known
    variance: float  # Var_p(V): of the candidates' values under the teacher's prior
    halves: tuple[float, float] | None  # the same by each half of the probes; None for less than four verdicts


class Supervised(NamedTuple):
    """What came of supervising one prompt."""

    problem_id: str
    opinions: Sequence[tuple[str, Opinion]]  # of each response, with what the teacher's figures begin with
    outcomes: Sequence[float]  # 1 or 0, of the responses that have a verdict
    probed: int  # positions; 0 for a policy that makes no probes
    places: Sequence[Place]  # those of them that say something


# By what a rule selects: the position where it is largest comes first.
RULES: Mapping[str, Callable[[Place], float]] = {
    "score": lambda place: place.score_parts["score"],
    "entropy": lambda place: place.score_parts["entropy"],
    "JS": lambda place: place.score_parts["divergence"],
    "earliest": lambda place: -place.position,
}


def supervised(problem_id: str, samples: Sequence[Sample]) -> Supervised:
    """Return what the samples of one prompt say. Their texts and tokens are not kept."""
    rewards = [REWARDS.get(str(sample.record.get("verdict"))) for sample in samples]
    of_spot = [sample for sample in samples if sample.metrics.get("probe/requests") and "branches" in sample.record]
    branches = [branch for sample in of_spot for branch in sample.record["branches"]]
    return Supervised(
        problem_id=problem_id,
        opinions=[each for sample in samples for each in opinions_of(sample)],
        outcomes=[reward for reward in rewards if reward is not None],
        probed=len(branches),
        places=[place for branch in branches if (place := place_of(branch)) is not None],
    )


def place_of(branch: Mapping[str, Any]) -> Place | None:
    """Return what a branch of SPOT's record says; None if a candidate has less than two verdicts."""
    prior = np.array([each["prior"] for each in branch["candidates"]])
    rewards = [
        [reward for verdict in each["verdicts"] if (reward := REWARDS[verdict]) is not None]
        for each in branch["candidates"]
    ]
    variance, one, other = (
        value_variance(prior / prior.sum(), some)
        for some in (rewards, [each[::2] for each in rewards], [each[1::2] for each in rewards])
    )
    if variance is None:
        return None
    parts = {name: part for name, part in branch["score_parts"].items() if np.isfinite(part)}
    return Place(branch["position"], parts, variance, None if one is None or other is None else (one, other))


def slope_figures(found: Sequence[Supervised], *, gamma: float, is_random: bool) -> dict[str, float]:
    """Return all that is known, by name. `is_random`: no rule selected the positions, so that rules can be compared."""
    figures = figures_by_teacher(each for prompt in found for each in prompt.opinions)
    figures |= _figure(
        "reward_variance", [(problem, float(np.var(group, ddof=1)), 1.0) for problem, group in groups(found)]
    )
    if any(each.places for each in found):
        totals = [sum(place.variance for place in each.places) for each in found]
        rows = [(each, total) for each, total in zip(found, totals, strict=True) if each.places or not each.probed]
        # What is not known of a response counts as its other positions.
        tilts = [(each, gamma * total * each.probed / max(1, len(each.places))) for each, total in rows]
        figures |= _figure("tilt", [(each.problem_id, tilt, 1.0) for each, tilt in tilts])
        figures |= _figure("value_variance", [(each.problem_id, total, len(each.places)) for each, total in rows])
    for rule, held in held_by_rule(found).items() if is_random else ():
        figures |= _figure(f"of_oracle_by_{rule}", held)
    return figures


def groups(found: Sequence[Supervised]) -> list[tuple[str, list[float]]]:
    """Return the outcomes of each problem that has two or more."""
    by_problem: dict[str, list[float]] = {}
    for each in found:
        by_problem.setdefault(each.problem_id, []).extend(each.outcomes)
    return [(problem, outcomes) for problem, outcomes in by_problem.items() if len(outcomes) > 1]


Part = tuple[str, float, float]  # of a sum: the problem, an amount, and the units that all amounts are divided by


def _figure(name: str, parts: Sequence[Part]) -> dict[str, float]:
    """Return the figure that the parts come to and, of two problems or more, its standard error over problems."""
    units = np.array([part[2] for part in parts], np.float64)
    if units.sum() <= 0:
        return {}
    problem = np.unique([part[0] for part in parts], return_inverse=True)[1]
    value, error = ratio_with_error(np.array([part[1] for part in parts], np.float64), units, problem)
    return {name: value} | ({} if error is None else {f"{name}_standard_error": error})


def held_by_rule(found: Sequence[Supervised]) -> dict[str, list[Part]]:
    """Return how much Var_p(V) lies at each response's best positions by each rule, over that by an oracle.

    A rule takes a quarter of the positions, by what is known without probes, so its sums are unbiased. An oracle takes
    those that half of the probes find best, and the other half judges them: it is below the best there is. Positions
    without a score are left out. Empty where there are too few.
    """
    needed = {"score", "entropy", "divergence"}
    responses = [
        (each.problem_id, [place for place in each.places if place.halves and needed <= place.score_parts.keys()])
        for each in found
    ]
    count = max((len(places) for _, places in responses), default=0) // OF_PROBED
    if not count:
        return {}
    held: dict[str, list[Part]] = {rule: [] for rule in (*RULES, "random")}
    for problem, places in responses:
        if not places:
            continue
        oracle = (_best(places, count, _half(0), _half(1)) + _best(places, count, _half(1), _half(0))) / 2
        for rule, by in RULES.items():
            held[rule].append((problem, _best(places, count, by, lambda place: place.variance), oracle))
        mean = float(np.mean([place.variance for place in places]))
        held["random"].append((problem, mean * min(count, len(places)), oracle))
    return held


def _half(half: int) -> Callable[[Place], float]:
    return lambda place: math.nan if place.halves is None else place.halves[half]


def _best(places: Sequence[Place], count: int, by: Callable[[Place], float], worth: Callable[[Place], float]) -> float:
    """Return what the first positions by one thing are worth by another."""
    return sum(map(worth, sorted(places, key=by, reverse=True)[:count]))


def slope_table(found: Mapping[str, float]) -> Table:
    """Return the figures as a table. What is unknown is left out."""
    table = number_table("before training, to first order", "estimate ± SE")
    for name, title, is_share in _titles(found):
        if (value := found.get(name)) is not None:
            error = found.get(f"{name}_standard_error")
            shown = f"{value:.3g}" + ("" if error is None else f" ±{error:.2g}")
            table.add_row(Text(title), with_error(value, error) if is_share else shown)
    return table


def _titles(found: Mapping[str, float]) -> Iterator[tuple[str, str, bool]]:
    """Yield the name of each figure, its title, and whether it is a share, which is shown in percent."""
    for area in areas([found]):
        teacher = area.partition("/")[2]
        of = f"{teacher}: " if teacher else ""
        yield f"{area}/outcome_slope", f"{of}outcome slope", False
        yield f"{area}/opd_gain", f"{of}OPD, points a response", True
    yield "reward_variance", "GRPO, Var(R), points a response", True
    yield "tilt", "SPOT's tilt beside OPD, gamma Var_p(V), points a response", True
    yield "value_variance", "Var_p(V) of a probed position", False
    for rule in (*RULES, "random"):
        yield f"of_oracle_by_{rule}", f"percent of an oracle's Var_p(V): by {rule}", True
