"""Compares selections from truncated log-probabilities with those from whole distributions, over a real vocabulary.

Random rows stand for a teacher's and a student's distributions. They have Zipf-like tails; four rows of five are nearly
sure of one token, others are torn between a few, some are broad. The student is a warmer or colder, noisier teacher.

The simulated servers move every logit of a row at random, so that log-probabilities are off by up to the noise, and
tell the best K. What they take for their noise they measure as real servers do (`models.precision.noise_nats`). If they
are asked for a single position, the student gives its exact candidates and the teacher the best of its whole row, up to
all of it, in float32. The exact selection comes from the whole rows, by code of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from report import show

from spot_async.models.entropy import entropy_bounds
from spot_async.models.precision import logit_errors, noise_nats
from spot_async.policies.truncated.certainty import Evidence
from spot_async.policies.truncated.noise import split
from spot_async.policies.truncated.score_bounds import ScoreRule, TeacherRows, served_student
from spot_async.types import Float64Array, Int64Array, ScoredPositions

CANDIDATES, BUDGET = 16, 2  # k_s and M of the method
TOP_KS = (20, 64)
NOISES_NATS = (0.0, 0.02, 0.05, 0.12)
MEASURED = 16  # tokens of a row that the servers' noise is measured on
WHOLE = -1
# Who may be asked for single positions: the teacher's widest top-k, and whether the student answers.
WAYS = {
    "both": (WHOLE, True),
    "both, top-64": (64, True),
    "student": (0, True),
    "nobody": (0, False),
}
ENTRY_BYTES = 8 * 4 / 3  # an id and a log-probability, four bytes each, in base64


def main() -> None:
    parser = argparse.ArgumentParser(description="Certain and refined selections at a real vocabulary's size.")
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cases = [(k, noise, way) for k in TOP_KS for noise in NOISES_NATS for way in WAYS if WAYS[way][0] != k]
    tallies = {case: Tally() for case in cases}
    draw = np.random.default_rng(arguments.seed)
    positions = trajectories = 0
    while positions < arguments.positions:
        trajectory = Trajectory(arguments.vocabulary, int(draw.integers(200, 501)), int(draw.integers(2**31)))
        positions += trajectory.positions
        trajectories += 1
        for k, noise, way in cases:
            tallies[k, noise, way].add(trajectory, k, noise, *WAYS[way])
    show(
        f"{trajectories} selections of {BUDGET} from {positions:,} positions, vocabulary {arguments.vocabulary:,}",
        ("may be asked", "K", "noise", "certain", "refined", "open", "wrong", "right", "asked", "kB", "kB asked", "ms"),
        [(way, f"{k}", f"{noise:g}", *tally.row()) for (k, noise, way), tally in tallies.items()],
        (
            "certain, refined, open: decided at once, after asking, not at all. wrong: decided ones that are not",
            "the exact selection. right: midpoints of open ones that are. Per trajectory: positions asked of teacher /",
            "student; kB of all served top-k and of what was asked (id and log-probability in base64); CPU ms.",
        ),
    )


def normalized(logits: Float64Array) -> Float64Array:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def best(row: Float64Array, k: int) -> tuple[Int64Array, Float64Array]:
    """Return the k likeliest ids, in order, and their log-probabilities in float32."""
    ids = np.argpartition(-row, k - 1)[:k] if k < len(row) else np.arange(len(row))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return ids, row[ids].astype(np.float32).astype(np.float64)


def _stacked(rows: Sequence[tuple[Int64Array, Float64Array]]) -> tuple[Int64Array, Float64Array]:
    return np.stack([ids for ids, _ in rows]), np.stack([logprobs for _, logprobs in rows])


def entropy_of(row: Float64Array) -> float:
    return float(-(np.exp(row) * row).sum())


def exact_score(teacher: Float64Array, student: Float64Array) -> float:
    """Return the acquisition score of whole rows, by its definition."""
    ids = np.argpartition(-teacher, CANDIDATES - 1)[:CANDIDATES]
    p, q = np.exp(teacher[ids]), np.exp(student[ids])
    mass, coverage = p.sum(), q.sum()
    p, q = p / mass, q / coverage
    divergence = (p * np.log2(2 * p / (p + q)) + q * np.log2(2 * q / (p + q))).sum() / 2
    return float(entropy_of(teacher) / np.log(len(teacher)) * mass * (0.5 * (1 - coverage) + 0.5 * divergence))


@dataclass
class Served:
    """What servers say of all positions at one level of noise."""

    teacher: tuple[Int64Array, Float64Array]  # (T, K)
    student: tuple[Int64Array, Float64Array]
    sampled_logprobs: Float64Array  # (T,)
    noise_nats: float  # as it is measured


class Trajectory:
    """The rows of one response. Whole rows are made again whenever they are needed, since all would take gigabytes."""

    def __init__(self, vocabulary: int, positions: int, seed: int) -> None:
        self.vocabulary, self.positions, self._seed = vocabulary, positions, seed
        self._log_ranks = np.log(np.arange(1, vocabulary + 1))
        self.sampled = np.zeros(positions, np.int64)
        scores = []
        told: dict[float, list[list[tuple[Int64Array, Float64Array]]]] = {noise: [] for noise in NOISES_NATS}
        sampled: dict[float, list[float]] = {noise: [] for noise in NOISES_NATS}
        apart: dict[float, list[Float64Array]] = {noise: [] for noise in NOISES_NATS}
        for t in range(positions):
            rows = self.whole(t)
            scores.append(exact_score(*rows))
            draw = np.random.default_rng((seed, t, 1))
            self.sampled[t] = draw.choice(best(rows[1], 8)[0])
            for noise in NOISES_NATS:
                moved = [self._moved(row, noise, draw) for row in rows]
                told[noise].append([best(row, max(TOP_KS)) for row in moved])
                for row, (ids, logprobs) in zip(rows, told[noise][-1], strict=True):
                    apart[noise].append((row[ids] - logprobs)[:MEASURED])
                sampled[noise].append(moved[1][self.sampled[t]])
        self.served = {
            noise: Served(
                _stacked([row[0] for row in rows]),
                _stacked([row[1] for row in rows]),
                np.array(sampled[noise], np.float32).astype(np.float64),
                noise_nats(logit_errors(np.stack(apart[noise]))),
            )
            for noise, rows in told.items()
        }
        order = sorted(range(positions), key=lambda t: (-scores[t], t))
        self.exact = sorted(t for t in order[:BUDGET] if scores[t] > 0)

    def whole(self, t: int) -> tuple[Float64Array, Float64Array]:
        """Return log-probabilities (V,) of teacher and student at a position."""
        draw = np.random.default_rng((self._seed, t, 0))
        logits = 0.8 * draw.standard_normal(self.vocabulary)
        logits -= draw.uniform(1.0, 1.6) * self._log_ranks
        kind = draw.random()
        likely = 1 if kind < 0.8 else int(draw.integers(2, 6)) if kind < 0.95 else int(draw.integers(5, 30))
        logits[:likely] += draw.uniform(8, 18) if kind < 0.8 else draw.uniform(2, 8)
        student = draw.uniform(0.85, 1.05) * logits
        student += draw.uniform(0.1, 1.0) * draw.standard_normal(self.vocabulary)
        return normalized(logits), normalized(student)

    def _moved(self, row: Float64Array, noise: float, draw: np.random.Generator) -> Float64Array:
        return normalized(row + draw.uniform(-noise / 2, noise / 2, self.vocabulary)) if noise else row

    def evidence(self, k: int, noise: float, widest: int, asks_student: bool) -> Evidence:
        served = self.served[noise]
        ids, logprobs = (part[:, :k].copy() for part in served.teacher)
        lower, upper = entropy_bounds(logprobs, self.vocabulary)
        sure, spread = split(served.noise_nats, self.positions)
        noises = np.full(self.positions, sure), np.full(self.positions, spread)
        teacher = TeacherRows(ids, logprobs, lower, upper, np.zeros(self.positions, np.bool_), *noises)
        student_ids, student_logprobs = (part[:, :k] for part in served.student)
        return Evidence(
            teacher,
            served_student(student_ids, student_logprobs, self.sampled, served.sampled_logprobs, sure, spread),
            ScoreRule(CANDIDATES, self.vocabulary),
            BUDGET,
            teacher_top_k=self.vocabulary if widest == WHOLE else widest,
            ask_student=asks_student,
        )


@dataclass
class Tally:
    """How the selections of one case came out."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("certain", "refined", "uncertain"), 0))
    wrong: int = 0
    right_midpoints: int = 0
    asked: dict[str, int] = field(default_factory=lambda: {"teacher": 0, "student": 0})
    bulk_bytes: float = 0.0
    asked_bytes: float = 0.0
    cpu_s: float = 0.0

    def add(self, trajectory: Trajectory, k: int, noise: float, widest: int, asks_student: bool) -> None:
        self.bulk_bytes += 2 * trajectory.positions * k * ENTRY_BYTES
        started = time.process_time()
        evidence = trajectory.evidence(k, noise, widest, asks_student)
        outcome = "certain" if evidence.certain else ""
        self.cpu_s += time.process_time() - started
        everywhere = np.ones(trajectory.positions, np.bool_)
        while questions := evidence.questions(everywhere, 2 * BUDGET):
            for top_k, rows in questions.teacher.items():
                self._ask_teacher(trajectory, evidence, rows, top_k)
            self._ask_student(trajectory, evidence, questions.student)
        outcome = outcome or ("refined" if evidence.certain else "uncertain")
        self.outcomes[outcome] += 1
        is_exact = evidence.selected.tolist() == trajectory.exact
        self.wrong += evidence.certain and not is_exact
        self.right_midpoints += is_exact and not evidence.certain

    def _ask_teacher(self, trajectory: Trajectory, evidence: Evidence, rows: Int64Array, top_k: int) -> None:
        ids, logprobs, lower, upper = [], [], [], []
        for t in rows.tolist():
            row = trajectory.whole(t)[0]
            some, values = best(row, top_k)
            low, high = (float(bound[0]) for bound in entropy_bounds(values[None], trajectory.vocabulary))
            whole = float(np.float32(entropy_of(row)))
            ids.append(some)
            logprobs.append(values)
            lower.append(low if top_k < trajectory.vocabulary else whole)
            upper.append(high if top_k < trajectory.vocabulary else whole)
        reply = ScoredPositions(
            topk_ids=np.stack(ids).astype(np.int32),
            topk_logprobs=np.stack(logprobs).astype(np.float32),
            entropy_lower=np.array(lower, np.float64),
            entropy_upper=np.array(upper, np.float64),
        )
        self.asked["teacher"] += len(rows)
        self.asked_bytes += len(rows) * top_k * ENTRY_BYTES
        started = time.process_time()
        evidence.take_teacher(rows, reply, top_k)
        self.cpu_s += time.process_time() - started

    def _ask_student(self, trajectory: Trajectory, evidence: Evidence, rows: Int64Array) -> None:
        if not len(rows):
            return
        ids = evidence.teacher.ids[rows, :CANDIDATES]
        values = np.stack([trajectory.whole(t)[1][some] for t, some in zip(rows.tolist(), ids, strict=True)])
        self.asked["student"] += len(rows)
        self.asked_bytes += ids.size * ENTRY_BYTES
        started = time.process_time()
        evidence.take_student(rows, values.astype(np.float32))
        self.cpu_s += time.process_time() - started

    def row(self) -> tuple[str, ...]:
        count = sum(self.outcomes.values())
        open_ends = self.outcomes["uncertain"]
        return (
            *(f"{100 * number / count:.1f} %" for number in self.outcomes.values()),
            f"{self.wrong}",
            f"{self.right_midpoints}/{open_ends}" if open_ends else "-",
            f"{self.asked['teacher'] / count:.1f} / {self.asked['student'] / count:.1f}",
            f"{self.bulk_bytes / count / 1e3:.0f}",
            f"{self.asked_bytes / count / 1e3:.1f}",
            f"{1e3 * self.cpu_s / count:.1f}",
        )


if __name__ == "__main__":
    main()
