"""A teacher's responses are used again, within a run and from another run's file."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from spot_async.base import wire
from spot_async.errors import ConfigError, DataError, PermanentError
from spot_async.policies.kd import KdPolicy
from spot_async.policies.teacher_responses import LENGTH, _frames
from spot_async.testing.services import VOCAB_SIZE, SimulatedTeacher
from spot_async.testing.simulation import (
    PROBLEMS,
    ScriptedStages,
    SimulatedTokenizer,
    make_policy,
    policy_context,
    simulated_prompts,
    simulated_run,
    simulated_vocabulary,
)
from spot_async.types import Judgement, Prompt, Verdict


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
    run = simulated_run(kd(), iterations=6, teacher=teacher)  # three epochs of 32 problems
    assert set(teacher.asked.values()) == {1}
    assert len(teacher.asked) == PROBLEMS
    assert run.stages.rollout.counters.completed == 0
    first, last = run.batches[0], run.batches[4]
    assert [s.response_ids.tolist() for s in first] == [s.response_ids.tolist() for s in last]
    assert all(not s.pulls and s.advantages is None and s.version is None for s in first)
    for sample in run.journal.results[0].samples:  # nothing that reads as if the student had sampled it
        assert {"version", "behavior_logprobs"}.isdisjoint(sample.record)
        assert len(sample.record["teacher_logprobs"]) == len(sample.record["response_ids"])


async def test_kd_asks_once_even_when_two_epochs_want_the_same_problem_at_once():
    class Slow(ScriptedStages):
        asked = 0

        async def teacher_response(self):
            self.asked += 1
            await asyncio.sleep(0.0)
            return await super().teacher_response()

    prompt, stages, policy = next(simulated_prompts()), Slow(), kd()
    samples = await asyncio.gather(policy.supervise(prompt, stages), policy.supervise(prompt, stages))
    assert stages.asked == 1
    assert len(samples) == 2


def test_kd_trains_from_its_file_as_from_the_teacher_with_no_teacher_there(tmp_path):
    path = tmp_path / "responses.msgpack"
    taught = simulated_run(kd(save=str(path)), iterations=4)
    policy = kd(load=str(path))
    assert not policy.needs.teacher
    again = simulated_run(policy, iterations=4)
    assert wire.encode(taught.batches) == wire.encode(again.batches)
    assert {stage.name for stage in again.stages.all}.isdisjoint({"teacher_response", "reference"})
    with pytest.raises(ConfigError, match=r"policy\.save: .* exists already"):
        kd(save=str(path), top_k=4)


@pytest.mark.parametrize("judged", [Judgement(Verdict.WRONG, 0.5, "half of it"), Verdict.WRONG])
async def test_what_was_said_of_a_response_is_in_the_file_and_a_verdict_alone_in_older_ones_is_read(tmp_path, judged):
    path, prompt = tmp_path / "responses.msgpack", next(simulated_prompts())
    await kd(save=str(path)).supervise(prompt, ScriptedStages(verdict=judged))
    if judged is Verdict.WRONG:
        head, written = map(bytes, _frames(path.read_bytes()))
        older = wire.encode(wire.decode(written, dict) | {"verdict": "wrong"})
        path.write_bytes(b"".join(LENGTH.pack(len(each)) + each for each in (head, older)))
    (sample,) = await kd(load=str(path)).supervise(prompt, ScriptedStages())
    assert sample.metrics["teacher/accuracy"] == 0.0
    assert sample.record["verdict"] == "wrong"
    said = {"reward": 0.5, "feedback": "half of it"} if judged is not Verdict.WRONG else {}
    assert {name: sample.record[name] for name in ("reward", "feedback") if name in sample.record} == said


def test_a_file_ends_with_the_end_token_of_whichever_student_reads_it(tmp_path):
    path, other = tmp_path / "responses", 0  # the teacher ends with END_TOKEN
    ends = {"vocabulary": simulated_vocabulary((other,)), "teacher_vocabulary": simulated_vocabulary()}
    saved = simulated_run(kd(save=str(path)), **ends)
    loaded = simulated_run(kd(load=str(path)))
    taught = simulated_run(kd())
    assert wire.encode(loaded.batches) == wire.encode(taught.batches) != wire.encode(saved.batches)
    again = simulated_run(kd(load=str(path)), **ends)
    assert wire.encode(again.batches) == wire.encode(saved.batches)


def test_a_run_that_saved_its_responses_and_ended_early_is_continued_without_paying_twice(tmp_path):
    path, asked = tmp_path / "responses.msgpack", []
    simulated_run(kd(save=str(path)), iterations=1)
    path.write_bytes(path.read_bytes()[:-7])  # killed as it wrote

    class Remembering(KdPolicy):
        async def _ask_teacher(self, prompt, stages):
            asked.append(prompt.problem.id)
            return await super()._ask_teacher(prompt, stages)

    policy = make_policy(Remembering, save=str(path))
    before = path.read_bytes()
    policy.check(simulated_prompts(16))
    assert path.read_bytes() == before
    simulated_run(policy, iterations=2)
    assert len(asked) == PROBLEMS - 15  # the first run finished sixteen, of which one was cut
    kd(load=str(path)).check(simulated_prompts(PROBLEMS))
    changed = Prompt(ordinal=0, problem=next(simulated_prompts()).problem, token_ids=np.array([9, 9], np.int32))
    with pytest.raises(DataError, match=r"policy\.save: .* rendered differently"):
        kd(save=str(path)).check([changed])


def test_a_response_is_that_to_the_teachers_own_prompt_and_the_student_learns_it_for_its_own(tmp_path):
    path, teacher = tmp_path / "responses", Counting()
    own = [replace(each, teacher_ids=each.token_ids[::-1].copy()) for each in simulated_prompts(16)]
    run = simulated_run(kd(save=str(path)), prompts=own, teacher=teacher, iterations=1)
    assert set(teacher.asked) == {each.teacher_ids.tobytes() for each in own}
    assert [each.prompt_ids.tolist() for each in run.trained] == [each.token_ids.tolist() for each in own]
    kd(load=str(path)).check(own)
    with pytest.raises(DataError, match=r"policy\.load: problem 'p0' was rendered differently"):
        kd(load=str(path)).check(simulated_prompts(16))


def test_a_file_that_its_writer_did_not_finish_is_used_as_far_as_it_goes(tmp_path):
    path = tmp_path / "responses.msgpack"
    simulated_run(kd(save=str(path)), iterations=1)
    path.write_bytes(path.read_bytes()[:-7])
    policy = kd(load=str(path))
    found = Counter(_supervises(policy, prompt) for prompt in simulated_prompts(16))
    assert found == {True: 15, False: 1}


def _supervises(policy, prompt):
    try:
        return len(asyncio.run(policy.supervise(prompt, ScriptedStages()))) == 1
    except PermanentError:
        return False


def test_a_file_that_does_not_fit_the_run_is_refused_in_one_line(tmp_path):
    path = tmp_path / "responses.msgpack"
    simulated_run(kd(save=str(path), top_k=4), iterations=1)
    with pytest.raises(ConfigError, match=r"policy\.top_k=16: .* holds the teacher's top-4; set it to 4 or less"):
        kd(load=str(path))
    assert kd(load=str(path), top_k=2).needs.teacher_top_k == 0

    other = policy_context(tokenizer=SimulatedTokenizer(VOCAB_SIZE - 1))
    with pytest.raises(DataError, match="another vocabulary"):
        make_policy(KdPolicy, other, load=str(path), top_k=4)
    former = tmp_path / "former"
    former.write_bytes(b"\x18\x00\x00\x00" + wire.encode({"format_version": 1, "top_k": 4}))
    with pytest.raises(DataError, match=r"policy\.save: .* has format 1, this version reads 2; write another"):
        kd(save=str(former))
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x05\x00\x00\x00hello")
    with pytest.raises(DataError, match="is no file of teacher responses"):
        kd(load=str(garbage))
    with pytest.raises(ConfigError, match="cannot read"):
        kd(load=str(tmp_path / "nowhere"))
    changed = Prompt(ordinal=0, problem=next(simulated_prompts()).problem, token_ids=np.array([9, 9], np.int32))
    with pytest.raises(DataError, match="rendered differently"):
        asyncio.run(kd(load=str(path), top_k=4).supervise(changed, ScriptedStages()))
