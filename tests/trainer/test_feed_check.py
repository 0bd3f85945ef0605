"""What must never be trained on is found at the trainer's door, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.base import wire
from spot_async.terms import compared, forward_kl, pull, written
from spot_async.testing.services import token_scores
from spot_async.trainer.feed_check import WrongSupervisionError, check_feed, teacher_versions
from spot_async.types import Divergence, Pull, SoftTargets, Supervision, VersionSpan, WeightVersion

VOCAB = 20
LIVE = WeightVersion(0, 3)
LOGPROBS = ("behavior_logprobs", "logprobs", "reference_logprobs")
SHARES = ("probabilities", "tails", "baselines")
KINDS = {
    "cross-entropy": None,
    "forward": Divergence(forward=1.0, clip=0.05),
    "reverse": Divergence(reverse=1.0),
    "jsd": Divergence(forward=0.3, reverse=0.7, forward_skew=0.3, reverse_skew=0.7),
    "conditional": Divergence(reverse=1.0, is_conditional=True),
}


def check(each: Supervision, *, max_staleness: int = 0) -> None:
    check_feed([each], vocab_size=VOCAB, live=LIVE, max_staleness=max_staleness)


@st.composite
def trajectories(draw: Callable[..., Any]) -> Supervision:
    tokens = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))

    def logprobs() -> np.ndarray:
        return -random.exponential(3.0, tokens).astype(np.float32)

    def pull() -> Pull:
        weights = random.normal(size=tokens).astype(np.float32) if draw(st.booleans()) else None
        return Pull(
            logprobs=logprobs(), weights=weights, clip=draw(st.sampled_from([None, (-np.inf, 1.0), (0.0, 0.0)]))
        )

    def targets() -> SoftTargets:
        rows, k, kind = draw(st.integers(0, 4)), draw(st.integers(1, 5)), KINDS[draw(st.sampled_from([*KINDS]))]
        with_baselines = kind is None and draw(st.booleans())
        has_tail = not with_baselines and (kind is None or not kind.is_conditional)
        cells = random.dirichlet(np.ones(k + has_tail), rows).astype(np.float32).reshape(rows, k + has_tail)
        return SoftTargets(
            positions=random.integers(0, tokens, rows).astype(np.int32),
            token_ids=np.array([random.permutation(VOCAB)[:k] for _ in range(rows)], np.int32).reshape(rows, k),
            probabilities=cells[:, :k],
            weights=random.uniform(0, 1, rows).astype(np.float32),
            tails=cells[:, k] if has_tail else None,
            divergence=kind,
            baselines=random.dirichlet(np.ones(k), rows).astype(np.float32) if with_baselines else None,
        )

    return Supervision(
        prompt_ordinal=4,
        problem_id="p4",
        prompt_ids=random.integers(0, VOCAB, draw(st.integers(1, 5))).astype(np.int32),
        response_ids=random.integers(0, VOCAB, tokens).astype(np.int32),
        behavior_logprobs=logprobs(),
        version=draw(st.sampled_from([None, LIVE])),
        pulls=tuple(pull() for _ in range(draw(st.integers(0, 3)))),
        advantages=random.normal(size=tokens).astype(np.float32) if draw(st.booleans()) else None,
        reference_logprobs=logprobs() if draw(st.booleans()) else None,
        policy_mask=random.random(tokens) < 0.5 if draw(st.booleans()) else None,
        soft_targets=tuple(targets() for _ in range(draw(st.integers(0, 2)))),
    )


@given(trajectories(), st.data())
def test_one_wrong_number_in_any_array_is_found(good: Supervision, data: Any) -> None:
    check(good)
    holder = data.draw(st.sampled_from([good, *good.soft_targets, *good.pulls]))
    names = [name for name in holder.__struct_fields__ if isinstance(getattr(holder, name), np.ndarray)]
    name = data.draw(st.sampled_from(names))
    array = getattr(holder, name)
    kinds = ["shorter", "other type"] + (["number"] if array.size and array.dtype.kind != "b" else [])
    kind = data.draw(st.sampled_from(kinds))
    if kind == "shorter" and len(array):
        wrong = array[:-1]
        if name == "prompt_ids" and len(array) > 1:
            return  # a prompt may have any length
    elif kind == "number":
        wrong = array.copy()
        bad = [-1, VOCAB] if array.dtype.kind == "i" else [np.nan, np.inf, -np.inf]
        bad += [0.1, -1e21] if name in LOGPROBS else [-0.01, 1.2] if name in SHARES else []
        bad += [-0.5] if name == "weights" and isinstance(holder, SoftTargets) else []
        wrong.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(st.sampled_from(bad))
    else:
        wrong = array.astype(np.complex64)
    changed = msgspec.structs.replace(holder, **{name: wrong})
    if holder is not good:
        field = "pulls" if isinstance(holder, Pull) else "soft_targets"
        terms = tuple(changed if each is holder else each for each in getattr(good, field))
        changed = msgspec.structs.replace(good, **{field: terms})
    with pytest.raises(WrongSupervisionError, match=r"^supervision of p4 \(prompt 4\) is wrong: "):
        check(changed)


@st.composite
def version_spans(draw: Callable[..., Any], tokens: int, steps: st.SearchStrategy[int]) -> tuple[VersionSpan, ...]:
    ends = sorted({*draw(st.sets(st.integers(1, tokens), max_size=4)), tokens})
    return tuple(
        VersionSpan(start, end, WeightVersion(LIVE.lineage, draw(steps)))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )


def with_spans(each: Supervision, spans: tuple[VersionSpan, ...]) -> Supervision:
    oldest = min((span.version for span in spans), default=None)
    return msgspec.structs.replace(each, version=oldest, version_spans=spans)


def sampled(good: Supervision, data: Any, max_staleness: int) -> Supervision:
    steps = st.integers(LIVE.step - max_staleness, LIVE.step)
    return with_spans(good, data.draw(version_spans(len(good.response_ids), steps)))


def by_version_alone(each: Supervision) -> list[Supervision]:
    """Return it as one that has a version and no spans, if one span is all that it has."""
    return [msgspec.structs.replace(each, version_spans=())] if len(each.version_spans) == 1 else []


@given(trajectories(), st.integers(0, 3), st.data())
def test_each_token_has_a_version_within_the_staleness(good: Supervision, max_staleness: int, data: Any) -> None:
    each = sampled(good, data, max_staleness)
    for same in (each, *by_version_alone(each)):
        check(same, max_staleness=max_staleness)
    number = data.draw(st.integers(0, len(each.version_spans) - 1))
    wrong, fault = data.draw(
        st.sampled_from(
            [
                (WeightVersion(LIVE.lineage, LIVE.step + 1), "newer than the live ones"),
                (WeightVersion(LIVE.lineage, LIVE.step - max_staleness - 1), "too old"),
                (WeightVersion(LIVE.lineage + 1, LIVE.step), "of another lineage"),
            ]
        )
    )
    span = each.version_spans[number]
    spans = list(each.version_spans)
    spans[number] = msgspec.structs.replace(span, version=wrong)
    expected = rf"tokens \[{span.start}, {span.end}\) were sampled by weights {wrong}, which are {fault}: 0\.3 are live"
    changed = with_spans(good, tuple(spans))
    for same in (changed, *by_version_alone(changed)):
        with pytest.raises(WrongSupervisionError, match=expected):
            check(same, max_staleness=max_staleness)


@given(trajectories(), st.data())
def test_spans_cover_the_response_in_order(good: Supervision, data: Any) -> None:
    spans = sampled(good, data, 3).version_spans
    number = data.draw(st.integers(0, len(spans) - 1))
    by = data.draw(st.sampled_from([-1, 1]))
    edge = data.draw(st.sampled_from(["start", "end"]))
    moved = msgspec.structs.replace(spans[number], **{edge: getattr(spans[number], edge) + by})
    wrong = data.draw(
        st.sampled_from(
            [
                (*spans[:number], moved, *spans[number + 1 :]),  # a gap, an overlap, or past either end
                (*spans[:number], spans[number], *spans[number:]),
                spans[:-1] or (moved,),
                *([spans[::-1]] if len(spans) > 1 else []),
            ]
        )
    )
    with pytest.raises(WrongSupervisionError, match=r"version_spans \[.*\] do not cover the \d+ response tokens"):
        check(with_spans(good, wrong), max_staleness=3)


@given(trajectories(), st.data())
def test_the_version_is_the_oldest_of_the_spans(good: Supervision, data: Any) -> None:
    each = sampled(good, data, 2)
    other = data.draw(st.sampled_from([None, *(WeightVersion(0, step) for step in range(5))]))
    if other == each.version:
        return
    with pytest.raises(WrongSupervisionError, match=f"version is {other}, but the oldest of version_spans is"):
        check(msgspec.structs.replace(each, version=other), max_staleness=5)


@given(trajectories(), st.data())
def test_tokens_that_no_student_sampled_have_no_policy_term(good: Supervision, data: Any) -> None:
    spans = list(sampled(good, data, 2).version_spans)
    number = data.draw(st.integers(0, len(spans) - 1))
    spans[number] = foreign = msgspec.structs.replace(spans[number], version=None)
    oldest = min((span.version for span in spans if span.version is not None), default=None)
    mask = np.ones(len(good.response_ids), np.bool_)
    mask[foreign.start : foreign.end] = False
    given_part = np.zeros(len(mask), np.float32)
    each = msgspec.structs.replace(
        good, version=oldest, version_spans=tuple(spans), policy_mask=mask, advantages=given_part
    )
    check(each, max_staleness=2)
    check(msgspec.structs.replace(each, pulls=(), advantages=None, policy_mask=None), max_staleness=2)
    wrong = mask.copy()
    wrong[data.draw(st.integers(foreign.start, foreign.end - 1))] = True
    for policy_mask in (wrong, None):
        with pytest.raises(
            WrongSupervisionError,
            match=rf"tokens \[{foreign.start}, {foreign.end}\) have a policy term, and no student sampled them: "
            "set policy_mask to false there",
        ):
            check(msgspec.structs.replace(each, policy_mask=policy_mask), max_staleness=2)
    # A response of which nobody says who wrote it may be learnt from as if the student had.
    check(msgspec.structs.replace(good, version=None, version_spans=()))


@given(trajectories(), st.data())
def test_spans_survive_the_wire(good: Supervision, data: Any) -> None:
    each = sampled(good, data, 3)
    decoded = wire.decode(wire.encode(each), Supervision)
    assert (decoded.version, decoded.version_spans) == (each.version, each.version_spans)


def one_row(divergence: Divergence | None, ids: list[int], cells: list[float], *, less: Any = None) -> SoftTargets:
    """One cell more than ids is the tail's."""
    values, k = np.array([cells], np.float32), len(ids)
    return SoftTargets(
        positions=np.zeros(1, np.int32),
        token_ids=np.array([ids], np.int32),
        probabilities=values[:, :k],
        weights=np.ones(1, np.float32),
        tails=values[:, k] if len(cells) > k else None,
        divergence=divergence,
        baselines=None if less is None else np.array(less, np.float32),
    )


