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
from spot_async.trainer.feed_check import WrongSupervisionError, check_feed
from spot_async.types import SoftTargets, Supervision, VersionSpan, WeightVersion

VOCAB = 20
LIVE = WeightVersion(0, 3)
LOGPROBS = ("behavior_logprobs", "teacher_logprobs", "reference_logprobs")


def check(each: Supervision, *, max_staleness: int = 0) -> None:
    check_feed([each], vocab_size=VOCAB, live=LIVE, max_staleness=max_staleness)


@st.composite
def trajectories(draw: Callable[..., Any]) -> Supervision:
    tokens, rows, k = draw(st.integers(1, 12)), draw(st.integers(0, 4)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    by_teacher = draw(st.booleans())

    def logprobs() -> np.ndarray:
        return -random.exponential(3.0, tokens).astype(np.float32)

    targets = SoftTargets(
        positions=random.integers(0, tokens, rows).astype(np.int32),
        token_ids=random.integers(0, VOCAB, (rows, k)).astype(np.int32),  # KD names a token twice where both losses do
        probabilities=random.dirichlet(np.ones(k), rows).astype(np.float32).reshape(rows, k),
        weights=random.uniform(0, 1, rows).astype(np.float32),
        offsets=random.normal(size=rows).astype(np.float32) if draw(st.booleans()) else None,
    )
    return Supervision(
        prompt_ordinal=4,
        problem_id="p4",
        prompt_ids=random.integers(0, VOCAB, draw(st.integers(1, 5))).astype(np.int32),
        response_ids=random.integers(0, VOCAB, tokens).astype(np.int32),
        behavior_logprobs=logprobs(),
        version=draw(st.sampled_from([None, LIVE])),
        teacher_logprobs=logprobs() if by_teacher else None,
        advantages=None if by_teacher else random.normal(size=tokens).astype(np.float32),
        reference_logprobs=logprobs() if draw(st.booleans()) else None,
        policy_mask=random.random(tokens) < 0.5 if draw(st.booleans()) else None,
        soft_targets=targets if draw(st.booleans()) else None,
    )


@given(trajectories(), st.data())
def test_one_wrong_number_in_any_array_is_found(good: Supervision, data: Any) -> None:
    check(good)
    holder = data.draw(st.sampled_from([good, good.soft_targets] if good.soft_targets is not None else [good]))
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
        bad += [0.1, -1e21] if name in LOGPROBS else [-0.01, 1.2] if name == "probabilities" else []
        bad += [-0.5] if name == "weights" else []
        wrong.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(st.sampled_from(bad))
    else:
        wrong = array.astype(np.complex64)
    changed = msgspec.structs.replace(holder, **{name: wrong})
    if holder is not good:
        changed = msgspec.structs.replace(good, soft_targets=changed)
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


@given(trajectories(), st.integers(0, 3), st.data())
def test_each_token_has_a_version_within_the_staleness(good: Supervision, max_staleness: int, data: Any) -> None:
    each = sampled(good, data, max_staleness)
    check(each, max_staleness=max_staleness)
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
    with pytest.raises(WrongSupervisionError, match=expected):
        check(with_spans(good, tuple(spans)), max_staleness=max_staleness)


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
    each = msgspec.structs.replace(good, version=oldest, version_spans=tuple(spans), policy_mask=mask)
    check(each, max_staleness=2)
    check(msgspec.structs.replace(each, teacher_logprobs=None, advantages=None, policy_mask=None), max_staleness=2)
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


@pytest.mark.parametrize(
    ("version", "max_staleness", "is_right"),
    [
        (WeightVersion(0, 3), 0, True),
        (None, 0, True),
        (WeightVersion(0, 2), 0, False),
        (WeightVersion(0, 4), 5, False),
        (WeightVersion(1, 3), 5, False),
        (WeightVersion(0, 2), 1, True),
        (WeightVersion(0, 1), 1, False),
    ],
)
def test_only_weights_within_the_staleness_may_have_sampled(
    supervision: Any, version: WeightVersion | None, max_staleness: int, is_right: bool
) -> None:
    each = supervision(1, 3, teacher_logprobs=None)
    sample = msgspec.structs.replace(
        each,
        prompt_ids=each.prompt_ids % VOCAB,
        response_ids=each.response_ids % VOCAB,
        behavior_logprobs=np.minimum(each.behavior_logprobs, 0),
        reference_logprobs=None,
        version=version,
    )
    if is_right:
        check(sample, max_staleness=max_staleness)
        return
    with pytest.raises(WrongSupervisionError, match=r"0\.3 are live"):
        check(sample, max_staleness=max_staleness)
