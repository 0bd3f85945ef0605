"""Says in words what a forecast comes to: whether SPOT helps, why, and which keys would change that. Pure.

docs/check.md says how to read each, and that their bounds are rules of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from spot_async.base.text import counted
from spot_async.tools.forecast.estimates import RULES, Estimate
from spot_async.tools.forecast.forecast import PAPER_WEIGHT, Forecast, KeyRow
from spot_async.tools.forecast.measurement import Measurement

FLAT_SPREAD = 0.1  # standard deviation of the values below which candidates hardly differ
FEW_KEPT = 0.3
LOW_WEIGHT = 5.0  # beta T / M
MOST_AGREED = 0.5  # of all Var_p(V)
SMALL_TILT = 0.5  # of OPD's gain, below which a comparison with OPD is advised

Outcome = Literal["helps", "cannot help", "unclear"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast in words."""

    outcome: Outcome
    sentence: str
    reasons: list[str]
    changes: list[str]  # keys that would change it


def judge(forecast: Forecast, worth: float) -> Verdict:
    """Return the verdict. `worth` is the smallest gain in value a decision that counts as help."""
    settled, kept = forecast.figures["settled_gain"], forecast.figures["kept_share"]
    if settled is None or kept is None:
        return _verdict(forecast, "unclear", f"Unclear: {without_values(forecast)}.")
    if not kept.value:
        return _verdict(forecast, "cannot help", nothing_correct(forecast))
    outcome = outcome_of(settled, worth)
    sentence = sentence_of(outcome, settled, worth, forecast.prompts)
    return _verdict(forecast, outcome, sentence, list(changes(forecast, outcome, worth)))


def default_worth(forecast: Forecast) -> float:
    """Return the gain that counts as help: one point, or a tenth of the student's accuracy if that is less."""
    accuracy = forecast.figures["student_accuracy"]
    return 0.01 if accuracy is None else min(0.01, 0.1 * accuracy.value)


def _verdict(forecast: Forecast, outcome: Outcome, sentence: str, changes: list[str] | None = None) -> Verdict:
    return Verdict(outcome=outcome, sentence=sentence, reasons=list(reasons(forecast)), changes=changes or [])


def outcome_of(settled: Estimate, worth: float) -> Outcome:
    """Return what an interval says: all above `worth`, all below, or neither."""
    if settled.low > worth:
        return "helps"
    return "cannot help" if settled.high < worth else "unclear"


def without_values(forecast: Forecast) -> str:
    """Return why no value is known."""
    if not forecast.positions:
        return "no position was selected"
    if forecast.without_evidence == forecast.positions:
        return "the verifier judged too few probes of every selected position"
    return "too few prompts have selected positions"


def nothing_correct(forecast: Forecast) -> str:
    share = min(1.0, 3 / forecast.prompts)
    return (
        f"Cannot help: no probe at {counted(forecast.positions, 'selected position')} was correct, so B+ is empty and "
        f"SPOT is OPD at the price of its probes. At most {share:.0%} of prompts can be otherwise (95 %)."
    )


def sentence_of(outcome: Outcome, settled: Estimate, worth: float, prompts: int) -> str:
    expected = (
        f"with these keys a decision gains {points(settled)} points of accuracy, 95 % interval {ends(settled)}; "
        f"{100 * worth:.2g} counts as help"
    )
    match outcome:
        case "helps":
            return f"Helps: {expected}."
        case "cannot help":
            return f"Cannot help: {expected}."
        case "unclear":
            return f"Unclear: {expected}. {more_prompts(settled, worth, prompts)}."


def more_prompts(settled: Estimate, worth: float, prompts: int) -> str:
    """Return how many prompts would tell the gain from `worth`, if it is as estimated."""
    distance = abs(settled.value - worth)
    reach = settled.value - settled.low if settled.value > worth else settled.high - settled.value
    if distance <= reach / 5:
        return "The two lie too close together to tell them apart"
    return f"With about {math.ceil(prompts * (reach / distance) ** 2)} --prompts it would be clear"


def reasons(forecast: Forecast) -> Iterator[str]:
    """Yield what speaks for the outcome, and what a reader should compare SPOT with."""
    found = forecast.figures
    variance, value = found["value_variance"], found["value"]
    yield opd_beside_spot(forecast)
    if variance is not None:
        spread = math.sqrt(max(0.0, variance.value))
        differ = "hardly differ" if spread < FLAT_SPREAD else "differ"
        yield (
            f"The candidates {differ}: their values have a standard deviation of {spread:.2f} under the prior. Of "
            f"{counted(forecast.positions, 'position')} {forecast.never_correct} had no correct probe, and "
            f"{forecast.always_correct} had only correct ones."
        )
    if value is not None and forecast.gain_limit is not None:
        yield (
            f"Always taking the best candidate would bring at most {_points(forecast.gain_limit)} points over the "
            f"prior's {100 * value.value:.1f} (95 %), so no gamma brings more. The noise of {forecast.probes} probes a "
            "candidate is in this limit: more --probes and --prompts lower it."
        )
    yield from where_to_probe(forecast.figures)
    yield from of_training(forecast)
    if (headroom := found["headroom"]) is not None and headroom.high < 0:
        yield (
            f"The teacher is {points(headroom, sign=-1)} points worse than the student: distilling it lowers accuracy."
        )


