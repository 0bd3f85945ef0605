"""Decides where to probe: the acquisition score of every response position, and the choice of the best few.

Pure numpy in float64, from log-probabilities that the caller has gathered. What happens at a chosen position (probing,
targets) is decided elsewhere. The definitions are the paper's Eqs. (2) and (5)-(7).

Axes: T response positions, k candidates, V vocabulary.
"""

from __future__ import annotations

import math
import string
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.base import registry
from spot_async.base.tasks import error_words
from spot_async.errors import PluginError
from spot_async.models.entropy import plogp
from spot_async.types import BoolArray, Float64Array, Int64Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ScoreVariant = Literal["H", "HC", "HG", "HC-Mass", "Full"]


class PositionScores(NamedTuple):
    """The score of each position and its parts, each (T,) float64 in [0, 1]."""

    score: Float64Array
    entropy: Float64Array  # Hbar: teacher entropy over log V
    mass: Float64Array  # C: teacher probability of the candidates
    coverage: Float64Array  # A: student probability of the same candidates
    divergence: Float64Array  # JS, in bits, of the two policies renormalised on the candidates
    gap: Float64Array  # G = lambda_mass (1 - A) + lambda_shape JS

    def at(self, rows: Int64Array) -> PositionScores:
        return PositionScores(*(part[rows] for part in self))


def score_positions(
    teacher_logprobs: npt.ArrayLike,
    student_logprobs: npt.ArrayLike,
    teacher_entropy: npt.ArrayLike,
    vocab_size: int,
    *,
    lambda_mass: float = 0.5,
    lambda_shape: float = 0.5,
    variant: ScoreVariant = "Full",
) -> PositionScores:
    """Return the acquisition scores, from full-vocabulary natural logs at the teacher's top-k tokens.

    `teacher_logprobs` and `student_logprobs` are (T, k) over the same tokens, `teacher_entropy` is (T,) in nats, and
    `vocab_size` is the width of the teacher's softmax.

    Log-probabilities may be -inf. A student's row of only -inf has no mass on the candidates. Its JS counts as 1, which
    gives the position the largest score it can have. So callers may pass such a row for a student not asked yet.

    Raises `ValueError` if shapes do not match or the lambdas are negative or do not sum to 1.
    """
    teacher = np.asarray(teacher_logprobs, dtype=np.float64)  # (T, k)
    student = np.asarray(student_logprobs, dtype=np.float64)  # (T, k)
    entropy = np.asarray(teacher_entropy, dtype=np.float64)  # (T,)
    if teacher.ndim != 2 or teacher.shape != student.shape or entropy.shape != teacher.shape[:1]:
        raise ValueError(
            f"teacher {teacher.shape} and student {student.shape} log-probabilities must both be (T, k) "
            f"and the entropy {entropy.shape} (T,)"
        )
    if min(lambda_mass, lambda_shape) < 0 or not math.isclose(lambda_mass + lambda_shape, 1.0, rel_tol=1e-5):
        raise ValueError(f"lambda_mass {lambda_mass} and lambda_shape {lambda_shape} must be >= 0 and sum to 1")

    # Servers compute in float32 or less. Rounding must not push a share above 1, or the score would be negative.
    normalized_entropy = np.clip(entropy / np.log(vocab_size), 0.0, 1.0)
    mass = np.minimum(np.exp(teacher).sum(axis=-1), 1.0)
    coverage = np.minimum(np.exp(student).sum(axis=-1), 1.0)
    divergence = _jensen_shannon_bits(_renormalized(teacher), _renormalized(student))
    gap = lambda_mass * (1.0 - coverage) + lambda_shape * divergence
    factors = {
        "H": np.ones_like(mass),
        "HC": mass,
        "HG": gap,
        "HC-Mass": mass * (1.0 - coverage),
        "Full": mass * gap,
    }
    return PositionScores(normalized_entropy * factors[variant], normalized_entropy, mass, coverage, divergence, gap)


def rule_scores(name: str, predictors: Mapping[str, npt.NDArray[Any]]) -> Float64Array:
    """Return the scores (E,) of a rule `module:function`. It gets `predictors`, (E,) each, by their recorded names.

    Raises PluginError, in one line, for whatever it raises, and for what is no score.
    """
    count = len(predictors["position"])
    try:
        scores = np.asarray(registry.named(name)(predictors), dtype=np.float64)
    except Exception as error:
        raise PluginError(f"policy.selection={name} raised {error_words(error)}") from error
    wrong = scores[~(np.isfinite(scores) & (scores >= 0.0))]
    if scores.shape != (count,) or len(wrong):
        shown = f"{wrong[0]:g}" if len(wrong) else f"the shape {scores.shape}"
        raise PluginError(f"policy.selection={name} returned {shown}: return {count} numbers >= 0, one a position")
    return scores


def select_positions(score: npt.ArrayLike, valid: npt.ArrayLike, budget: int) -> Int64Array:
    """Return the `budget` best valid positions, ascending. Ties go to the earlier position.

    `score` and `valid` are (T,). Positions with score 0 are never chosen, so there may be fewer.
    """
    scores = np.asarray(score, dtype=np.float64)
    best_first = np.argsort(-scores, kind="stable")
    eligible = np.asarray(valid, dtype=np.bool_) & (scores > 0.0)
    return np.sort(best_first[eligible[best_first]][:budget]).astype(np.int64)


def probeable_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> BoolArray:
    """Return which token ids (V,) may stand at a probed position.

    Not eligible are special and padding tokens, tokens of only whitespace or only punctuation, and ids without a token
    (models pad their softmax). A token that is part of a character stays eligible: it decodes to the replacement
    character, which is neither whitespace nor punctuation.
    """
    special = set(tokenizer.all_special_ids)
    special |= {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    eligible = np.zeros(vocab_size, dtype=np.bool_)
    for token_id in tokenizer.get_vocab().values():
        if token_id < vocab_size and token_id not in special:
            eligible[token_id] = not _is_blank_or_punctuation(tokenizer.decode([token_id]))
    return eligible


def _is_blank_or_punctuation(text: str) -> bool:
    # Unicode calls $ + < = > ^ ` | ~ symbols. Here they are punctuation, as in string.punctuation.
    return all(
        character in string.punctuation or unicodedata.category(character).startswith("P") for character in text.strip()
    )


def _renormalized(logprobs: Float64Array) -> Float64Array:
    """Return probabilities (T, k) that sum to 1 over the candidates, or are all 0 where no candidate has mass.

    Rows are shifted by their peak, so that probabilities too small for a float keep their ratios.
    """
    peak = logprobs.max(axis=-1, keepdims=True)
    weights = np.exp(logprobs - np.where(np.isneginf(peak), 0.0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0.0, total, 1.0)


def _jensen_shannon_bits(p: Float64Array, q: Float64Array) -> Float64Array:
    """Return the JS (T,), in [0, 1], of rows (T, k); 1 where either row has no mass."""
    mixture_entropy = -plogp((p + q) / 2.0).sum(axis=-1)
    mean_entropy = -(plogp(p) + plogp(q)).sum(axis=-1) / 2.0
    divergence = np.clip((mixture_entropy - mean_entropy) / np.log(2.0), 0.0, 1.0)
    return np.where(p.any(axis=-1) & q.any(axis=-1), divergence, 1.0)
