"""Computes intervals that surely contain the acquisition score, when servers give only a top-k of each row.

Pure numpy in float64. It selects nothing. docs/methods.md, "Where whole distributions are not served".

Noise. A server that computes the same row twice (in another batch, with another kernel) gives two slightly different
distributions. The *served* row is one of them. The row that *counts*, from which the exact selection would be made, is
another. There are two kinds, and `noise.py` says which a server has.

*Sure* noise (`noise_nats`): between the two rows, the log-probability of each token, served or not, differs by at most
`n`, in the worst way that there is. It follows that

* the log-probability of any set of tokens, and of its complement, differs by at most `n` too;
* the entropies differ by a factor of at most e^n, since `H' <= -sum p' log p <= e^n H`, and the other way round;
* the teacher's top k may be other tokens, where two log-probabilities are closer together than the noise moves them.

*Statistical* noise (`spread_nats`): the logits of tokens move independently of each other, so that what they do to a
sum averages out. Each part of the score is bounded in the served row first, and then widened by `noise.py`.

Axes: T positions, K the teacher's served top-k, k candidates (the first of those), L known student tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.types import LEAST_NATS, NO_TOKEN, BoolArray, Float64Array, Int64Array

from ..acquisition import PositionScores, ScoreVariant, score_positions
from . import noise
from .intervals import (
    MASS_ROUNDING,
    OUTWARD,
    TINY,
    Interval,
    gap_bounds,
    normalized_entropy,
    probability_interval,
    rounding_nats,
)


class ScoreBounds(NamedTuple):
    """Intervals of `acquisition.PositionScores`, part by part. Where a quantity is exact, its ends are equal."""

    score: Interval
    entropy: Interval
    mass: Interval
    coverage: Interval
    divergence: Interval
    gap: Interval

    @property
    def middle(self) -> PositionScores:
        return PositionScores(*(part.middle for part in self))

    def replaced(self, rows: Int64Array, other: ScoreBounds) -> ScoreBounds:
        """Return these bounds with `rows` replaced by those of `other`, which has no other rows."""
        parts = [Interval(mine.lower.copy(), mine.upper.copy()) for mine in self]
        for mine, theirs in zip(parts, other, strict=True):
            mine.lower[rows], mine.upper[rows] = theirs.lower, theirs.upper
        return ScoreBounds(*parts)


@dataclass
class TeacherRows:
    """What is known about the teacher. A row that is asked for again replaces the one served first."""

    ids: Int64Array  # (T, K) descending by probability
    logprobs: Float64Array  # (T, K)
    entropy_lower: Float64Array  # (T,) nats, of the served row
    entropy_upper: Float64Array  # (T,)
    exact_entropy: BoolArray  # (T,) whether the served row's entropy is exact; else it is bounded from its top-k
    noise_nats: Float64Array  # (T,) sure noise; 0 where the served row is the one that counts
    spread_nats: Float64Array  # (T,) statistical noise, as `noise.split` gives it; 0 likewise

    @property
    def is_noisy(self) -> BoolArray:
        return (self.noise_nats > 0.0) | (self.spread_nats > 0.0)

    def at(self, rows: Int64Array) -> TeacherRows:
        return TeacherRows(*(value[rows] for value in vars(self).values()))


@dataclass
class StudentRows:
    """What is known about the student: some tokens in any order, and upper bounds for all others."""

    # (T, L) `NO_TOKEN` where empty. If a token is listed twice, the first entry counts: of `NO_TOKEN`, `with_room`'s.
    ids: Int64Array
    logprobs: Float64Array  # (T, L)
    noise_nats: Float64Array  # (T, L) sure noise; 0 where the value is the one that counts
    spread_nats: Float64Array  # (T, L) statistical noise; 0 likewise
    cap: Float64Array  # (T,) largest probability that any one token not listed can have
    missing: Float64Array  # (T,) largest probability that all tokens not listed can have together

    def at(self, rows: Int64Array) -> StudentRows:
        return StudentRows(*(value[rows] for value in vars(self).values()))

    def with_room(self, count: int) -> StudentRows:
        """Return the same rows with `count` empty places in front, for `put`."""
        empty = np.zeros((len(self.ids), count))
        return StudentRows(
            np.concatenate([np.full(empty.shape, NO_TOKEN), self.ids], axis=-1),
            np.concatenate([np.full(empty.shape, LEAST_NATS), self.logprobs], axis=-1),
            np.concatenate([empty, self.noise_nats], axis=-1),
            np.concatenate([empty, self.spread_nats], axis=-1),
            self.cap,
            self.missing,
        )

    def put(self, rows: Int64Array, ids: Int64Array, logprobs: npt.ArrayLike) -> None:
        """Put exact values (N, k) of the candidates (N, k) into the places that `with_room` made."""
        self.ids[rows, : ids.shape[-1]] = ids
        self.logprobs[rows, : ids.shape[-1]] = np.asarray(logprobs, dtype=np.float64)

    def logprobs_at(self, ids: Int64Array) -> Float64Array:
        """Return the log-probabilities (T, k) listed for tokens (T, k); NaN where a token is not listed."""
        same = ids[:, :, None] == self.ids[:, None, :]
        told = np.take_along_axis(self.logprobs, same.argmax(axis=-1), axis=-1)
        return np.where(same.any(axis=-1), told, np.nan)

    def is_exact_at(self, ids: Int64Array) -> BoolArray:
        """Return (T,) true where all of the tokens (T, k) are listed with the values that count."""
        is_noisy = (self.noise_nats > 0.0) | (self.spread_nats > 0.0)
        exact = ~is_noisy[:, None, :] & (ids[:, :, None] == self.ids[:, None, :])
        return np.asarray(exact.any(axis=-1).all(axis=-1))

    def drop(self, rows: Int64Array, count: int) -> None:
        """Empty the first `count` places of `rows`, where `put` writes, because the candidates have changed."""
        self.ids[rows, :count] = -1


@dataclass(frozen=True)
class ScoreRule:
    """How a score is computed from its parts."""

    candidates: int  # k_s
    vocab_size: int
    lambda_mass: float = 0.5
    lambda_shape: float = 0.5
    variant: ScoreVariant = "Full"

    @property
    def asks_student(self) -> bool:
        return self.variant not in ("H", "HC")

    def parts(
        self, teacher_logprobs: npt.ArrayLike, student_logprobs: npt.ArrayLike, teacher_entropy: npt.ArrayLike
    ) -> PositionScores:
        """Return `score_positions` of known rows, by this rule."""
        lambdas = {"lambda_mass": self.lambda_mass, "lambda_shape": self.lambda_shape}
        rows = teacher_logprobs, student_logprobs, teacher_entropy
        return score_positions(*rows, self.vocab_size, variant=self.variant, **lambdas)


def asked_student(ids: npt.ArrayLike, logprobs: npt.ArrayLike) -> StudentRows:
    """Return the rows of a student that was asked for exact log-probabilities (T, L) of tokens (T, L)."""
    values = np.asarray(logprobs, dtype=np.float64)
    missing = _left_by(np.exp(values).sum(axis=-1), 0.0)
    sure, spread = np.zeros(values.shape), np.zeros(values.shape)
    return StudentRows(np.asarray(ids, dtype=np.int64), values, sure, spread, missing, missing)


def served_student(
    topk_ids: npt.ArrayLike,
    topk_logprobs: npt.ArrayLike,
    sampled_ids: npt.ArrayLike,
    sampled_logprobs: npt.ArrayLike,
    noise_nats: float,
    spread_nats: float = 0.0,
) -> StudentRows:
    """Return the rows of a student known only by its rollout: its top-K (T, K), which may be 0, and its tokens (T,)."""
    ids, sampled = np.asarray(topk_ids, dtype=np.int64), np.asarray(sampled_ids, dtype=np.int64)
    logprobs = np.asarray(topk_logprobs, dtype=np.float64)
    last = logprobs[:, -1] if ids.shape[1] else np.zeros(len(ids))
    last = np.where(np.isneginf(last), 0.0, last)  # a place that the server left empty bounds no other token
    sampled = np.where((ids == sampled[:, None]).any(axis=-1), -1, sampled)
    ids = np.concatenate([ids, sampled[:, None]], axis=-1)
    logprobs = np.concatenate([logprobs, np.asarray(sampled_logprobs, dtype=np.float64)[:, None]], axis=-1)
    seen = np.where(ids >= 0, np.exp(logprobs), 0.0).sum(axis=-1)
    missing = _left_by(seen, noise_nats)
    cap = np.minimum(np.exp(np.minimum(last + noise_nats + rounding_nats(last), 0.0)), missing)
    return StudentRows(ids, logprobs, np.full(ids.shape, noise_nats), np.full(ids.shape, spread_nats), cap, missing)


def _left_by(mass: npt.ArrayLike, noise_nats: npt.ArrayLike) -> Float64Array:
    """Return the most mass that a set of tokens leaves to all others. Float32 rows sum to 1 only up to rounding."""
    return np.minimum(probability_interval(mass, noise_nats).complement().upper + MASS_ROUNDING, 1.0)


def score_bounds(teacher: TeacherRows, student: StudentRows, rule: ScoreRule, *, shape: bool = True) -> ScoreBounds:
    """Return intervals (T,) of the scores, and of their parts, in the rows that count.

    `shape=False` leaves JS at [0, 1], to save the time that its bounds take, which is most of it.
    """
    k = rule.candidates
    served = teacher.entropy_lower, teacher.entropy_upper, teacher.exact_entropy
    entropy = normalized_entropy(*served, teacher.noise_nats, rule.vocab_size)
    moved = noise.of_entropy(teacher.logprobs, teacher.entropy_lower, teacher.entropy_upper, teacher.spread_nats)
    moved = moved / np.log(max(rule.vocab_size, 2))
    entropy = entropy.widened(moved, moved)
    served_mass = np.exp(teacher.logprobs[:, :k]).sum(axis=-1)
    mass = probability_interval(served_mass, teacher.noise_nats).shifted(_mass_shift(teacher, served_mass, k))
    none, one = np.zeros_like(mass.lower), np.ones_like(mass.lower)
    coverage, spread = Interval(none, one), none
    if rule.asks_student:
        lower, upper, served_coverage, shift, spread = _student_at_candidates(teacher, student, rule)
        coverage = served_coverage.shifted(shift)
    missing = coverage.complement()
    divergence = Interval(none, one)
    gap = Interval(rule.lambda_mass * missing.lower, rule.lambda_mass * missing.upper + rule.lambda_shape)
    if shape and rule.asks_student:
        shares = _teacher_shares(teacher, k)
        divergence, gap = gap_bounds(shares, (lower, upper), served_coverage, rule.lambda_mass, rule.lambda_shape)
        moved = noise.of_divergence(
            shares[1], *_student_shares(lower, upper), divergence.upper, teacher.spread_nats, spread
        )
        divergence = divergence.widened(moved, moved)
        gap = gap.widened(
            rule.lambda_mass * (coverage.upper - served_coverage.upper) + rule.lambda_shape * moved,
            rule.lambda_mass * (served_coverage.lower - coverage.lower) + rule.lambda_shape * moved,
        )
    factor = {
        "H": Interval(one, one),
        "HC": mass,
        "HG": gap,
        "HC-Mass": mass.times(missing),
        "Full": mass.times(gap),
    }[rule.variant]
    bounds = ScoreBounds(entropy.times(factor), entropy, mass, coverage, divergence, gap)
    return _with_exact_rows(bounds, teacher, student, rule)


def _teacher_shares(teacher: TeacherRows, k: int) -> tuple[Float64Array, Float64Array]:
    """Return bounds (T, k) of the teacher renormalised on its candidates, by rank.

    The odds of one candidate against the others are a ratio of two noisy numbers, so the noise counts twice.
    """
    logprobs = teacher.logprobs[:, :k]
    weights = np.exp(logprobs - logprobs.max(axis=-1, keepdims=True))
    share = weights / weights.sum(axis=-1, keepdims=True)
    odds = np.exp(2.0 * (teacher.noise_nats[:, None] + rounding_nats(logprobs).max(axis=-1, keepdims=True)))
    return share / (share + (1.0 - share) * odds), share / (share + (1.0 - share) / odds)


def _student_shares(lower: Float64Array, upper: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return bounds (T, k) of the student renormalised on the candidates, from those of its probabilities there."""
    others_lower, others_upper = (each.sum(axis=-1, keepdims=True) - each for each in (lower, upper))
    return lower / np.maximum(lower + others_upper, TINY), upper / np.maximum(upper + others_lower, TINY)


