"""Makes next-token distributions over whole vocabularies, and computes on them the plain way, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest


@pytest.fixture(scope="session")
def heavy_tailed() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Return a function that makes a teacher's and a student's log-probabilities (T, V) in float64.

    They look like reasoning models': with Zipf-like tails, four rows of five nearly sure of one token, most others torn
    between a few, some broad. The student is a warmer or colder, noisier teacher.
    """

    def make(seed: int, positions: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(seed)
        teacher = np.empty((positions, vocab_size))
        student = np.empty((positions, vocab_size))
        for t in range(positions):
            logits = -draw.uniform(1.0, 1.6) * np.log(np.arange(1, vocab_size + 1)) + 0.8 * draw.normal(size=vocab_size)
            kind = draw.random()
            likely = 1 if kind < 0.8 else int(draw.integers(2, 6)) if kind < 0.95 else int(draw.integers(5, 30))
            logits[:likely] += draw.uniform(8, 18) if kind < 0.8 else draw.uniform(2, 8)
            teacher[t] = logits[draw.permutation(vocab_size)]
            student[t] = draw.uniform(0.85, 1.05) * teacher[t]
            student[t] += draw.uniform(0.1, 1.0) * draw.normal(size=vocab_size)
        return log_softmax(teacher), log_softmax(student)

    return make


@pytest.fixture(scope="session")
def dense_scores() -> Callable[..., dict[str, np.ndarray]]:
    """Return a function that computes every part of the acquisition score over whole distributions (T, V).

    It shares no code with the package.
    """

    def scores(teacher: np.ndarray, student: np.ndarray, k: int, lambda_mass: float = 0.5) -> dict[str, np.ndarray]:
        p, q = np.exp(teacher), np.exp(student)
        best = np.argsort(-teacher, axis=-1, kind="stable")[:, :k]
        entropy = -(p * np.where(p > 0, teacher, 0.0)).sum(-1) / np.log(teacher.shape[-1])
        p, q = np.take_along_axis(p, best, -1), np.take_along_axis(q, best, -1)
        mass, coverage = np.minimum(p.sum(-1), 1.0), np.minimum(q.sum(-1), 1.0)
        p, q = p / p.sum(-1, keepdims=True), q / np.where(coverage > 0, q.sum(-1), 1.0)[:, None]
        middle = (p + q) / 2
        of_p = (p * np.log2(np.where(p > 0, p / middle, 1.0))).sum(-1)
        of_q = (q * np.log2(np.where(q > 0, q / np.where(middle > 0, middle, 1.0), 1.0))).sum(-1)
        divergence = np.where(coverage > 0, np.clip((of_p + of_q) / 2, 0.0, 1.0), 1.0)
        gap = lambda_mass * (1 - coverage) + (1 - lambda_mass) * divergence
        return {
            "entropy": entropy,
            "mass": mass,
            "coverage": coverage,
            "divergence": divergence,
            "gap": gap,
            "H": entropy,
            "HC": entropy * mass,
            "HG": entropy * gap,
            "HC-Mass": entropy * mass * (1 - coverage),
            "Full": entropy * mass * gap,
        }

    return scores


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@pytest.fixture(scope="session")
def recomputed() -> Callable[..., np.ndarray]:
    """Return a function that gives rows as another computation might, with each log-probability off by the noise."""

    def again(logprobs: np.ndarray, noise_nats: float, seed: int, pattern: str = "even") -> np.ndarray:
        draw, half = np.random.default_rng(seed), noise_nats / 2
        if pattern == "even":
            moves = draw.uniform(-half, half, logprobs.shape)
        elif pattern == "signs":
            moves = draw.choice([-half, half], logprobs.shape)
        else:  # likely tokens are moved one way, all others the other way
            level = np.quantile(logprobs, draw.uniform(0.3, 0.99), axis=-1, keepdims=True)
            moves = np.where(logprobs > level, half, -half) * draw.choice([-1.0, 1.0], (len(logprobs), 1))
        return log_softmax(logprobs + moves)

    return again