def pulled(**changes: Any) -> Pull:
    return msgspec.structs.replace(Pull(logprobs=np.zeros(3, np.float32)), **changes)


def read_from(first: int, version: WeightVersion | None = None, **taught: Any) -> dict[str, Any]:
    """A response whose tokens from the first on were only read."""
    spans = VersionSpan(0, first, None), VersionSpan(first, 3, version, is_read=True)
    return {"version_spans": spans, **taught}


FORWARD = Divergence(forward=1.0)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (pulled(logprobs=np.full(3, 0.3, np.float32)), "pulls.logprobs hold what is no log-probability"),
        (pulled(weights=np.full(3, np.nan, np.float32)), "pulls.weights hold what is no finite number"),
        (pulled(clip=(1.0, -1.0)), "pulls.clip is from 1 to -1"),
        (pulled(chunks=np.zeros(2, np.int32)), r"pulls.chunks have shape \(2,\) instead of \(3,\)"),
        (pulled(chunks=np.zeros(3, np.float32)), "pulls.chunks are float32"),
        (pulled(chunks=np.array([0, 1, 0], np.int32)), "pulls.chunks are not ascending"),
        (pulled(chunks=np.array([0, -1, 0], np.int32)), "pulls.chunks are not ascending"),
        (
            one_row(Divergence(reverse=1.0), [1, 2], [0.5, 0.5]),
            "is infinite, since the student has other tokens too: give tails, or is_conditional=True",
        ),
        (one_row(Divergence(reverse=1.0), [1, 2], [0.5, 0.0, 0.5]), "a reverse KL to a probability of 0 is infinite"),
        (
            one_row(Divergence(forward=1.0, is_conditional=True), [1], [0.5, 0.5]),
            "is conditional, so the targets must have no tails",
        ),
        (one_row(FORWARD, [1, 2], [0.5, 0.3, 0.1]), "probabilities and tails do not sum to 1"),
        (one_row(FORWARD, [2, 2], [0.5, 0.3, 0.2]), "name a token twice in a row"),
        (one_row(Divergence(), [1], [1.0]), "has no direction"),
        (one_row(Divergence(forward=1.0, reverse=-1.0), [1], [1.0]), "negative direction"),
        (
            one_row(Divergence(forward=1.0, forward_skew=1.0), [1], [1.0]),
            r"forward_skew is 1, which is not in \[0, 1\)",
        ),
        (one_row(Divergence(forward=1.0, clip=0.0), [1], [1.0]), "clip is 0"),
        (
            one_row(Divergence(forward=1.0, temperature=2.0), [1], [1.0]),
            "temperature is 2, and only over the whole vocabulary is it exact",
        ),
        *(
            (one_row(None, [1, 2], [0.5, 0.5], less=less), f"soft_targets.baselines {complaint}")
            for less, complaint in (
                ([[0.5]], r"have shape \(1, 1\) instead of \(1, 2\)"),
                ([0.5, 0.5], r"have shape \(2,\) instead of \(1, 2\)"),
                ([[0.5, -0.1]], "hold one below 0"),
                ([[0.6, 0.5]], "sum to more than 1"),
                ([[0.5, np.nan]], "hold what is no finite number"),
            )
        ),
        (
            one_row(None, [1, 2], [0.5, 0.3, 0.2], less=[[0.1, 0.1]]),
            "soft_targets.baselines stand beside tails, and only a cross-entropy without tails has them",
        ),
        (
            one_row(FORWARD, [1, 2], [0.5, 0.5], less=[[0, 0]]),
            "soft_targets.baselines stand beside divergence, and only a cross-entropy",
        ),
        (read_from(1, soft_targets=(written(np.array([1, 2, 3], np.int32)),)), r"soft_targets teach token 1, "),
        (read_from(1, entropy_bonus=np.array([1, 0, 1], np.float32)), "entropy_bonus teach token 2, which was"),
        (read_from(0), "all of its tokens were only read, so there is nothing to teach"),
        (read_from(2, WeightVersion(0, 0)), r"tokens \[2, 3\) were only read, and yet weights 0.0 sampled them"),
    ],
)
def test_a_term_that_has_no_meaning_is_refused_in_one_line(supervision: Any, wrong: Any, complaint: str) -> None:
    each = supervision(1, 3, pulls=(), reference_logprobs=None)
    each = msgspec.structs.replace(
        each,
        prompt_ids=each.prompt_ids % VOCAB,
        response_ids=each.response_ids % VOCAB,
        behavior_logprobs=np.minimum(each.behavior_logprobs, 0),
        version=None,
    )
    check(each)
    field = {Pull: "pulls", SoftTargets: "soft_targets"}.get(type(wrong))
    with pytest.raises(WrongSupervisionError, match=complaint):
        check(msgspec.structs.replace(each, **({field: (wrong,)} if field else wrong)))