def _mass_shift(teacher: TeacherRows, mass: Float64Array, k: int) -> Float64Array:
    """Return how far statistical noise moves the log-odds (T,) of the candidates together."""
    squares = np.exp(2.0 * teacher.logprobs)
    hidden = np.clip(1.0 - np.exp(teacher.logprobs).sum(axis=-1), 0.0, 1.0) * np.exp(teacher.logprobs[:, -1])
    inside, outside = squares[:, :k].sum(axis=-1), squares[:, k:].sum(axis=-1) + hidden
    return noise.of_set((inside, mass), (outside, 1.0 - mass), teacher.spread_nats)


def _student_at_candidates(
    teacher: TeacherRows, student: StudentRows, rule: ScoreRule
) -> tuple[Float64Array, Float64Array, Interval, Float64Array, Float64Array]:
    """Return bounds (T, k) of the student's probabilities at the teacher's candidates, by rank, and of their sum A.

    Also how far statistical noise moves the log-odds (T,) of A, and the spread (T,) of the student's logits there.
    """
    k = rule.candidates
    same = teacher.ids[:, :, None] == student.ids[:, None, :]  # (T, K, L)
    known, place = same.any(axis=-1), same.argmax(axis=-1)
    logprobs = np.where(known, np.take_along_axis(student.logprobs, place, axis=-1), -np.inf)
    sure = np.where(known, np.take_along_axis(student.noise_nats, place, axis=-1), 0.0)
    values = probability_interval(np.exp(logprobs), sure)  # (T, K)
    lower = np.where(known, values.lower, 0.0)
    upper = np.where(known, values.upper, student.cap[:, None])

    inside = known[:, :k]
    seen, worst = np.exp(logprobs[:, :k]).sum(axis=-1), sure[:, :k].max(axis=-1)
    alike = (np.where(inside, sure[:, :k], worst[:, None]) == worst[:, None]).all(axis=-1)
    together = probability_interval(seen, worst)
    unseen = np.minimum(np.where(inside, 0.0, upper[:, :k]).sum(axis=-1), student.missing)
    known_upper = np.where(alike, together.upper, np.where(inside, upper[:, :k], 0.0).sum(axis=-1))
    coverage_lower = np.where(alike, together.lower, lower[:, :k].sum(axis=-1))
    elsewhere = ~(same[:, :k].any(axis=1)) & (student.ids >= 0)  # (T, L) known tokens that are not candidates
    listed = probability_interval(np.exp(student.logprobs), student.noise_nats)
    left = 1.0 - np.where(elsewhere, listed.lower, 0.0).sum(axis=-1) + MASS_ROUNDING  # as in `_left_by`
    coverage_upper = np.minimum(known_upper + unseen, left) + OUTWARD

    # Where noise leaves open which tokens are the candidates, any of the possible tokens may hold the rank.
    swap, pool, hidden = interchangeable(teacher, rule)
    if swap.any():
        apart = np.where(same.any(axis=1) | (student.ids < 0), 0.0, listed.upper).max(axis=-1, initial=0.0)
        unserved = np.where(hidden, np.maximum(apart, student.cap), 0.0)[:, None]
        smallest = np.where(hidden[:, None], 0.0, np.sort(np.where(pool, lower, np.inf), axis=-1))
        largest = np.maximum(-np.sort(np.where(pool, -upper, 0.0), axis=-1), unserved)
        lower = np.where(swap, smallest[:, :1], lower[:, :k])
        upper = np.where(swap, largest[:, :1], upper[:, :k])
        # Each token holds one rank, so the open ranks together have the smallest or largest of the pool, once each.
        is_open = np.arange(swap.shape[-1]) < swap.sum(axis=-1, keepdims=True)
        some = swap.any(axis=-1)
        coverage_lower, coverage_upper = (
            np.where(
                some,
                np.where(swap, 0.0, each).sum(axis=-1) + np.where(is_open, of_pool[:, :k], 0.0).sum(axis=-1),
                known,
            )
            for each, of_pool, known in ((lower, smallest, coverage_lower), (upper, largest, coverage_upper))
        )
    coverage = Interval(np.clip(coverage_lower, 0.0, 1.0), np.clip(coverage_upper, 0.0, 1.0))
    lower, upper = lower[:, :k], upper[:, :k]
    is_exact = student.is_exact_at(teacher.ids[:, :k]) & ~swap.any(axis=-1)
    spread = np.where(is_exact, 0.0, student.spread_nats.max(axis=-1, initial=0.0))
    outside = np.where(elsewhere, np.exp(2.0 * student.logprobs), 0.0).sum(axis=-1) + student.missing * student.cap
    shift = noise.of_set(((upper**2).sum(axis=-1), coverage.lower), (outside, 1.0 - coverage.upper), spread)
    return lower, upper, coverage, shift, spread


