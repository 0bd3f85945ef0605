"""Builds the terms of a trajectory's supervision: pulls on its sampled tokens, and targets of its distributions.

A policy lists the terms of its loss, in any order, and `on_policy` puts them beside the response. What depends on the
student in training is computed by the trainer. docs/methods.md has the algebra. Pure numpy, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.errors import ContractError
from spot_async.models.chunks import chunk_means, chunk_shares, chunk_sums, whole_chunks
from spot_async.models.common_vocabulary import tails_with
from spot_async.models.responses import counted_tokens, oldest_version, sampled_tokens
from spot_async.types import (
    LEAST_NATS,
    BoolArray,
    Divergence,
    Float64Array,
    FloatArray,
    Generation,
    IntArray,
    Live,
    LiveRows,
    Prompt,
    Pull,
    Sample,
    SoftTargets,
    Supervision,
    TokenScores,
    WeightVersion,
)

# A tail that nobody served is at least this: 1 minus a sum of float32 probabilities is only rounding below it.
LEAST_TAIL = 2.0**-20
LEAST_PROBABILITY = 1e-35  # which float32 still has


def forward_kl(**how: Any) -> Divergence:
    """Return KL(teacher || student). `how`: `clip`, `is_conditional` and `temperature` of `Divergence`."""
    return Divergence(forward=1.0, **how)


def reverse_kl(**how: Any) -> Divergence:
    """Return KL(student || teacher). `how` is as in `forward_kl`."""
    return Divergence(reverse=1.0, **how)


def jsd(beta: float, **how: Any) -> Divergence:
    """Return GKD's `beta KL(p || m) + (1 - beta) KL(q || m)`, `m = beta p + (1 - beta) q`, for beta inside (0, 1).

    It shrinks towards 0 at both ends of beta, as in TRL. Raises ValueError for the ends, which are KL divergences.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta:g} must be inside (0, 1); the ends are forward_kl() and reverse_kl()")
    return Divergence(forward=beta, reverse=1 - beta, forward_skew=beta, reverse_skew=1 - beta, **how)


def skew(alpha: float, **how: Any) -> Divergence:
    """Return DistiLLM's `KL(p || alpha p + (1 - alpha) q)`."""
    return Divergence(forward=1.0, forward_skew=alpha, **how)


def reverse_skew(alpha: float, **how: Any) -> Divergence:
    """Return DistiLLM's `KL(q || alpha q + (1 - alpha) p)`."""
    return Divergence(reverse=1.0, reverse_skew=alpha, **how)


def pull(
    model: TokenScores | FloatArray,
    weight: npt.ArrayLike = 1.0,
    *,
    clip: tuple[float, float] | None = None,
) -> Pull:
    """Return a pull towards a model, of its scores or log-probabilities (T,).

    `weight` is a number or (T,), of which a chunk takes the mean. `clip` limits the difference to log pi_old, before
    the weight. Tokens that the scores do not know have weight 0.
    """
    if isinstance(model, TokenScores):
        logprobs, valid, version, chunks = model.logprobs, model.valid, model.version, model.chunks
    else:
        logprobs, valid, version, chunks = model, None, None, None
    weights = chunk_means(np.broadcast_to(np.asarray(weight, dtype=np.float32), logprobs.shape), chunks)
    is_plain = valid is None and np.ndim(weight) == 0 and weight == 1.0
    return Pull(
        logprobs=logprobs,
        weights=None if is_plain else np.where(True if valid is None else valid, weights, np.float32(0)),
        clip=clip,
        version=version,
        chunks=chunks,
    )


def compared(
    scores: TokenScores,
    divergence: Divergence,
    *,
    top_k: int | None = None,
    where: BoolArray | None = None,
    weight: npt.ArrayLike = 1.0,
    has_tail: bool = True,
) -> SoftTargets:
    """Return a comparison with the teacher's top-k at each position that the scores know, weighted `weight / T`.

    This mean is over what was answered and not only read. `where` (T,) keeps only some positions, and `weight` is a
    number or (T,). Without a tail the teacher is renormalised, which teaches that there are no other tokens. A
    conditional divergence never has a tail, since it renormalises the student too.

    Raises ContractError without a tail where the teacher reads in tokens of its own: of some of its distribution nobody
    knows where it belongs.
    """
    tokens, has_tail = len(scores.logprobs), has_tail and not divergence.is_conditional
    if scores.rows is not None and not has_tail:
        raise ContractError(
            "the teacher reads in tokens of its own (tokenizer=own): some of its distribution is on no token of the "
            "student, so rows are compared with their tail: give has_tail=True, and a divergence that has one"
        )
    positions = np.flatnonzero(scores.known_rows if where is None else scores.known_rows & _mask(where, tokens))
    weights = np.broadcast_to(np.asarray(weight, dtype=np.float64) / (scores.counted or tokens), (tokens,))
    k = scores.topk_ids.shape[1] if top_k is None else top_k
    tails = tails_with(scores.tail_logprobs, scores.topk_logprobs[:, k:])
    return soft_targets(
        positions,
        scores.topk_ids[positions, :k],
        scores.topk_logprobs[positions, :k],
        weights[positions],
        divergence,
        has_tail=has_tail,
        tail_logprobs=None if tails is None else tails[positions],
        version=scores.version,
    )


