"""Batches that refill: full, in order, each prompt once, bounded; with deaths and a second word too.

That they outlive crashes is in `test_crashing_runs.py`.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import recipe

from spot_async.base import wire
from spot_async.base.tasks import leaves
from spot_async.errors import PermanentError, SpotError
from spot_async.loop.admission import PromptState
from spot_async.policies.opd import OpdPolicy
from spot_async.run_directory.ledger import Ledger, batch_faults
from spot_async.testing.services import Latency, SimulatedStudent, SimulatedVerifier
from spot_async.testing.simulation import make_policy, make_run, policy_context, simulated_prompts
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.trainer.feed_check import sampled_spans
from spot_async.types import Verdict

pytestmark = pytest.mark.usefixtures("quiet")

BATCH, ITERATIONS = 4, 10
ENOUGH = 100  # batches


def dapo() -> Any:
    return make_policy(recipe("dapo"), samples=4)


def made(policy: Any = None, **changes: Any) -> Any:
    sizes = {"batch_size": BATCH, "iterations": ITERATIONS, "refill_at_most": ENOUGH, "max_dead_share": 1.0}
    return make_run(policy or dapo(), prompts=simulated_prompts(1000, problems=1000), **{**sizes, **changes})


class Refuses(SimulatedStudent):
    """A student that answers some prompts never, by the number of their tokens."""

    def __init__(self, every: int) -> None:
        super().__init__(Latency(spread=0.8))
        self.every = every

    async def generate(self, prompt_ids: Any, *given: Any, **more: Any) -> Any:
        response = await super().generate(prompt_ids, *given, **more)
        if self.every and len(prompt_ids) % self.every == 0:
            raise PermanentError("400: no")
        return response


def trained_prompts(run: Any) -> list[list[int]]:
    """The ordinals that each batch was trained on."""
    return [list(dict.fromkeys(each.prompt_ordinal for each in batch)) for batch in run.batches]


@settings(max_examples=16)
@given(
    seed=st.integers(0, 1 << 30),
    max_staleness=st.integers(0, 3),
    share=st.sampled_from([0.05, 0.4]),
    every=st.sampled_from([0, 3, 7]),
)
def test_batches_are_full_in_order_and_fresh_and_no_prompt_is_lost(
    seed: int, max_staleness: int, share: float, every: int
) -> None:
    iterations = 6  # twice as many as a token may be behind
    run = made(
        iterations=iterations,
        seed=seed,
        max_staleness=max_staleness,
        student=Refuses(every),
        verifier=SimulatedVerifier(share_correct=share),
    ).finish()
    taught, book = trained_prompts(run), run.orchestrator.book
    assert [len(ordinals) for ordinals in taught] == [BATCH] * iterations
    flat = [ordinal for ordinals in taught for ordinal in ordinals]
    assert flat == sorted(set(flat)) == book.ordinals(PromptState.TRAINED)
    others = {*book.ordinals(PromptState.IN_VAIN), *book.ordinals(PromptState.DEAD)}
    assert sorted({*flat, *others}) == list(range(len(flat) + len(others))), "each prompt has one end"
    assert bool(book.count(PromptState.DEAD)) == bool(every)
    assert (book.held_prompts, book.held_bytes) == (0, 0)
    lags = {
        iteration - span.version.step
        for iteration, batch in enumerate(run.batches)
        for each in batch
        for span in sampled_spans(each)
    }
    assert min(lags) >= 0
    assert max(lags) <= max_staleness
    for ordinals, result in zip(taught, run.journal.results, strict=True):  # those in vain are told of with their batch
        told = [int(sample.record["problem_id"][1:]) for sample in result.samples]
        assert told == sorted(told)
        assert ordinals[-1] == told[-1]
        assert set(ordinals) <= set(told)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_where_each_prompt_teaches_a_run_that_refills_trains_the_same_to_the_byte(max_staleness: int) -> None:
    runs = [
        made(make_policy(OpdPolicy), max_staleness=max_staleness, refill_at_most=most).finish() for most in (None, 1)
    ]
    assert wire.encode(runs[0].batches) == wire.encode(runs[1].batches)


def test_seeds_follow_the_ordinal_whoever_is_refilled_for() -> None:
    def first(most: int | None) -> list[str]:
        run = made(iterations=1, refill_at_most=most, verifier=SimulatedVerifier(share_correct=0.1)).finish()
        return [each.record["response"] for each in run.samples]

    plain, refilled = first(None), first(ENOUGH)
    assert len(plain) < len(refilled)
    assert plain == refilled[: len(plain)]


def test_a_row_of_prompts_that_teach_nothing_ends_the_run_with_its_line() -> None:
    run = made(verifier=SimulatedVerifier(share_correct=0.0), refill_at_most=3)
    with pytest.raises(ExceptionGroup) as stopped:
        run.finish()
    (error,) = leaves(stopped.value)
    assert isinstance(error, SpotError)
    said = re.fullmatch(
        r"(\d+) prompts in a row taught nothing \(policy Dapo\), more than training\.refill_at_most=3 batches: "
        r"raise it, or choose problems that are sometimes solved",
        str(error),
    )
    assert said is not None
    assert 3 * BATCH < int(said[1]) <= 4 * BATCH
    assert not run.batches


class SolvesFirst(SimulatedVerifier):
    """Of thirteen problems in a row only the first is ever solved."""

    async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Any:
        verdict = await super().verify(problem, response_text, deadline=deadline)
        return Verdict.WRONG if int(problem.id[1:]) % 13 else verdict


class SlowAtFirst(SimulatedStudent):
    """It answers the first prompt after a minute."""

    async def generate(self, prompt_ids: Any, *given: Any, **more: Any) -> Any:
        await asyncio.sleep(60.0 if len(prompt_ids) == 5 else 0.0)
        return await super().generate(prompt_ids, *given, **more)


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_rows_as_long_as_the_bound_go_on_and_none_runs_further_ahead_of_a_slow_prompt(max_staleness: int) -> None:
    student, policy = SlowAtFirst(), make_policy(recipe("dapo"), samples=16)
    sizes = {"refill_at_most": 3, "max_staleness": max_staleness, "iterations": 2}
    run = made(policy, student=student, verifier=SolvesFirst(), **sizes)
    admitted = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(50.0, lambda: admitted.append(sum(run.orchestrator.book.counts.values())))
        await run.orchestrator.run()

    run_on_virtual_time(watched())
    assert admitted == [(max_staleness + 1 + 3) * BATCH]
    assert trained_prompts(run) == [[0, 13, 26, 39], [52, 65, 78, 91]]


class SecondThoughts(recipe("dapo")):  # type: ignore[misc]
    """DAPO that leaves all of every third prompt out when it sees the batch."""

    def revise(self, batch: Any) -> Any:
        return [
            msgspec.structs.replace(each, supervision=None) if each.supervision.prompt_ordinal % 3 == 0 else each
            for each in batch.samples
        ]


def test_what_revise_leaves_out_is_not_refilled_and_the_ledger_tells_it_from_what_was(tmp_path: Any) -> None:
    policy = SecondThoughts(SecondThoughts.Settings(kind="", samples=4), policy_context())
    with closing(Ledger.open(tmp_path)) as ledger:
        run = made(policy, ledger=ledger, max_staleness=1).finish()
        rows = list(ledger.prompts())
    book = run.orchestrator.book
    assert book.count(PromptState.LEFT_OUT) > 5
    assert book.count(PromptState.IN_VAIN) > 5
    assert book.count(PromptState.TRAINED) + book.count(PromptState.LEFT_OUT) == BATCH * ITERATIONS
    in_batches = {"batched": PromptState.TRAINED, "left_out": PromptState.LEFT_OUT, "in_vain": PromptState.IN_VAIN}
    for state, of_book in in_batches.items():
        assert [row.ordinal for row in rows if row.state == state] == book.ordinals(of_book)
    assert not list(batch_faults(rows, ITERATIONS, BATCH))
    lost = next(row for row in rows if row.state == "left_out")
    fault = f"batch {lost.batch + 1} has {BATCH - 1} prompts in place of {BATCH}"
    assert fault in batch_faults([row for row in rows if row is not lost], ITERATIONS, BATCH)
