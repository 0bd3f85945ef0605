"""Whether the teacher points to right answers: how verdicts go with what it thinks of the student's responses. Pure.

docs/methods.md has the two figures, the outcome slope and OPD's first-order gain, and what they mean. p_S is what a
token was sampled with, so staleness does not bias them. Tokens that the teacher does not know, and those that no
student sampled, are left out. Of responses that were sampled with a `top_p` below 1 there is no gain: their tokens come
from less than p_S, so the expectation of p_T / p_S - 1 is not 0, and the nucleus's share of p_T is not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.base.text import with_error
from spot_async.config import teacher_area
from spot_async.loop.events import IterationFinished
from spot_async.models.chunks import UNKNOWN, chunk_sums
from spot_async.run_directory.layout import DECIMALS
from spot_async.telemetry.totals import Rows, of_each
from spot_async.types import Float64Array, Int64Array, IntArray, Sample, Verdict

TEACHER = teacher_area("")
AGREED_NATS = 0.1  # teacher and student agree on a token where |log p_T / p_S| is less
MOST_RATIO = 10.0  # of p_T / p_S: rare larger ones would decide the gain alone
FEWEST = 10  # right responses, and wrong ones, below which nothing is said
ENOUGH = 100  # right times wrong over all, below which nothing is warned of: 200 responses where half are right
SPENT = 0.2  # a gain is, once it is surely below this share of what it was
REWARDS = {verdict.value: verdict.reward for verdict in Verdict}


class RatioSums(NamedTuple):
    """Sums over the tokens of a response that both models know."""

    tokens: int
    log_ratio: float  # of log p_T / p_S
    excess: float  # of min(p_T / p_S, MOST_RATIO) - 1; NaN where tokens were not sampled from all of p_S
    agreed: int


class Opinion(NamedTuple):
    """What a teacher thinks of a judged response."""

    problem: str
    tier: str
    category: str
    reward: float
    sums: RatioSums


def ratio_sums(
    teacher: npt.NDArray[np.floating], student: npt.NDArray[np.floating], chunks: IntArray | None = None
) -> RatioSums:
    """Return the sums over a response's log-probabilities (T,); NaN where one of them is unknown.

    Of a teacher that knows `chunks` (T,) alone, the ratio of a chunk counts as that of a token.
    """
    ratios = teacher.astype(np.float64) - student
    if chunks is not None:
        numbers, first = np.unique(chunks, return_index=True)
        ratios = chunk_sums(ratios, chunks)[first[numbers != UNKNOWN]]
    ratios = ratios[np.isfinite(ratios)]
    return RatioSums(
        tokens=len(ratios),
        log_ratio=float(ratios.sum()),
        excess=float(np.expm1(np.minimum(ratios, math.log(MOST_RATIO))).sum()),
        agreed=int((np.abs(ratios) < AGREED_NATS).sum()),
    )


def opinion(record: Mapping[str, Any], said: Mapping[str, Any]) -> Opinion | None:
    """Return what a teacher thinks of a sample, by its record; None without a verdict, or without such tokens.

    `said` is the teacher's part of it. Numbers are rounded as in `samples.jsonl`: a run that was resumed has some so,
    from its ledger, and finds the same.
    """
    reward = REWARDS.get(str(record.get("verdict")))
    given = said.get("teacher_logprobs", ()), record.get("behavior_logprobs", ())
    try:
        teacher, student = (np.asarray(each, np.float64).round(DECIMALS) for each in given)
    except (TypeError, ValueError):  # a policy may record under these names what it likes
        return None
    chunks = said.get("teacher_chunks")
    if reward is None or teacher.shape != student.shape or len(teacher if chunks is None else chunks) != len(teacher):
        return None
    problem, tier, category = (str(record.get(name) or "") for name in ("problem_id", "tier", "category"))
    sums = ratio_sums(teacher, student, None if chunks is None else np.asarray(chunks, np.int32))
    if record.get("top_p", 1.0) != 1.0:
        sums = sums._replace(excess=math.nan)
    return Opinion(problem, tier, str(record.get("domain") or category), reward, sums) if sums.tokens else None


def outcome_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return an iteration's figures of each teacher with their standard errors, of each category too if it has several.

    Empty where no teacher scored the student's tokens, or nothing has a verdict.
    """
    return figures_by_teacher(each for sample in samples for each in opinions_of(sample))


