"""A teacher's responses are used again, within a run and from another run's file."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice

import msgspec
import numpy as np
import pytest
from simulated_run import PROBLEMS, Counting, PlainTokenizer, context, kd, prompts, run

from spot_async.base import wire
from spot_async.errors import ConfigError, DataError, PermanentError
from spot_async.models.end_tokens import EndTokens
from spot_async.policies.kd import KdPolicy
from spot_async.testing.services import END_TOKEN, VOCAB_SIZE, SimulatedStudent, SimulatedTeacher
from spot_async.types import (
    PolicyContext,
    Prompt,
    SamplingSettings,
    Verdict,
)

ENDS = EndTokens((END_TOKEN,), (END_TOKEN,), "replace")


def test_kd_asks_the_teacher_once_per_problem_whatever_the_epochs():
    teacher = Counting()
    trainer, journal, stages = run(kd(), iterations=6, teacher_generator=teacher)  # three epochs of 32 problems
    assert set(teacher.asked.values()) == {1}
    assert len(teacher.asked) == PROBLEMS
    assert stages.rollout.counters.completed == 0
    first, last = trainer.batches[0], trainer.batches[4]
    assert [s.response_ids.tolist() for s in first] == [s.response_ids.tolist() for s in last]
    assert all(s.teacher_logprobs is None and s.advantages is None and s.version is None for s in first)
    for sample in journal.results[0].samples:  # nothing that reads as if the student had sampled it
        assert {"version", "behavior_logprobs"}.isdisjoint(sample.record)
        assert len(sample.record["teacher_logprobs"]) == len(sample.record["response_ids"])


async def test_kd_asks_once_even_when_two_epochs_want_the_same_problem_at_once():
    class Stages:
        asked, ends = 0, ENDS

        async def teacher_response(self):
            self.asked += 1
            return await SimulatedStudent().generate(prompt.token_ids, sampling, deadline=0)

        async def score(self, response_ids, *, top_k):
            return await SimulatedTeacher().score(
                prompt.token_ids, response_ids, top_k=top_k, temperature=1.0, deadline=0
            )

        async def verify(self, response_ids):
            return Verdict.CORRECT

        def decode(self, token_ids):
            return ""

    prompt = next(prompts())
    sampling = SamplingSettings(max_tokens=9, stop_token_ids=(END_TOKEN,), seed=1)
    stages, policy = Stages(), kd()
    samples = await asyncio.gather(policy.supervise(prompt, stages), policy.supervise(prompt, stages))
    assert stages.asked == 1
    assert len(samples) == 2


def test_kd_trains_from_its_file_as_from_the_teacher_with_no_teacher_there(tmp_path):
    path = tmp_path / "responses.msgpack"
    taught, _, _ = run(kd(save=str(path)), iterations=4)
    policy = kd(load=str(path))
    assert not policy.needs.teacher
    again, _, stages = run(policy, iterations=4)
    assert msgspec.to_builtins([wire.encode(b) for b in taught.batches]) == msgspec.to_builtins(
        [wire.encode(b) for b in again.batches]
    )
    assert {stage.name for stage in stages.all}.isdisjoint({"teacher_response", "reference"})
    with pytest.raises(ConfigError, match=r"policy\.save: .* exists already"):
        kd(save=str(path), top_k=4)


def test_a_file_ends_with_the_end_token_of_whichever_student_reads_it(tmp_path):
    path, other = tmp_path / "responses", 0  # the teacher ends with END_TOKEN
    saved, _, _ = run(kd(save=str(path)), end_token=other)
    loaded, _, _ = run(kd(load=str(path)), end_token=END_TOKEN)
    taught, _, _ = run(kd(), end_token=END_TOKEN)
    assert wire.encode(loaded.batches) == wire.encode(taught.batches) != wire.encode(saved.batches)
    again, _, _ = run(kd(load=str(path)), end_token=other)
    assert wire.encode(again.batches) == wire.encode(saved.batches)


def test_a_run_that_saved_its_responses_and_ended_early_is_continued_without_paying_twice(tmp_path):
    path, asked = tmp_path / "responses.msgpack", []
    run(kd(save=str(path)), iterations=1)
    path.write_bytes(path.read_bytes()[:-7])  # killed as it wrote

    class Remembering(KdPolicy):
        async def _ask_teacher(self, prompt, stages):
            asked.append(prompt.problem.id)
            return await super()._ask_teacher(prompt, stages)

    policy = Remembering(KdPolicy.Settings(save=str(path)), context())
    before = path.read_bytes()
    policy.check(islice(prompts(), 16))
    assert path.read_bytes() == before
    run(policy, iterations=2)
    assert len(asked) == PROBLEMS - 15  # the first run finished sixteen, of which one was cut
    kd(load=str(path)).check(islice(prompts(), PROBLEMS))
    changed = Prompt(ordinal=0, problem=next(prompts()).problem, token_ids=np.array([9, 9], np.int32))
    with pytest.raises(DataError, match=r"policy\.save: .* rendered differently"):
        kd(save=str(path)).check([changed])


def test_a_file_that_its_writer_did_not_finish_is_used_as_far_as_it_goes(tmp_path):
    path = tmp_path / "responses.msgpack"
    run(kd(save=str(path)), iterations=1)
    path.write_bytes(path.read_bytes()[:-7])
    policy = kd(load=str(path))
    found = Counter(_supervises(policy, prompt) for prompt in islice(prompts(), 16))
    assert found == {True: 15, False: 1}


def _supervises(policy, prompt):
    try:
        return len(asyncio.run(policy.supervise(prompt, _NoStages()))) == 1
    except PermanentError:
        return False


class _NoStages:
    ends = ENDS

    def decode(self, token_ids):
        return ""


def test_a_file_that_does_not_fit_the_run_is_refused_in_one_line(tmp_path):
    path = tmp_path / "responses.msgpack"
    run(kd(save=str(path), top_k=4), iterations=1)
    with pytest.raises(ConfigError, match=r"policy\.top_k=16: .* holds the teacher's top-4; set it to 4 or less"):
        kd(load=str(path))
    assert kd(load=str(path), top_k=2).needs.teacher_top_k == 0

    class Other(PlainTokenizer):
        prefix = "other"

    with pytest.raises(DataError, match="another vocabulary"):
        KdPolicy(KdPolicy.Settings(load=str(path), top_k=4), PolicyContext(vocab_size=VOCAB_SIZE, tokenizer=Other()))
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
    changed = Prompt(ordinal=0, problem=next(prompts()).problem, token_ids=np.array([9, 9], np.int32))
    with pytest.raises(DataError, match="rendered differently"):
        asyncio.run(kd(load=str(path), top_k=4).supervise(changed, _NoStages()))
