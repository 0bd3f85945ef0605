"""What each rank trains on, and at which rate: mini-batches, shares, micro-batches, the schedule."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import MakeSample
from transformers import get_cosine_schedule_with_warmup

from spot_async.config import TrainingConfig
from spot_async.trainer.batching import Layout, collate, input_length, mini_batches, update_shares
from spot_async.trainer.settings import learning_rate, progress_words, schedule_words, seam_words
from spot_async.types import VersionSpan, WeightVersion


def test_tokens_that_no_student_sampled_are_of_no_weights(supervision: MakeSample) -> None:
    spans = (VersionSpan(0, 1, WeightVersion(0, 4)), VersionSpan(1, 3, None), VersionSpan(3, 4, WeightVersion(0, 5)))
    sample = msgspec.structs.replace(supervision(0, 4), version=WeightVersion(0, 4), version_spans=spans)
    assert collate([sample], is_packed=False).sampled_at.tolist() == [[4, -1, -1, 5]]


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    per_prompt=st.integers(1, 3),
    size=st.integers(1, 12),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 400),
    is_packed=st.booleans(),
)
def test_every_sample_is_trained_exactly_once(
    supervision: MakeSample, lengths: list[int], per_prompt: int, size: int, ranks: int, budget: int, is_packed: bool
) -> None:
    layout = Layout(is_packed, budget, linear_work=100)
    batch = [supervision(i // per_prompt, n) for i, n in enumerate(lengths)]
    prompts = -(-len(lengths) // per_prompt)
    updates = mini_batches(batch, size, seed=1)

    assert len(updates) == -(-prompts // size)
    ordinals = [{sample.prompt_ordinal for sample in update} for update in updates]
    assert sum(map(len, ordinals)) == len(set.union(*ordinals)) == prompts  # a prompt's trajectories stay together
    assert max(map(len, ordinals)) <= size
    assert max(map(len, ordinals)) - min(map(len, ordinals)) <= 1

    trained = []
    for update in updates:
        inputs = [input_length(sample) for sample in update]
        shares = layout.shares(inputs, ranks)
        if is_packed:  # no rank has more than one sample's work over another
            work = [sum(layout.work(inputs[place]) for place in share) for share in shares]
            assert max(work) - min(work) <= max(map(layout.work, inputs))
        else:
            assert max(map(len, shares)) - min(map(len, shares)) <= 2
        sent = update_shares(update, ranks, layout)
        assert all(sorted(share.samples) == sorted(itertools.chain(*share.passes)) for share in sent)
        groups = [[[share.samples[place] for place in each] for each in share.passes] for share in sent]
        assert len(set(map(len, groups))) == 1  # ranks wait for each other in every pass
        assert any(all(own) for own in groups)
        for group in itertools.chain(*groups):
            tokens = (
                sum(map(input_length, group)) if is_packed else len(group) * max(map(input_length, group), default=0)
            )
            assert len(group) <= 1 or tokens <= budget
            trained += group
    assert sorted(map(id, trained)) == sorted(map(id, batch))


def test_packed_samples_are_spread_by_tokens_and_their_squares_and_leave_little_room() -> None:
    lengths = [4 + i * i % 60 for i in range(40)]
    layout = Layout(is_packed=True, token_budget=100, linear_work=30)
    shares = layout.shares(lengths, 4)
    work = [sum(layout.work(lengths[place]) for place in share) for share in shares]
    assert max(work) < 1.02 * min(work)
    passes = layout.passes(layout.shares(lengths, 1)[0], lengths)
    assert sum(lengths) > 90 * len(passes)


def test_mini_batch_order_depends_on_the_seed_and_not_on_arrival(supervision: MakeSample) -> None:
    batch = [supervision(i, 2) for i in range(32)]
    order = [[s.prompt_ordinal for s in update] for update in mini_batches(batch, 8, seed=5)]
    arrived_backwards = [supervision(i, 2) for i in reversed(range(32))]
    assert [[s.prompt_ordinal for s in update] for update in mini_batches(arrived_backwards, 8, seed=5)] == order
    assert [[s.prompt_ordinal for s in update] for update in mini_batches(batch, 8, seed=6)] != order


def test_learning_rate_is_the_cosine_to_zero_that_the_paper_used() -> None:
    training = TrainingConfig(iterations=174, learning_rate=3e-6)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-6)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=174)
    for iteration in range(175):
        assert learning_rate(training, iteration, 174) == pytest.approx(schedule.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        schedule.step()


def test_a_run_that_is_to_go_on_has_the_rates_of_the_whole_from_the_beginning() -> None:
    whole = TrainingConfig(iterations=12, warmup_iterations=2)
    first = TrainingConfig(iterations=6, warmup_iterations=2, schedule_iterations=12)
    rates = [learning_rate(whole, iteration, 12) for iteration in range(12)]
    assert [learning_rate(first, iteration, 6) for iteration in range(6)] == rates[:6]
    further = TrainingConfig(iterations=12, warmup_iterations=2, schedule_iterations=12)
    assert seam_words(first, 6, further, 12, 6) == ""
    assert "of which 6 are trained" in schedule_words(first, 6)


def test_a_learning_rate_that_jumps_where_a_run_goes_on_is_said_with_both_values() -> None:
    six, twelve = (TrainingConfig(iterations=n, learning_rate=3e-4) for n in (6, 12))
    said = seam_words(six, 6, twelve, 12, 6)
    assert "2e-05 in iteration 6 and 0.00015 in iteration 7" in said
    assert "ended after iteration 6 and now ends after 12 (training.schedule_iterations)" in said
    assert "0.00026 in iteration 4 and 0.00015 in iteration 5" in seam_words(twelve, 12, six, 8, 4)
    assert seam_words(twelve, 12, twelve, 12, 6) == ""
    steady = [TrainingConfig(iterations=n, schedule="constant") for n in (6, 12)]
    assert seam_words(steady[0], 6, steady[1], 12, 6) == ""
    warming = [TrainingConfig(iterations=n, warmup_iterations=4) for n in (6, 12)]
    assert seam_words(warming[0], 6, warming[1], 12, 3) == ""


def test_that_progress_bends_is_said_where_a_policy_may_go_by_it() -> None:
    assert progress_words(6, 12, 3) == "progress after iteration 3: 0.25 in place of 0.5"
    assert progress_words(6, 6, 3) == ""


def test_warm_up_rises_to_the_full_rate_and_constant_keeps_it() -> None:
    training = TrainingConfig(iterations=10, learning_rate=1.0, warmup_iterations=3, schedule="constant")
    assert [learning_rate(training, i, 10) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