def opinions_of(sample: Sample) -> Iterator[tuple[str, Opinion]]:
    """Yield what each teacher thinks of a sample, with what the teacher's figures begin with."""
    several = sample.record.get("teachers")
    teachers = several if isinstance(several, dict) else {str(sample.record.get("teacher") or ""): sample.record}
    for name, said in teachers.items():
        if (found := opinion(sample.record, said)) is not None:
            yield teacher_area(name), found


def figures_by_teacher(given: Iterable[tuple[str, Opinion]]) -> dict[str, float]:
    """Return `outcome_metrics` of what `opinions_of` yields of each sample."""
    by_teacher: defaultdict[str, list[Opinion]] = defaultdict(list)
    for area, found in given:
        by_teacher[area].append(found)
    metrics: dict[str, float] = {}
    for area, opinions in sorted(by_teacher.items()):
        metrics |= figures(opinions, area)
        categories = sorted({each.category for each in opinions} - {""})
        for category in categories if len(categories) > 1 else ():
            metrics |= figures([each for each in opinions if each.category == category], f"{area}/{category}")
    return metrics


def figures(opinions: Sequence[Opinion], area: str) -> dict[str, float]:
    """Return the figures of these responses, as metrics.

    A response is compared with the others to its problem. Those that are alone are compared within their tier. Then
    differences between problems are in the slope: a teacher may disagree more where they are hard. They are not in the
    gain, since the expectation of p_T / p_S - 1 is 0 for each problem.
    """
    problems, tiers, _, rewards, sums = map(np.array, zip(*opinions, strict=True))
    tokens, log_ratios, excesses, agreed = sums.T
    names, problem, responses = np.unique(problems, return_inverse=True, return_counts=True)
    of_tier = len(names) + np.unique(tiers, return_inverse=True)[1]
    alone = responses[problem] == 1
    group = np.where(alone, of_tier, problem)
    size = np.bincount(group)[group]
    compared = (size > 1).astype(np.float64)
    advantages = _centred(rewards, group) * size / np.maximum(size - 1, 1)  # R - b, b the mean of the others
    right, wrong = float(compared @ rewards), float(compared @ (1 - rewards))
    parts = {  # amounts, and the units that their sum is divided by
        "agreement": (agreed, tokens),
        "agreement_right": (agreed * rewards, tokens * rewards),
        "agreement_wrong": (agreed * (1 - rewards), tokens * (1 - rewards)),
    }
    if right and wrong:  # else the covariances are 0, and such a batch does not show their errors
        parts["outcome_slope"] = advantages * _centred(log_ratios, group), compared
        if np.isfinite(excesses).all():
            parts["opd_gain"] = advantages * _centred(excesses, group), compared
    counts = {"right": right, "wrong": wrong, "alone": float(compared @ alone)}
    metrics = {f"{area}/{name}_responses": count for name, count in counts.items()}
    for name, (amounts, units) in parts.items():
        if units.any():
            # Of a problem's responses none is independent of the others, so the error is over problems.
            metrics[f"{area}/{name}"], error = ratio_with_error(amounts, units, problem)
            if error is not None:
                metrics[f"{area}/{name}_standard_error"] = error
    return metrics


def ratio_with_error(amounts: Float64Array, units: Float64Array, group: Int64Array) -> tuple[float, float | None]:
    """Return the sum of amounts (N,) over that of units (N,), which is not 0, and its standard error over groups (N,).

    There is no error where a single group has all units.
    """
    value = float(amounts.sum() / units.sum())
    residuals, n = np.bincount(group, amounts - value * units), len(np.unique(group[units != 0]))
    if n < 2:
        return value, None
    return value, float(math.sqrt(residuals @ residuals * n / (n - 1)) / units.sum())


def _centred(values: Float64Array, group: Int64Array) -> Float64Array:
    """Return the values (N,) less the means of their groups."""
    means = np.bincount(group, values) / np.maximum(np.bincount(group), 1)
    return np.asarray(values - means[group])


