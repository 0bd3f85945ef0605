"""What a policy is told of iterations, and when: before the next one is revised, and the same whatever was fast."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.publishing import LiveEvaluation
from spot_async.policies.opd import OpdPolicy
from spot_async.stages.plugin_contract import computed
from spot_async.testing.services import SimulatedTrainer
from spot_async.testing.simulation import SimulatedRun, policy_context, simulated_run
from spot_async.types import TrainReport

pytestmark = pytest.mark.usefixtures("quiet")


class Observes(OpdPolicy):
    """Notes what it is told, and how much it knew when it was asked."""

    def __init__(self) -> None:
        super().__init__(OpdPolicy.Settings(), policy_context())
        self.told: list[Any] = []
        self.known: dict[int, int] = {}  # reports before each batch's second word
        self.begun: dict[int, int] = {}  # and before each prompt, by ordinal

    async def supervise(self, prompt: Any, stages: Any) -> Any:
        self.begun[prompt.ordinal] = len(self.told)
        return await super().supervise(prompt, stages)

    def revise(self, batch: Any) -> Any:
        self.known[batch.iteration] = len(self.told)
        return batch.samples

    def observe(self, report: Any) -> None:
        self.told.append(report)

    def state_dict(self) -> dict[str, Any]:
        return {"told": len(self.told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Timed(SimulatedTrainer):
    """Says what a clock decided beside what it did not."""

    async def train(self, iteration: int, batch: Any) -> TrainReport:
        report = await super().train(iteration, batch)
        report.metrics.update({"loss": iteration / 8, "step_s": 0.5 + iteration, "tokens_per_s": 9.0})
        return report


def evaluated(seconds: float, every: int = 1) -> LiveEvaluation:
    """Evaluations that take so long. Their figures are there once they are made."""
    made: set[int] = set()

    async def measure(step: int) -> EvaluationResult | None:
        await asyncio.sleep(seconds)
        made.add(step)
        return None

    async def figures(step: int) -> Mapping[str, float]:
        assert step in made or step % every, "it is waited for"
        return {} if step % every else {"evaluation/avg@8": step / 100}

    return LiveEvaluation(lambda step: step % every == 0, measure, figures)


def run(policy: Observes, max_staleness: int = 0, **changes: Any) -> SimulatedRun:
    return simulated_run(policy, max_staleness=max_staleness, batch_size=4, iterations=6, **changes)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_it_is_told_of_each_iteration_once_and_before_the_next_is_revised(max_staleness: int) -> None:
    run(policy := Observes(), max_staleness, trainer=Timed())
    assert [each.iteration for each in policy.told] == [*range(6)]
    assert policy.known == {iteration: iteration for iteration in range(6)}
    if max_staleness == 0:  # with staleness timing decides what a prompt's own coroutine sees
        assert policy.begun == {ordinal: ordinal // 4 for ordinal in range(24)}


def test_a_report_has_the_batchs_means_and_nothing_that_a_clock_decided() -> None:
    found = run(policy := Observes(), trainer=Timed())
    for told, result in zip(policy.told, found.journal.results, strict=True):
        assert told.metrics == result.means | {"train/loss": told.iteration / 8}
        assert {"rollout/tokens", "rollout/accuracy", "teacher/entropy_nats"} <= told.metrics.keys()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_evaluation_is_told_at_the_same_iteration_however_long_it_took(max_staleness: int) -> None:
    told = []
    for seconds in (0.0, 1.0, 100.0):
        run(policy := Observes(), max_staleness, evaluation=evaluated(seconds, every=2), trainer=Timed())
        told.append([each.evaluation for each in policy.told])
    assert told[0] == told[1] == told[2]
    steps = [iteration - max_staleness for iteration in range(6)]
    assert told[0] == [{"evaluation/avg@8": step / 100} if step > 0 and step % 2 == 0 else {} for step in steps]


NEVER_ENDS = """
import asyncio, time
from functools import partial
from spot_async.base.tasks import root_cause
from spot_async.policies.opd import OpdPolicy
from spot_async.stages.plugin_contract import computed
from spot_async.testing.simulation import make_run, policy_context

class Slow(OpdPolicy):
    def {hook}(self, told):
        time.sleep(1e6)
    def state_dict(self):
        return {{}}
    def load_state_dict(self, state):
        pass

run = make_run(Slow(OpdPolicy.Settings(), policy_context()), batch_size=2, compute=partial(computed, 0.1))
try:
    asyncio.run(run.orchestrator.run())
except ExceptionGroup as failures:
    print(root_cause(failures))
"""


@pytest.mark.parametrize("hook", ["revise", "observe"])
def test_a_hook_that_never_ends_ends_the_run_with_its_line_and_does_not_keep_the_process(hook: str) -> None:
    ended = subprocess.run([sys.executable, "-c", NEVER_ENDS.format(hook=hook)], capture_output=True, text=True)
    said = f"policy Slow.{hook} took longer than training.step_timeout_s=0.1: raise that, or do less"
    assert said in ended.stdout.splitlines(), ended.stderr


async def test_what_a_hook_returns_or_raises_comes_back() -> None:
    def halved(policy: object, value: int) -> float:
        return value / 2 if value else 1 / value

    assert await computed(60.0, halved, object(), 3) == 1.5
    with pytest.raises(ZeroDivisionError):
        await computed(60.0, halved, object(), 0)


def test_it_is_told_of_an_iteration_that_made_no_step_too() -> None:
    class LeavesAllOut(Observes):
        def revise(self, batch: Any) -> Any:
            return [type(each)(supervision=None, metrics={}, record={}) for each in batch.samples]

    run(policy := LeavesAllOut())
    assert [each.iteration for each in policy.told] == [*range(6)]
    assert all("rollout/accuracy" in each.metrics for each in policy.told)  # of what was written
