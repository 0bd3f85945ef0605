"""The last check of supervision before it is trained on.

Replies have been checked where they came in, and policies are tested. So whatever is found here is a bug, and stops the
run. Pure, and cheap enough to be always on: it looks at whole arrays, once per trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.models.chunks import UNKNOWN
from spot_async.models.responses import counted_tokens
from spot_async.types import (
    NO_TOKEN,
    Divergence,
    IntArray,
    Pull,
    SoftTargets,
    Supervision,
    VersionSpan,
    WeightVersion,
)

LEAST_NATS, MOST_NATS = -1e4, 1e-3  # limits of a log-probability, which rounding may put slightly above 0
SUM_SLACK = 1e-3  # how far the sum of a target's float32 probabilities may be from 1


class WrongSupervisionError(Exception):
    """Supervision that must not be trained on was about to reach the trainer. A bug, hence not a `SpotError`."""


def check_feed(
    batch: Iterable[Supervision], *, vocab_size: int, live: WeightVersion, max_staleness: int, teacher_lag: int = 0
) -> None:
    """Raise `WrongSupervisionError` for the first trajectory that is wrong.

    `vocab_size` is the width of the student's softmax, and `live` are the weights that the batch will update. Each
    token must come from weights of the same lineage, at most `max_staleness` steps older, or from no student at all.
    What a teacher that follows the student said of it may be `teacher_lag` steps older than that.
    """
    for each in batch:
        try:
            _check(each, vocab_size, live, max_staleness)
            _check_teachers(each, live, max_staleness + teacher_lag)
        except ValueError as found:
            raise WrongSupervisionError(
                f"supervision of {each.problem_id} (prompt {each.prompt_ordinal}) is wrong: {found}"
            ) from None


class SampledSpan(NamedTuple):
    """Tokens [start, end) of a response were sampled by these weights of the student."""

    start: int
    end: int
    version: WeightVersion


def sampled_spans(each: Supervision) -> list[SampledSpan]:
    """Return which weights sampled which response tokens, in order. Those that no student sampled are left out."""
    spans = each.version_spans or (VersionSpan(0, len(each.response_ids), each.version),)
    return [SampledSpan(span.start, span.end, span.version) for span in spans if span.version is not None]


def teacher_versions(each: Supervision) -> set[WeightVersion]:
    """Return which weights of teachers that follow the student its terms are of."""
    versions = [*(pull.version for pull in each.pulls), *(targets.version for targets in each.soft_targets)]
    return {version for version in versions if version is not None}


def check_arrays(each: Supervision, vocab_size: int) -> None:
    """Raise `ValueError` unless shapes, types, ids and version spans fit together. Other numbers are not checked.

    The trainer makes the same check of every sample that it receives.
    """
    tokens = (len(each.response_ids),)
    _require(len(each.prompt_ids) > 0 and tokens[0] > 0, "prompt or response is empty")
    _check_ids("prompt_ids", each.prompt_ids, (len(each.prompt_ids),), vocab_size)
    _check_ids("response_ids", each.response_ids, tokens, vocab_size)
    for name in ("behavior_logprobs", "reference_logprobs", "advantages", "entropy_bonus"):
        values = getattr(each, name)
        if values is not None:
            _check_array(name, values, tokens, "f")
    for pull in each.pulls:
        _check_array("pulls.logprobs", pull.logprobs, tokens, "f")
        if pull.weights is not None:
            _check_array("pulls.weights", pull.weights, tokens, "f")
        if pull.chunks is not None:
            _check_array("pulls.chunks", pull.chunks, tokens, "i")
    _check_coverage(each.version_spans, tokens[0])
    if each.policy_mask is not None:
        _check_array("policy_mask", each.policy_mask, tokens, "b")
    for targets in each.soft_targets:
        count, candidates = len(targets.positions), targets.token_ids.shape[-1]
        _check_ids("soft_targets.positions", targets.positions, (count,), tokens[0])
        _check_ids("soft_targets.token_ids", targets.token_ids, (count, candidates), vocab_size, least=NO_TOKEN)
        _require(bool((targets.token_ids[:, :1] != NO_TOKEN).all()), "soft_targets.token_ids have a row without tokens")
        _check_array("soft_targets.probabilities", targets.probabilities, (count, candidates), "f")
        _check_array("soft_targets.weights", targets.weights, (count,), "f")
        if targets.tails is not None:
            _check_array("soft_targets.tails", targets.tails, (count,), "f")
        if targets.baselines is not None:
            _check_array("soft_targets.baselines", targets.baselines, (count, candidates), "f")


def _check(each: Supervision, vocab_size: int, live: WeightVersion, max_staleness: int) -> None:
    check_arrays(each, vocab_size)
    for name in ("behavior_logprobs", "reference_logprobs"):
        values = getattr(each, name)
        if values is not None:
            _check_logprobs(name, values)
    for name in ("advantages", "entropy_bonus"):
        if (values := getattr(each, name)) is not None:
            _check_finite(name, values)
    for pull in each.pulls:
        _check_pull(pull)
    _check_read(each)
    _check_versions(each, live, max_staleness)
    _check_foreign(each)
    for targets in each.soft_targets:
        _check_targets(targets, vocab_size)


def _check_logprobs(name: str, values: npt.NDArray[Any]) -> None:
    _check_finite(name, values)
    inside = (values >= LEAST_NATS) & (values <= MOST_NATS)
    _require(bool(inside.all()), f"{name} hold what is no log-probability")


def _check_pull(pull: Pull) -> None:
    _check_logprobs("pulls.logprobs", pull.logprobs)
    if pull.weights is not None:
        _check_finite("pulls.weights", pull.weights)
    if pull.clip is not None:
        least, most = pull.clip
        _require(least <= most, f"pulls.clip is from {least:g} to {most:g}")
    if pull.chunks is not None:
        _check_chunks(pull.chunks)


def _check_chunks(chunks: IntArray) -> None:
    starts = chunks[np.flatnonzero(np.diff(chunks, prepend=chunks[:1] - 1))]
    numbers = starts[starts != UNKNOWN]
    _require(bool((np.diff(numbers) > 0).all()), "pulls.chunks are not ascending, and a chunk's tokens stand together")


def _check_coverage(spans: Sequence[VersionSpan], tokens: int) -> None:
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    is_covered = starts == [0, *ends[:-1]] and ends == sorted(ends) and ends[-1] == tokens
    pairs = list(zip(starts, ends, strict=True))
    _require(not spans or is_covered, "version_spans {} do not cover the {} response tokens in order", pairs, tokens)


def _check_versions(each: Supervision, live: WeightVersion, max_staleness: int) -> None:
    sampled = sampled_spans(each)
    oldest = min((span.version for span in sampled), default=None)
    _require(each.version == oldest, "version is {}, but the oldest of version_spans is {}", each.version, oldest)
    for span in sampled:
        fault = _fault(span.version, live, max_staleness)
        _require(
            fault is None,
            "tokens [{}, {}) were sampled by weights {}, which are {}: {} are live and max_staleness is {}",
            *(*span, fault, live, max_staleness),
        )


def _check_teachers(each: Supervision, live: WeightVersion, longest: int) -> None:
    for version in sorted(teacher_versions(each)):
        fault = _fault(version, live, longest)
        _require(
            fault is None,
            "the teacher that follows the student was asked with weights {}, which are {}: {} are live, and it may be "
            "{} steps behind",
            *(version, fault, live, longest),
        )


def _check_foreign(each: Supervision) -> None:
    """Refuse a policy term on tokens that `version_spans` say no student sampled: there is no log pi_old of them."""
    if not each.has_policy_term:
        return
    for span in each.version_spans:
        has_term = each.policy_mask is None or bool(each.policy_mask[span.start : span.end].any())
        _require(
            span.version is not None or not has_term,
            f"tokens [{span.start}, {span.end}) have a policy term, and no student sampled them: set policy_mask to "
            "false there",
        )


def _check_read(each: Supervision) -> None:
    """Refuse what teaches tokens that were only read: an environment wrote them. `_check_foreign` has policy terms."""
    counted = counted_tokens(each)
    _require(bool(counted.any()), "all of its tokens were only read, so there is nothing to teach: leave it out")
    for span in each.version_spans:
        _require(
            not span.is_read or span.version is None,
            f"tokens [{span.start}, {span.end}) were only read, and yet weights {span.version} sampled them",
        )
    bonus = np.zeros(0, np.int32) if each.entropy_bonus is None else np.flatnonzero(each.entropy_bonus)
    for name, positions in (("entropy_bonus", bonus), *(("soft_targets", own.positions) for own in each.soft_targets)):
        wrong = positions[~counted[positions]]
        _require(
            not len(wrong),
            "{} teach token {}, which was only read: leave out what `counted_tokens` leaves out",
            *(name, *wrong[:1]),
        )


def _fault(version: WeightVersion, live: WeightVersion, max_staleness: int) -> str | None:
    """Return why tokens of these weights must not be trained on; None if they may be."""
    if version.lineage != live.lineage:
        return "of another lineage"
    if version.step > live.step:
        return "newer than the live ones"
    if version.step < live.step - max_staleness:
        return "too old"
    return None


def _check_targets(targets: SoftTargets, vocab_size: int) -> None:
    cells = targets.probabilities
    if targets.tails is not None:
        cells = np.concatenate([cells, targets.tails[:, None]], axis=1)
    with_tails = "" if targets.tails is None else " and tails"
    _check_finite(f"soft_targets.probabilities{with_tails}", cells)
    _require(bool((cells >= 0).all()), f"soft_targets.probabilities{with_tails} hold one below 0")
    sums = cells.sum(axis=1, dtype=np.float64)
    _require(
        bool((np.abs(sums - 1.0) <= SUM_SLACK).all()),
        f"soft_targets.probabilities{with_tails} do not sum to 1",
    )
    _check_finite("soft_targets.weights", targets.weights)
    _require(bool((targets.weights >= 0).all()), "soft_targets.weights hold one below 0: the loss would have no bound")
    kind = targets.divergence
    if targets.baselines is not None:
        _check_baselines(targets, targets.baselines)
    if targets.tails is not None or (kind is not None and (kind.is_conditional or kind.reverse > 0)):
        ordered = np.sort(targets.token_ids, axis=1)
        _require(
            not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_TOKEN)).any()),
            "soft_targets.token_ids name a token twice in a row, and its divergence counts the tokens",
        )
    if kind is not None:
        _check_divergence(kind, targets, cells, vocab_size)


def _check_baselines(targets: SoftTargets, baselines: npt.NDArray[Any]) -> None:
    """With baselines a loss may have no bound, on purpose. These limits bound its gradient (`SoftTargets`)."""
    name = "soft_targets.baselines"
    _check_finite(name, baselines)
    _require(bool((baselines >= 0).all()), f"{name} hold one below 0")
    sums = baselines.sum(axis=1, dtype=np.float64)
    _require(bool((sums <= 1.0 + SUM_SLACK).all()), f"{name} sum to more than 1")
    for other in ("tails", "divergence"):
        is_alone = getattr(targets, other) is None
        _require(is_alone, f"{name} stand beside {other}, and only a cross-entropy without tails has them: give one")


def _check_divergence(kind: Divergence, targets: SoftTargets, cells: npt.NDArray[Any], vocab_size: int) -> None:
    name, has_tail = "soft_targets.divergence", targets.tails is not None
    _require(min(kind.forward, kind.reverse) >= 0, f"{name} has a negative direction, so the loss would have no bound")
    _require(kind.forward + kind.reverse > 0, f"{name} has no direction: give forward, reverse or both")
    for skew in ("forward_skew", "reverse_skew"):
        _require(0 <= getattr(kind, skew) < 1, f"{name}.{skew} is {getattr(kind, skew):g}, which is not in [0, 1)")
    _require(kind.clip is None or kind.clip > 0, f"{name}.clip is {kind.clip}, which cuts everything: give more than 0")
    _require(not (kind.is_conditional and has_tail), f"{name} is conditional, so the targets must have no tails")
    if kind.reverse > 0 and not kind.reverse_skew:
        _require(
            has_tail or kind.is_conditional,
            f"{name}: a reverse KL to targets without tails is infinite, since the student has other tokens too: "
            "give tails, or is_conditional=True",
        )
        _require(bool((cells > 0).all()), f"{name}: a reverse KL to a probability of 0 is infinite")
    is_whole = kind.is_conditional and targets.token_ids.shape[1] == vocab_size
    _require(
        kind.temperature == 1 or (is_whole and kind.temperature > 0),
        f"{name}.temperature is {kind.temperature:g}, and only over the whole vocabulary is it exact: "
        f"give targets of all {vocab_size} tokens with is_conditional=True, or leave it at 1",
    )


def _check_ids(name: str, ids: npt.NDArray[Any], shape: tuple[int, ...], limit: int, *, least: int = 0) -> None:
    _check_array(name, ids, shape, "i")
    _require(not ids.size or bool(ids.min() >= least and ids.max() < limit), f"{name} are not all in 0 to {limit - 1}")


def _check_array(name: str, values: npt.NDArray[Any], shape: tuple[int, ...], kind: str) -> None:
    _require(isinstance(values, np.ndarray), "{} are a {} instead of an array", name, type(values).__name__)
    _require(values.shape == shape, "{} have shape {} instead of {}", name, values.shape, shape)
    _require(values.dtype.kind == kind, "{} are {}", name, values.dtype)


def _check_finite(name: str, values: npt.NDArray[Any]) -> None:
    _require(bool(np.isfinite(values).all()), f"{name} hold what is no finite number")


def _require(holds: bool, otherwise: str, *values: object) -> None:
    """Raise `ValueError` unless it holds. Only then are its words made, since that takes longer than the check."""
    if not holds:
        raise ValueError(otherwise.format(*values))