class OverIterations:
    """A teacher's slope and gain over several iterations, with standard errors, and the responses behind them."""

    def __init__(self, rows: Rows, area: str = TEACHER) -> None:
        self.right, self.wrong, alone = (
            np.array([row.get(f"{area}/{name}_responses", 0.0) for row in rows]) for name in ("right", "wrong", "alone")
        )
        self.slope, self.gain = (self._mean(rows, f"{area}/{name}") for name in ("outcome_slope", "opd_gain"))
        if any(f"{area}/outcome_slope" in row and f"{area}/opd_gain" not in row for row in rows):
            self.gain = 0.0, 0.0  # which nothing measured has: an error of 0 says that it is not known
        # The slope has less noise, and the gain needs no other responses to the problem.
        self.decisive = self.gain if 2 * alone.sum() > self.responses else self.slope

    @property
    def responses(self) -> float:
        return float((self.right + self.wrong).sum())

    @property
    def is_firm(self) -> bool:
        """Whether a warning may rest on them. The scarcer verdict decides how much a covariance can show."""
        return self.right.sum() * self.wrong.sum() >= ENOUGH * self.responses and self.decisive[1] > 0

    def _mean(self, rows: Rows, name: str) -> tuple[float, float]:
        """Return the mean, weighted by responses, and its error. It is 0 in iterations whose verdicts are equal."""
        weights = (self.right + self.wrong) / max(1.0, self.responses)
        values = [row.get(name, 0.0) for row in rows]
        # A single problem shows no error. Its value takes that place, which on average is not too small.
        errors = [row.get(f"{name}_standard_error", value) for row, value in zip(rows, values, strict=True)]
        return float(weights @ values), math.hypot(*(weights * errors))

    def __str__(self) -> str:
        (slope, error), digits = self.slope, 2 if self.slope[1] >= 0.01 else 3
        gain = f"; to first order OPD gains {with_error(*self.gain, signed=True)} points a response"
        return f"{slope:+.{digits}f} ± {error:.{digits}f} ({self.responses:,.0f} responses){gain * (self.gain[1] > 0)}"


def outcome_words(rows: Rows) -> str:
    """Return whether each teacher points to right answers, over the iterations; empty where none scored responses."""
    return "; ".join(_words(OverIterations(rows, area), area) for area in areas(rows))


def areas(rows: Rows) -> list[str]:
    """Return what the figures of each teacher begin with: `teacher`, or `teacher/<name>` of several."""
    found = [name.rpartition("/")[0] for name in of_each(rows, TEACHER, "right_responses").values()]
    return [TEACHER] if TEACHER in found else [each for each in found if each.count("/") == 1]


def _words(found: OverIterations, area: str) -> str:
    teacher = area.replace("/", " ") if "/" in area else "the teacher"
    right, wrong, (value, error) = found.right.sum(), found.wrong.sum(), found.decisive
    if min(right, wrong) < FEWEST or not error:
        why = f"{right:,.0f} right and {wrong:,.0f} wrong responses could be compared, and {FEWEST} of each are needed"
        if min(right, wrong) >= FEWEST and found.slope[1]:
            why = "with sampling.top_p below 1 that takes several responses a prompt"
        return f"whether {teacher} points to right answers is not known: {why}"
    return f"{teacher} {'points' if value > 2 * error else 'does not clearly point'} to right answers: {found}"


class OutcomeHistory:
    """Remembers a run's figures, to say when they show that the teacher does not help, or no longer does."""

    def __init__(self, rows: Rows) -> None:
        """Begin with the rows of the iterations that the run has already."""
        self._rows = {int(row["iteration"]): row for row in rows}

    def warning(self, finished: IterationFinished) -> str:
        """Return what the iterations so far show against the teacher; empty while that is nothing, or not sure."""
        self._rows[finished.iteration] = outcome_metrics(finished.samples)
        rows = [row for iteration, row in sorted(self._rows.items()) if iteration <= finished.iteration]
        found = ((area, self._of_teacher(area, rows, finished.iteration)) for area in areas(rows))
        return "; ".join(f"{area.partition('/')[2]}: {said}" if "/" in area else said for area, said in found if said)

    def _of_teacher(self, area: str, rows: Rows, iteration: int) -> str:
        first = len(rows) - len(rows) // 4
        whole, before, recent = (OverIterations(each, area) for each in (rows, rows[:first], rows[first:]))
        if whole.is_firm and whole.decisive[0] < whole.decisive[1]:
            return (
                f"this teacher's advice does not point to right answers: {whole}. Copying it makes none likelier; "
                "outcomes may: spot and grpo learn from them"
            )
        (once, error), (now, error_now) = before.decisive, recent.decisive
        if recent.is_firm and once > 3 * error and now + 2 * error_now < SPENT * once:
            return (
                "the teacher has nothing left to teach: it no longer points to right answers. Until iteration "
                f"{iteration + first - len(rows)}: {before}; since then: {recent}"
            )
        return ""
