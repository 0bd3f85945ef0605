"""`rollout/accuracy` is of what the student wrote to each prompt, whatever samples its policy makes of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import msgspec
import pytest

import spot_async as spot
from spot_async.loop.resuming import Resumption
from spot_async.testing.services import INITIAL_VERSION, SimulatedStudent, SimulatedVerifier
from spot_async.testing.simulation import SimulatedRun, make_policy, simulated_prompts, simulated_run

pytestmark = pytest.mark.usefixtures("quiet")

Attempt = tuple[spot.Generation, spot.Judgement]
BATCH = 8


class Groups:
    """Four rollouts of a prompt, of which `keep` returns some as samples. It notes what was right."""

    Settings = spot.PluginSettings

    def __init__(self, settings: Any, context: Any) -> None:
        self.needs = spot.PolicyNeeds(samples_per_prompt=4, rollouts_per_prompt=5)
        self.keep: Callable[[list[Attempt]], list[Attempt]] = list
        self.right: dict[int, list[float]] = {}

    async def supervise(self, prompt: spot.Prompt, stages: Any) -> Sequence[spot.Sample]:
        rollouts = await self.rollouts(prompt, stages)
        group = [(each, await stages.verify(each.token_ids)) for each in rollouts]
        self.right[prompt.ordinal] = [each.verdict.reward for _, each in group if each.verdict.reward is not None]
        return [spot.student_sample(prompt, stages, *each, advantages=each[0].logprobs) for each in self.keep(group)]

    async def rollouts(self, prompt: spot.Prompt, stages: Any) -> Sequence[spot.Generation]:
        return [await stages.rollout(n=n) for n in range(4)]

    def batches(self, iterations: int) -> list[float]:
        """The mean over each batch's prompts that have verdicts of theirs."""
        ordinals = [range(BATCH * at, BATCH * (at + 1)) for at in range(iterations)]
        return [mean(mean(self.right[each]) for each in batch if self.right[each]) for batch in ordinals]


class Reads(SimulatedVerifier):
    """Finds right what begins with some tokens, and cannot judge what begins with some others."""

    async def verify(self, problem: spot.Problem, response_text: str, *, deadline: float) -> spot.Verdict:
        first = int(response_text.split()[0])
        if first % 7 == 6:
            return spot.Verdict.UNJUDGED
        return spot.Verdict.CORRECT if first % 5 == 0 else spot.Verdict.WRONG


def run(policy: Groups, iterations: int = 3, **changes: Any) -> SimulatedRun:
    return simulated_run(policy, **{"verifier": Reads(), "batch_size": BATCH, "iterations": iterations, **changes})


def accuracies(run: SimulatedRun) -> list[float]:
    return [each.means["rollout/accuracy"] for each in run.journal.results]


def only_right(group: list[Attempt]) -> list[Attempt]:
    return [each for each in group if each[1].verdict is spot.Verdict.CORRECT]


def with_signal(group: list[Attempt]) -> list[Attempt]:
    return group if len({each[1].verdict for each in group}) > 1 else []


def none(group: list[Attempt]) -> list[Attempt]:
    return []


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("keep", [list, only_right, with_signal, none])
def test_it_is_of_all_that_was_written_and_not_of_what_is_returned(keep: Any, max_staleness: int) -> None:
    """HDPO and DAPO return some: prompts without a sample count too, in the iteration in whose batch they lie."""
    policy = make_policy(Groups)
    policy.keep = keep
    found = run(policy, max_staleness=max_staleness)
    assert accuracies(found) == pytest.approx(policy.batches(3))
    assert all(0 < each < 0.5 for each in accuracies(found))
    if keep is only_right:
        assert {each.metrics["rollout/accuracy"] for each in found.samples} == {1.0}


