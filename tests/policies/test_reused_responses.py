"""A teacher's responses are used again, within a run and by other runs."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace
from only_teacher import only

from spot_async.base import wire
from spot_async.policies.kd import KdPolicy
from spot_async.spending.teacher_cache import KeptScores
from spot_async.testing.services import SimulatedTeacher, generation
from spot_async.testing.simulation import (
    PROBLEMS,
    ScriptedStages,
    make_policy,
    simulated_prompts,
    simulated_run,
    simulated_vocabulary,
)


def kd(**settings):
    return make_policy(KdPolicy, **settings)


class Counting(SimulatedTeacher):
    """Remembers which prompts it was asked to answer."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    async def generate(self, prompt_ids, sampling, **rest):
        self.asked[prompt_ids.tobytes()] += 1
        return await super().generate(prompt_ids, sampling, **rest)


def test_kd_asks_the_teacher_once_per_problem_whatever_the_epochs():
    teacher = Counting()
    run = simulated_run(kd(), iterations=6, teachers=only(teacher))  # three epochs of 32 problems
    assert set(teacher.asked.values()) == {1}
    assert len(teacher.asked) == PROBLEMS
    assert run.stages.rollout.counters.completed == 0
    first, last = run.batches[0], run.batches[4]
    assert [s.response_ids.tolist() for s in first] == [s.response_ids.tolist() for s in last]
    assert all(not s.pulls and s.advantages is None and s.version is None for s in first)
    for sample in run.journal.results[0].samples:  # nothing that reads as if the student had sampled it
        assert {"version", "behavior_logprobs"}.isdisjoint(sample.record)
        assert len(sample.record["teacher_logprobs"]) == len(sample.record["response_ids"])


async def test_a_response_of_which_the_student_has_no_token_is_left_out():
    """As where a teacher with its own tokenizer begins with a special token that the student does not have."""

    class Foreign(ScriptedStages):
        async def teacher_response(self, **asked):
            return generation([], finish_reason="length")

    (sample,) = await kd(forward_kl_weight=0).supervise(next(simulated_prompts()), Foreign())
    assert sample.supervision is None
    assert sample.record["left_out"] == "nothing of the teacher's response is in the student's tokens"


async def test_kd_asks_once_even_when_two_epochs_want_the_same_problem_at_once():
    class Slow(ScriptedStages):
        asked = 0

        async def teacher_response(self, **asked):
            self.asked += 1
            await asyncio.sleep(0.0)
            return await super().teacher_response(**asked)

    prompt, stages, policy = next(simulated_prompts()), Slow(), kd()
    samples = await asyncio.gather(policy.supervise(prompt, stages), policy.supervise(prompt, stages))
    assert stages.asked == 1
    assert len(samples) == 2


class Remembered:
    """A cache in memory: what it holds went over the wire's format."""

    def __init__(self):
        self.entries = {}
        self.said = []  # what each answer was about

    async def fetch(self, key, kind, ask, *, what):
        self.said.append(what)
        if key not in self.entries:
            self.entries[key] = wire.encode(await ask())
        return wire.decode(self.entries[key], kind)


@pytest.fixture
def kept():
    return KeptScores(Remembered(), b"a teacher")


def test_kd_trains_from_kept_answers_as_from_the_teacher_whatever_the_seed(kept):
    taught = simulated_run(kd(), iterations=4, teachers=only(kept_scores=kept))
    assert wire.encode(taught.batches) == wire.encode(simulated_run(kd(), iterations=4).batches)
    teacher = Counting()
    again = simulated_run(kd(), iterations=4, teachers=only(teacher, kept_scores=kept), seed=7)
    assert wire.encode(again.batches) == wire.encode(taught.batches)
    assert not teacher.asked
    assert again.stages.teacher().score.counters.completed == 0


def test_a_run_that_ended_early_is_continued_without_paying_twice(kept):
    first, second = Counting(), Counting()
    simulated_run(kd(), iterations=1, teachers=only(first, kept_scores=kept))
    simulated_run(kd(), iterations=2, teachers=only(second, kept_scores=kept))
    assert (first.asked.total(), second.asked.total()) == (16, PROBLEMS - 16)
    assert not first.asked.keys() & second.asked.keys()


def test_an_epoch_of_a_new_process_learns_from_the_responses_of_those_before_it(kept):
    whole = simulated_run(kd(), iterations=4, teachers=only(kept_scores=kept))  # two epochs
    again = simulated_run(kd(), iterations=2, teachers=only(kept_scores=kept), prompts=[*simulated_prompts(64)][32:])
    assert wire.encode(again.batches) == wire.encode(whole.batches[2:])


def test_a_response_is_that_to_the_teachers_own_prompt_and_the_student_learns_it_for_its_own(kept):
    teacher = Counting()
    own = [replace(each, teacher_ids=each.token_ids[::-1].copy()) for each in simulated_prompts(16)]
    run = simulated_run(kd(), prompts=own, teachers=only(teacher, kept_scores=kept), iterations=1)
    assert set(teacher.asked) == {each.teacher_ids.tobytes() for each in own}
    assert [each.prompt_ids.tolist() for each in run.trained] == [each.token_ids.tolist() for each in own]
    simulated_run(kd(), iterations=1, teachers=only(teacher, kept_scores=kept))  # the student's prompts are other ones
    assert teacher.asked.total() == 32


def test_a_student_with_another_end_token_is_taught_its_own(kept):
    ends = {"vocabulary": simulated_vocabulary((0,))}
    taught = simulated_run(kd(), teachers=only(vocabulary=simulated_vocabulary()), **ends)
    other = ends | {"teachers": only(vocabulary=simulated_vocabulary(), kept_scores=kept)}
    assert wire.encode(simulated_run(kd(), **other).batches) == wire.encode(taught.batches)
    assert wire.encode(simulated_run(kd(), **other).batches) == wire.encode(taught.batches)
    again = simulated_run(kd(), teachers=only(kept_scores=kept))
    assert wire.encode(again.batches) == wire.encode(simulated_run(kd()).batches)