def test_supervision_of_the_version_before_is_refused_and_not_read_without_its_teacher() -> None:
    old = dict.fromkeys(("prompt_ids", "response_ids", "behavior_logprobs", "version"))
    old |= {"prompt_ordinal": 0, "problem_id": "p", "teacher_logprobs": None}
    array = ["<f4", [1], b"\0\0\0\0"]
    old |= dict.fromkeys(("prompt_ids", "response_ids", "behavior_logprobs", "teacher_logprobs"), array)
    with pytest.raises(msgspec.ValidationError, match="unknown field `teacher_logprobs`"):
        wire.decode(msgspec.msgpack.encode(old), Supervision)


@pytest.mark.parametrize(
    ("version", "max_staleness", "lag", "said"),
    [
        (None, 0, 0, None),  # of a teacher that does not change
        (LIVE, 0, 0, None),
        (WeightVersion(0, 2), 0, 0, "which are too old: 0.3 are live, and it may be 0 steps behind"),
        (WeightVersion(0, 1), 1, 1, None),
        (WeightVersion(0, 0), 1, 1, "which are too old: 0.3 are live, and it may be 2 steps behind"),
        (WeightVersion(0, 4), 2, 2, "which are newer than the live ones"),
        (WeightVersion(1, 3), 2, 2, "which are of another lineage"),
    ],
)
@pytest.mark.parametrize("term", ["pull", "targets"])
def test_the_age_of_a_teacher_that_follows_is_bounded(
    term: str, version: WeightVersion | None, max_staleness: int, lag: int, said: str | None
) -> None:
    ids, logprobs = np.array([4, 5], np.int32), np.array([-1.0, -2.0], np.float32)
    scores = token_scores(logprobs, topk_ids=np.array([[4, 7], [5, 8]]), topk_logprobs=np.log([0.4, 0.3]))
    scores = msgspec.structs.replace(scores, version=version)
    terms: dict[str, Any] = {"pulls": (pull(scores),)}
    if term == "targets":
        terms = {"soft_targets": (compared(scores, forward_kl()),)}
    each = Supervision(
        prompt_ordinal=4,
        problem_id="p4",
        prompt_ids=ids,
        response_ids=ids,
        behavior_logprobs=logprobs,
        version=LIVE,
        **terms,
    )
    assert teacher_versions(each) == ({version} - {None})
    feed: dict[str, Any] = {"live": LIVE, "max_staleness": max_staleness, "teacher_lag": lag}
    if said is None:
        check_feed([each], vocab_size=VOCAB, **feed)
    else:
        with pytest.raises(WrongSupervisionError, match=f"the teacher that follows the student .*{said}"):
            check_feed([each], vocab_size=VOCAB, **feed)