def soft_targets(
    positions: npt.ArrayLike,
    token_ids: IntArray,
    logprobs: FloatArray,
    weights: npt.ArrayLike,
    divergence: Divergence | None,
    *,
    has_tail: bool = True,
    tail_logprobs: FloatArray | None = None,
    version: WeightVersion | None = None,
) -> SoftTargets:
    """Return targets at positions (N,) of a model's full-vocabulary log-probabilities (N, k).

    With a tail, all other tokens have what the model's server says of them, `tail_logprobs` (N,), or else the rest of
    the probability. Without one the log-probabilities are renormalised. Either way rows sum to 1, whatever noise is in
    them. `version` is that of a teacher that follows the student.
    """
    raw = np.asarray(logprobs, dtype=np.float64)
    if raw.size and raw.min() > 0:  # noise may put some above 0
        raise ValueError(f"logprobs are all above 0, {raw.max():.3g} at most: give natural logs, not probabilities")
    if divergence is not None and divergence.temperature != 1.0:
        raw = raw / divergence.temperature
    tails = None
    if has_tail:
        probabilities = np.exp(raw)
        if tail_logprobs is None:
            rest = np.maximum(1.0 - probabilities.sum(axis=1), LEAST_TAIL)
        else:
            rest = np.maximum(np.exp(tail_logprobs, dtype=np.float64), LEAST_PROBABILITY)
        total = probabilities.sum(axis=1) + rest
        probabilities, tails = probabilities / total[:, None], (rest / total).astype(np.float32)
    else:
        probabilities = renormalised(raw)
    return SoftTargets(
        positions=np.asarray(positions, dtype=np.int32),
        token_ids=token_ids,
        probabilities=np.maximum(probabilities, LEAST_PROBABILITY).astype(np.float32),
        weights=np.asarray(weights, dtype=np.float32),
        tails=tails,
        divergence=divergence,
        version=version,
    )


def written(
    response: Generation | IntArray, weight: npt.ArrayLike = 1.0, *, where: BoolArray | None = None
) -> SoftTargets:
    """Return the cross-entropy of the response's own tokens, which is their negative log-likelihood, weighted
    `weight / T`.

    Of a `Generation` what was only read is left out, and is not in T; bare ids (T,) are all answered. `where` (T,)
    keeps only some positions, and `weight` is a number or (T,).
    """
    response_ids = response.token_ids if isinstance(response, Generation) else response
    tokens = len(response_ids)
    counted = counted_tokens(response) if isinstance(response, Generation) else np.ones(tokens, np.bool_)
    positions = np.flatnonzero(counted if where is None else counted & _mask(where, tokens))
    weights = np.broadcast_to(np.asarray(weight, dtype=np.float64) / max(1, counted.sum()), (tokens,))
    return SoftTargets(
        positions=positions.astype(np.int32),
        token_ids=response_ids[positions, None],
        probabilities=np.ones((len(positions), 1), np.float32),
        weights=weights[positions].astype(np.float32),
    )


def _mask(where: BoolArray, tokens: int) -> BoolArray:
    if where.dtype != np.bool_ or where.shape != (tokens,):
        raise ValueError(
            f"where is {where.dtype} of shape {where.shape}: give a mask of bool, ({tokens},), not positions"
        )
    return where


def policy_tokens(sample: Supervision) -> BoolArray:
    """Return where (T,) a student sampled a token that may have a policy term."""
    found = sampled_tokens(sample)
    return found if sample.policy_mask is None else found & sample.policy_mask


def revised(sample: Sample, metrics: Mapping[str, float] | None = None, **terms: Any) -> Sample:
    """Return a sample with other terms (fields of `Supervision`), and with these `metrics` too. For `revise`."""
    assert sample.supervision is not None
    supervision = msgspec.structs.replace(sample.supervision, **terms)
    return msgspec.structs.replace(sample, supervision=supervision, metrics={**sample.metrics, **(metrics or {})})


def difference(model: Pull, live: Live) -> FloatArray:
    """Return `log q - log pi` (T,) of the student in training, without the pull's weights and clip.

    It is what the trainer makes of the pull, each token's part of a chunk too. It is 0 where there is no policy term,
    or where the pull has weight 0.
    """
    where = whole_chunks(live.where, model.chunks)
    if model.weights is not None:
        where = where & (model.weights != 0)
    differences = np.where(where, model.logprobs - live.logprobs, np.float32(0))
    shares = chunk_shares(np.where(where, live.logprobs, np.float32(0)), model.chunks)
    return np.where(where, shares * chunk_sums(differences, model.chunks), 0).astype(np.float32)