class Interchangeable(NamedTuple):
    """Where noise leaves open which tokens are the teacher's best k."""

    rank: BoolArray  # (T, k) ranks that another token may hold
    pool: BoolArray  # (T, K) served tokens that may hold such a rank
    hidden: BoolArray  # (T,) whether a token that was not served may hold one


def interchangeable(teacher: TeacherRows, rule: ScoreRule) -> Interchangeable:
    """Find the tokens whose log-probabilities are so close that noise may change which are the best k."""
    k, served = rule.candidates, teacher.logprobs.shape[-1]
    if k >= rule.vocab_size:
        nothing = np.zeros_like(teacher.ids, dtype=np.bool_)
        return Interchangeable(nothing[:, :k], nothing, nothing[:, 0])
    noisy = teacher.is_noisy[:, None] & (teacher.ids[:, k - 1 : k] != NO_TOKEN)  # a row of fewer has all there are
    last, following = teacher.logprobs[:, k - 1 : k], teacher.logprobs[:, min(k, served - 1)][:, None]
    reach = 2.0 * (teacher.noise_nats[:, None] + rounding_nats(following)) + noise.of_two(teacher.spread_nats)[:, None]
    swap = noisy & (teacher.logprobs[:, :k] <= following + reach)
    pool = np.concatenate([swap, noisy & (teacher.logprobs[:, k:] >= last - reach)], axis=-1)
    hidden = (noisy & (teacher.logprobs[:, -1:] >= last - reach))[:, 0] & (served < rule.vocab_size)
    return Interchangeable(swap, pool, hidden)


def _with_exact_rows(bounds: ScoreBounds, teacher: TeacherRows, student: StudentRows, rule: ScoreRule) -> ScoreBounds:
    """Return the bounds with exact rows set to what `score_positions` computes, so that ties stay ties."""
    k = rule.candidates
    exact = ~teacher.is_noisy & teacher.exact_entropy
    logprobs = np.full((len(exact), k), -np.inf)
    if rule.asks_student:
        exact &= student.is_exact_at(teacher.ids[:, :k])
        logprobs = student.logprobs_at(teacher.ids[:, :k])
    rows = np.flatnonzero(exact)
    if not len(rows):
        return bounds
    scores = rule.parts(teacher.logprobs[rows, :k], logprobs[rows], teacher.entropy_lower[rows])
    known = ScoreBounds(*(Interval(part, part) for part in scores))
    if not rule.asks_student:  # its log-probabilities above are placeholders
        known = known._replace(**{name: getattr(bounds, name).at(rows) for name in ("coverage", "divergence", "gap")})
    return bounds.replaced(rows, known)