def opd_beside_spot(forecast: Forecast) -> str:
    """Return what OPD alone gains to first order, and what SPOT's tilt adds."""
    opd, tilt = forecast.figures["opd_gain"], forecast.figures["tilt_gain"]
    if opd is None:
        return (
            "What OPD alone gains is not known: it takes two problems with two rollouts each that have a verdict and "
            "the teacher's log-probabilities, and sampling.top_p=1. Each had "
            f"{counted(forecast.rollouts, 'rollout')} (--rollouts)."
        )
    said = f"OPD alone gains {points(opd)} points a response to first order"
    if opd.low <= 0.0 <= opd.high:
        return f"{said}, which could be none. {more_prompts(opd, 0.0, forecast.prompts)}."
    if opd.high < 0.0:
        return f"{said}: this teacher's advice does not point to right answers."
    if tilt is None:
        return f"{said}."
    said = f"{said}, and SPOT's tilt adds {points(tilt)}. Registered runs reached less in 11 of 11 rows."
    if tilt.value < SMALL_TILT * opd.value:
        return f"{said} The tilt is the smaller part: compare with policy.kind=opd, which needs no probes."
    return said


def where_to_probe(found: Mapping[str, Estimate | None]) -> Iterator[str]:
    """Yield what the score's positions hold beside random ones and those of other rules, where that was measured."""
    score, random, over = (found[name] for name in ("at_score", "at_random", "over_random"))
    if score is None or random is None or over is None:
        return
    chance = ", which may be chance" if over.low <= 0.0 <= over.high else ""
    yield f"Best scores hold {score.value / random.value:.1f} times the Var_p(V) of random positions{chance}."
    if (agreed := found["agreed_share"]) is not None and agreed.low > MOST_AGREED:
        yield f"{agreed.value:.0%} of it lies where teacher and student agree, and the score hardly looks there."
    if more := [rule for rule in RULES if (gain := found[f"over_{rule}"]) is not None and gain.low > 0.0]:
        yield f"Those by {' or '.join(more)} hold more than those by score."


def of_training(forecast: Forecast) -> Iterator[str]:
    """Yield what the gate and the weight of branches take away."""
    kept, weight, reach = (forecast.figures[name] for name in ("kept_share", "branch_weight", "reach"))
    if kept is not None and kept.value < FEW_KEPT and forecast.keys.gate:
        yield f"B+ keeps {kept.value:.0%} of the probed positions. At the others nothing is distilled."
    if weight is not None and reach is not None and weight.value < LOW_WEIGHT:
        yield (
            f"beta is small for such short responses: beta T / M is {weight.value:.2g}, in the paper's setting about "
            f"{PAPER_WEIGHT:g}. OPD pulls back to the prior, and {reach.value:.0%} of the tilt is reached."
        )


def changes(forecast: Forecast, outcome: Outcome, worth: float) -> Iterator[str]:
    """Yield the keys that would make SPOT help; where it does already, those that would bring more for certain."""
    now, *others = forecast.by_keys
    needed = worth
    if outcome == "helps" and now.settled_gain is not None:
        needed = now.settled_gain.high
        # Fewer positions are fewer decisions, so a larger gain of each is not more.
        others = [row for row in others if "positions" not in row.changes]
    better = [row for row in others if row.settled_gain is not None and row.settled_gain.low > needed]
    would = "would bring more" if outcome == "helps" else "would help"
    yield from (f"{words(row)} {would}: {expected(row)}" for row in simplest(better))
    if not better and outcome != "helps":
        yield (
            "No change that was tried would help for certain: gamma up to 8, beta up to the paper's ratio, more "
            "probes, fewer candidates, fewer positions."
        )


def simplest(rows: list[KeyRow]) -> list[KeyRow]:
    """Return the rows that change one key, for each key its first; where there are none, the first of all."""
    by_key: dict[str, KeyRow] = {}
    for row in rows:
        if len(row.changes) == 1:
            by_key.setdefault(next(iter(row.changes)), row)
    return list(by_key.values()) or rows[:1]


def words(row: KeyRow) -> str:
    """Return the changed keys as a command line takes them."""
    return " ".join(f"policy.{key}={value:g}" for key, value in row.changes.items())


def expected(row: KeyRow) -> str:
    """Return the gain with these keys, and what it costs."""
    assert row.settled_gain is not None
    return f"{points(row.settled_gain)} points, with {row.probes_per_prompt} probes a prompt."


def points(estimate: Estimate, *, sign: int = 1) -> str:
    """Return a gain in percentage points, with its standard error."""
    return f"{_points(sign * estimate.value)} ± {_points(estimate.standard_error)}"


def ends(estimate: Estimate) -> str:
    return f"{_points(estimate.low)} to {_points(estimate.high)}"


def _points(share: float) -> str:
    """Return a share in percentage points, without the rounding errors of what is 0."""
    return f"{round(100 * share, 9) + 0.0:.2g}"


FORMAT = 1  # raised when the file can no longer be read as before


class ForecastFile(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast, as its file has it."""

    format: int = FORMAT
    name: str  # of the configuration
    overrides: list[str]
    worth: float
    verdict: Verdict
    notes: list[str]
    forecast: Forecast
    measurement: Measurement
