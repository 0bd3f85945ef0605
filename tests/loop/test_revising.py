"""A policy's second word in whole runs: what it is told, and what is trained of what it gives. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from spot_async.base import wire
from spot_async.loop.admission import PromptState
from spot_async.policies.opd import OpdPolicy
from spot_async.telemetry.run_log import iteration_metrics
from spot_async.testing.services import SimulatedTrainer
from spot_async.testing.simulation import make_run, policy_context, simulated_run

pytestmark = pytest.mark.usefixtures("quiet")


class Revises(OpdPolicy):
    def __init__(self, revision: Callable[[Any], Any] = lambda batch: batch.samples) -> None:
        super().__init__(OpdPolicy.Settings(), policy_context())
        self._revision = revision
        self.told: list[Any] = []

    def revise(self, batch: Any) -> Any:
        self.told.append(batch)
        return self._revision(batch)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_one_that_changes_nothing_trains_the_same_to_the_byte(max_staleness: int) -> None:
    plain = simulated_run(OpdPolicy(OpdPolicy.Settings(), policy_context()), max_staleness=max_staleness)
    revised = simulated_run(policy := Revises(), max_staleness=max_staleness)
    assert wire.encode(revised.batches) == wire.encode(plain.batches)
    iterations = len(plain.batches)
    assert [(each.iteration, each.progress) for each in policy.told] == [(i, i / iterations) for i in range(iterations)]


def test_it_is_told_of_each_sample_in_the_order_of_admission_and_what_it_leaves_out_is_not_trained() -> None:
    def every_third_is_left_out(batch: Any) -> list[Any]:
        return [
            msgspec.structs.replace(each, supervision=None if number % 3 == 0 else each.supervision)
            for number, each in enumerate(batch.samples)
        ]

    run = simulated_run(policy := Revises(every_third_is_left_out), max_staleness=1)
    for batch, trained in zip(policy.told, run.batches, strict=True):
        ordinals = [each.supervision.prompt_ordinal for each in batch.samples]
        assert ordinals == sorted(ordinals)
        for sample, live in zip(batch.samples, batch.live, strict=True):
            assert live.logprobs.shape == live.entropy.shape == sample.supervision.response_ids.shape
        assert [each.prompt_ordinal for each in trained] == [o for n, o in enumerate(ordinals) if n % 3]
    left_out = sum(len(batch.samples) - len(trained) for batch, trained in zip(policy.told, run.batches, strict=True))
    assert run.orchestrator.book.count(PromptState.LEFT_OUT) == left_out
    assert run.orchestrator.book.count(PromptState.TRAINED) == sum(map(len, run.batches))


def test_nothing_is_asked_of_a_batch_without_supervision() -> None:
    class LeavesAllOut(Revises):
        async def supervise(self, prompt: Any, stages: Any) -> Any:
            samples = await super().supervise(prompt, stages)
            return [msgspec.structs.replace(each, supervision=None) for each in samples]

    run = simulated_run(policy := LeavesAllOut(), iterations=2)
    assert (policy.told, [len(batch) for batch in run.batches]) == ([], [0, 0])


def test_its_time_and_the_looks_are_said_of_each_iteration() -> None:
    class Looks(SimulatedTrainer):
        async def look(self, iteration: int, batch: Any) -> Any:
            await asyncio.sleep(2.0)
            return await super().look(iteration, batch)

    async def takes_three_seconds(work: Callable[..., Any], *given: Any) -> Any:
        await asyncio.sleep(3.0)
        return work(*given)

    run = make_run(Revises(), trainer=Looks(step_s=1.0), compute=takes_three_seconds).finish()
    for each in run.journal.results:
        metrics = iteration_metrics(each, 10.0)
        seconds = [metrics[f"time/{name}_s"] for name in ("look", "revise", "train")]
        assert seconds == pytest.approx([2.0, 3.0, 6.0])
    plain = simulated_run(OpdPolicy(OpdPolicy.Settings(), policy_context())).journal.results[0]
    assert not {"time/look_s", "time/revise_s"} & iteration_metrics(plain, 10.0).keys()