def test_only_whole_responses_to_the_prompt_that_were_judged_count() -> None:
    class Asks(Groups):
        async def rollouts(self, prompt: spot.Prompt, stages: Any) -> Sequence[spot.Generation]:
            await stages.rollout(n=1)  # not verified
            await stages.rollout(n=0)  # the one below, once more
            return [await stages.rollout()]

        async def supervise(self, prompt: spot.Prompt, stages: Any) -> Sequence[spot.Sample]:
            samples = await super().supervise(prompt, stages)
            others: list[dict[str, Any]] = [
                {"prefix_ids": [10]},
                {"max_tokens": 3},
                {"stop": [7]},
                {"prompt_ids": prompt.token_ids[1:]},
                {"n": 9},  # beyond its samples
            ]
            for each in others:
                await stages.verify((await stages.rollout(**{"n": 2, **each})).token_ids)
            return samples

    assert accuracies(run(policy := make_policy(Asks))) == pytest.approx(policy.batches(3))


def test_equal_responses_count_each_though_one_alone_is_verified() -> None:
    times: Counter[bytes] = Counter()

    class Repeats(SimulatedStudent):
        async def generate(self, prompt_ids: Any, sampling: Any, **asked: Any) -> spot.Generation:
            times[prompt_ids.tobytes()] += 1
            seed = 2 * len(prompt_ids) + (times[prompt_ids.tobytes()] > 2)  # twice the same, then another
            return await super().generate(prompt_ids, msgspec.structs.replace(sampling, seed=seed), **asked)

    class Skips(Groups):
        async def supervise(self, prompt: spot.Prompt, stages: Any) -> Sequence[spot.Sample]:
            first, second, third = [await stages.rollout(n=n) for n in range(3)]
            assert first.token_ids.tolist() == second.token_ids.tolist() != third.token_ids.tolist()
            one, other = [await stages.verify(each.token_ids) for each in (first, third)]
            rights = [each.verdict.reward for each in (one, one, other)]
            self.right[prompt.ordinal] = [each for each in rights if each is not None]
            return []

    found = run(policy := make_policy(Skips), iterations=1, student=Repeats())
    assert accuracies(found) == pytest.approx(policy.batches(1))
    assert any(len({*rights}) > 1 for rights in policy.right.values())


def test_a_domain_has_its_own_and_where_nothing_is_judged_there_is_none() -> None:
    def of_two_domains() -> Any:
        for prompt in simulated_prompts():
            problem = msgspec.structs.replace(prompt.problem, domain=("even", "odd")[prompt.ordinal % 2])
            yield msgspec.structs.replace(prompt, problem=problem)

    found = run(policy := make_policy(Groups), iterations=1, prompts=of_two_domains())
    means = found.journal.results[0].means
    for at, domain in enumerate(["even", "odd"]):
        rights = [policy.right[ordinal] for ordinal in range(at, BATCH, 2)]
        assert means[f"rollout/{domain}/accuracy"] == pytest.approx(mean(mean(each) for each in rights if each))

    class JudgesNothing(SimulatedVerifier):
        async def verify(self, problem: spot.Problem, response_text: str, *, deadline: float) -> spot.Verdict:
            return spot.Verdict.UNJUDGED

    unjudged = run(make_policy(Groups), verifier=JudgesNothing())
    assert not any("rollout/accuracy" in each.means for each in unjudged.journal.results)


def test_what_was_kept_of_a_prompt_counts_after_a_resume() -> None:
    kept: dict[int, list[spot.Sample]] = {ordinal: [] for ordinal in range(0, BATCH, 2)}
    resumption = Resumption(INITIAL_VERSION, {}, kept.get, lambda ordinal: {"rollout/accuracy": ordinal / 4})
    resumed = run(policy := make_policy(Groups), iterations=1, resumption=resumption)
    assert kept.keys().isdisjoint(policy.right)
    fresh = [mean(rights) for rights in policy.right.values() if rights]
    assert accuracies(resumed) == pytest.approx([mean([*fresh, 0, 0.5, 1, 1.5])])
