"""Room in the supervision queue: what is reserved for a prompt, what it holds once finished, and when one may enter."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from spot_async.loop.sample_bytes import BYTES_PER_TEXT_TOKEN, held_bytes, worst_case_bytes
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.grpo import GrpoPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.testing.simulation import (
    MAX_RESPONSE_TOKENS,
    make_policy,
    policy_context,
    simulated_run,
    simulated_vocabulary,
)
from spot_async.types import Sample


def spot(positions, candidates, probes=1):
    return make_policy(
        SpotPolicy, positions=positions, probe_top_k=candidates, score_top_k=max(16, candidates), probes=probes
    )


def by_prompt(run):
    """The samples of each prompt."""
    found = {}
    for sample in run.samples:
        found.setdefault(sample.supervision.prompt_ordinal, []).append(sample)
    return list(found.values())


@pytest.mark.parametrize("make", [lambda: spot(4, 8, 2), lambda: make_policy(GrpoPolicy)])
def test_what_samples_hold_is_what_python_allocated_for_them(make):
    policy = make()
    simulated_run(policy, iterations=1, batch_size=4)  # what is kept for all runs is there now
    gc.collect()
    tracemalloc.start()
    try:
        prompts = by_prompt(simulated_run(policy, iterations=1, batch_size=4))
        counted = sum(map(held_bytes, prompts))
        gc.collect()
        with_them = tracemalloc.get_traced_memory()[0]
        del prompts
        gc.collect()
        without = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    allocated = with_them - without
    assert counted == pytest.approx(allocated, rel=0.1), (counted, allocated)


def test_a_view_holds_all_that_it_is_a_view_of_and_what_is_shared_is_held_once():
    large = np.zeros((1000, 20), np.float32)
    one = [Sample(supervision=None, metrics={}, record={"column": large[:, 0]})]
    both = [Sample(supervision=None, metrics={}, record={"column": large[:, 0], "row": large[0], "again": large})]
    assert large.nbytes < held_bytes(one) < held_bytes(both) < 1.1 * large.nbytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_policy(KdPolicy),
        lambda: make_policy(OpdPolicy),
        lambda: make_policy(EopdPolicy, tau_nats=0.0),
        lambda: make_policy(GrpoPolicy, policy_context(reference_kl=True)),
        lambda: make_policy(OpdPolicy, policy_context(teachers=("a", "b", "c"))),
        lambda: make_policy(EopdPolicy, policy_context(teachers=("a", "b", "c")), tau_nats=0.0),
        lambda: spot(2, 4),
        lambda: spot(50, 64),
        lambda: spot(8, 16, 4),
    ],
    ids=[
        "kd",
        "opd",
        "eopd",
        "grpo",
        "opd of three",
        "eopd of three",
        "spot",
        "spot with 50 x 64 candidates",
        "spot with 4 probes each",
    ],
)
def test_what_a_finished_prompt_holds_is_within_what_was_reserved(make):
    """Texts are as long as they are reserved for, in characters of one byte."""
    policy = make()
    text = "x" * (BYTES_PER_TEXT_TOKEN - 1)  # and a blank between two tokens
    run = simulated_run(policy, iterations=1, batch_size=1, vocabulary=simulated_vocabulary(text=lambda _: text))
    for samples in by_prompt(run):
        held = held_bytes(samples)
        longest = max(len(sample.supervision.response_ids) for sample in samples)
        assert held < worst_case_bytes(len(samples[0].supervision.prompt_ids), longest, policy.needs)
        if longest == MAX_RESPONSE_TOKENS:  # nor is far too much reserved for one that is as long as it may be
            assert held > 0.1 * worst_case_bytes(0, MAX_RESPONSE_TOKENS, policy.needs)


def test_prompts_that_hold_less_than_reserved_let_more_in_and_larger_ones_never_hold_up_their_own_batch():
    """There is room for one batch in the worst case. Texts of 20 characters a token, of four bytes each, exceed it."""
    policy, batch_size = spot(2, 4), 4
    reserved = worst_case_bytes(36, MAX_RESPONSE_TOKENS, policy.needs)

    def largest_lag(text):
        run = simulated_run(
            policy,
            iterations=4,
            batch_size=batch_size,
            capacity_prompts=64,
            capacity_bytes=batch_size * reserved,
            max_staleness=3,
            vocabulary=simulated_vocabulary(text=lambda _: text),
        )
        sizes = [held_bytes(samples) for samples in by_prompt(run)]
        lag = max(step - sample.version.step for step, batch in enumerate(run.batches) for sample in batch)
        return np.mean(sizes) / reserved, lag

    share, lag = largest_lag("x")
    assert share < 0.5
    assert lag > 0
    share, lag = largest_lag("\N{GRINNING FACE}" * 20)
    assert share > 1
    assert lag == 0