Term = TypeVar("Term", Pull, SoftTargets)


def weighted(term: Term, weight: npt.ArrayLike) -> Term:
    """Return a pull or soft targets whose weights are multiplied. `weight` is a number or (T,) over the response.

    Weights of 0 stay 0, whatever `weight` is there. A pull's chunk takes the mean of its tokens' weights.
    """
    if isinstance(term, Pull):
        own = np.ones_like(term.logprobs) if term.weights is None else term.weights
        factors = np.asarray(weight)
        if term.chunks is not None:  # `weight` may be no number where nothing is known
            factors = chunk_means(np.where(own == 0, 0.0, factors), term.chunks)
    else:
        own = term.weights
        factors = np.asarray(weight) if np.ndim(weight) == 0 else np.asarray(weight)[term.positions]
    return msgspec.structs.replace(term, weights=np.where(own == 0, 0, own * factors).astype(np.float32))


def cells(targets: SoftTargets, rows: LiveRows) -> tuple[Float64Array, Float64Array]:
    """Return log-probabilities of the targets' and of the student's cells, both (N, C), as their divergence has them.

    A cell is one of a target's tokens, and the last one is all other tokens where these count. Where the divergence is
    conditional, the student is renormalised on the tokens.
    """
    kind, log_q = targets.divergence or Divergence(), np.maximum(rows.logprobs.astype(np.float64), LEAST_NATS)
    if kind.is_conditional:
        inside = log_q / kind.temperature - (log_q / kind.temperature).max(axis=1, keepdims=True)
        log_q = inside - np.log(np.exp(inside).sum(axis=1, keepdims=True))
    probabilities = targets.probabilities.astype(np.float64)
    if targets.has_tail_cell:
        tails = np.zeros(len(probabilities)) if targets.tails is None else targets.tails
        probabilities = np.concatenate([probabilities, tails[:, None]], axis=1)
        log_q = np.concatenate([log_q, rows.tail_logprobs[:, None]], axis=1)
    log_p = np.log(np.maximum(probabilities, np.exp(LEAST_NATS)))
    return log_p, np.maximum(log_q, LEAST_NATS)


def retargeted(targets: SoftTargets, log_p: npt.ArrayLike) -> SoftTargets:
    """Return the same targets with other probabilities: those of `log_p` (N, C) over the same cells, renormalised."""
    probabilities = np.maximum(renormalised(log_p), LEAST_PROBABILITY).astype(np.float32)
    k = targets.token_ids.shape[1]
    tails = probabilities[:, k] if targets.has_tail_cell else None
    return msgspec.structs.replace(targets, probabilities=probabilities[:, :k], tails=tails)


def renormalised(logprobs: npt.ArrayLike) -> Float64Array:
    """Return probabilities (..., k) of natural logs (..., k), in which any common offset cancels. Rows sum to 1."""
    values = np.asarray(logprobs, dtype=np.float64)
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def value_variance(prior: Float64Array, rewards: Sequence[Sequence[float]]) -> float | None:
    """Return an unbiased estimate of the variance of the candidates' values under the prior, which may be negative.

    `prior` (k,) sums to 1, and `rewards` has the outcomes of each candidate. The noise of the probes looks like
    differences between candidates, and is taken off. One probe does not show its own noise, so there is none unless
    each candidate has two with evidence.
    """
    if min(map(len, rewards)) < 2:
        return None
    values = np.array([sum(each) / len(each) for each in rewards])
    noise = np.array([np.var(each, ddof=1) / len(each) for each in rewards])
    measured = prior @ (values - prior @ values) ** 2
    return float(measured - (prior * (1.0 - prior)) @ noise)


def row_bytes(k: int, *, has_baselines: bool = False) -> int:
    """Return the bytes on the wire of a target on k tokens: position, weight, tail, ids, probabilities, baselines."""
    return 12 + (12 if has_baselines else 8) * k


def on_policy(
    prompt: Prompt, response: Generation, *, policy_mask: BoolArray | None = None, **terms: Any
) -> Supervision:
    """Return supervision of a student's response. `terms` are the fields of `Supervision` that say what is learnt.

    Tokens of the response that no student sampled have no policy term, whatever `policy_mask` (T,) says.
    """
    is_sampled = sampled_tokens(response)
    if not is_sampled.all():
        policy_mask = is_sampled if policy_mask is None else policy_mask & is_sampled
    return Supervision(
        prompt_ordinal=prompt.ordinal,
        problem_id=prompt.problem.id,
        prompt_ids=prompt.token_ids,
        response_ids=response.token_ids,
        behavior_logprobs=response.logprobs,
        version=oldest_version(response),
        version_spans=response.version_spans,
        policy_mask=policy_mask,
        **terms,
    )
