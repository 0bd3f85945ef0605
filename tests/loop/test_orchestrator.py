"""The orchestrator on virtual time: order, strictness, back-pressure, failure, shutdown."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from simulated_run import PlainVocabulary

from spot_async.base.concurrency import leaves
from spot_async.config import SamplingConfig, StageConfig, StagesConfig
from spot_async.errors import DeadlineExceededError, PermanentError, SpotError, ThrottledError, TransientError
from spot_async.loop.admission import PromptState
from spot_async.loop.orchestrator import Orchestrator, OrchestratorSettings
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.stages.stages import Services, Stages
from spot_async.testing.services import (
    VOCAB_SIZE,
    Latency,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    SimulatedVerifier,
)
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import PolicyContext, Problem, Prompt


@dataclass
class Journal:
    """Observer that remembers."""

    results: list = field(default_factory=list)
    dead: list = field(default_factory=list)

    def iteration_finished(self, result):
        self.results.append(result)

    def prompt_died(self, prompt, error):
        self.dead.append((prompt.ordinal, str(error)))


def prompts(limit=None):
    ordinals = range(limit) if limit is not None else count()
    for ordinal in ordinals:
        problem = Problem(id=f"p{ordinal}", text=f"problem {ordinal}", answer="1")
        yield Prompt(ordinal=ordinal, problem=problem, token_ids=np.arange(2, 2 + 5 + ordinal % 7, dtype=np.int32))


class PlainTokenizer:
    """The first ten ids are special or punctuation, the others words."""

    all_special_ids = (0, 1)
    added_tokens_decoder: ClassVar = {}

    def get_vocab(self):
        return {f"token-{i}": i for i in range(VOCAB_SIZE)}

    def decode(self, token_ids):
        return "," if token_ids[0] < 10 else f"word{token_ids[0]}"


def context():
    return PolicyContext(vocab_size=VOCAB_SIZE, tokenizer=PlainTokenizer())


def build(
    *,
    policy=None,
    iterations=4,
    batch_size=16,
    prompt_limit=None,
    student=None,
    teacher=None,
    trainer=None,
    capacity_prompts=None,
    concurrency=64,
    run_seed=0,
    evaluate=None,
):
    policy = policy or SpotPolicy(SpotPolicy.Settings(), context())
    student = student or SimulatedStudent()
    services = Services(
        generator=student,
        scorer=teacher or SimulatedTeacher(),
        candidate_scorer=student,
        verifier=SimulatedVerifier(),
    )
    stage = StageConfig(concurrency=concurrency, timeout_s=60.0)
    stages = Stages(
        services,
        StagesConfig(rollout=stage, score=stage, candidates=stage, probe=stage, verify=stage),
        SamplingConfig(max_response_tokens=128),
        student=PlainVocabulary(),
        teacher=PlainVocabulary(),
        run_seed=run_seed,
        max_running_prompts=capacity_prompts or batch_size,
        max_probes_per_prompt=policy.needs.probes_per_prompt,
    )
    journal = Journal()
    trainer = trainer or SimulatedTrainer()
    orchestrator = Orchestrator(
        OrchestratorSettings(
            iterations=iterations,
            batch_size=batch_size,
            max_staleness=0,
            capacity_prompts=capacity_prompts or batch_size,
            capacity_bytes=1 << 30,
            max_response_tokens=128,
            vocab_size=VOCAB_SIZE,
            weight_update_timeout_s=60.0,
            max_dead_share=0.1,
        ),
        prompts=prompts(prompt_limit),
        policy=policy,
        stages=stages,
        trainer=trainer,
        weight_sinks=[student],
        observer=journal,
        evaluate=evaluate,
    )
    return orchestrator, trainer, journal


def test_a_thousand_prompts_are_trained_once_in_admission_order_from_the_live_weights():
    orchestrator, trainer, journal = build(iterations=10, batch_size=100)
    run_on_virtual_time(orchestrator.run())
    assert [s.prompt_ordinal for batch in trainer.batches for s in batch] == list(range(1000))
    for step, batch in enumerate(trainer.batches):
        assert {s.version.step for s in batch} == {step}  # strict: iteration i from v_i
    assert orchestrator.book.count(PromptState.TRAINED) == 1000
    assert len(journal.results) == 10


def test_an_evaluation_has_the_student_to_itself_and_measures_the_weights_just_trained():
    student = SimulatedStudent()
    seen = []

    async def evaluate(iteration):
        requests = student.requests
        await asyncio.sleep(1000)
        assert student.requests == requests
        seen.append((iteration, student.version.step))
        return f"result {iteration}" if iteration == 2 else None

    orchestrator, _, journal = build(student=student, iterations=3, evaluate=evaluate)
    run_on_virtual_time(orchestrator.run())
    assert seen == [(1, 1), (2, 2), (3, 3)]
    assert [result.evaluation for result in journal.results] == [None, "result 2", None]
    assert [result.times_s.evaluate for result in journal.results] == pytest.approx([1000] * 3)


def test_the_same_seed_gives_the_same_supervision_at_any_concurrency_and_latency():
    def supervision(concurrency, spread):
        student = SimulatedStudent(latency=Latency(spread=spread))
        orchestrator, trainer, _ = build(student=student, concurrency=concurrency)
        run_on_virtual_time(orchestrator.run())
        return [
            (
                s.prompt_ordinal,
                s.response_ids.tolist(),
                None if s.soft_targets is None else s.soft_targets.probabilities.tolist(),
            )
            for batch in trainer.batches
            for s in batch
        ]

    assert supervision(1, 0.0) == supervision(7, 3.0) == supervision(64, 10.0)


def test_stages_of_different_prompts_overlap():
    orchestrator, _, journal = build(iterations=1, batch_size=32)
    run_on_virtual_time(orchestrator.run())
    busy_s = sum(stage.counters.busy_s for stage in orchestrator.stages.all)
    assert busy_s > 8 * journal.results[0].times_s.wait_for_batch


def test_a_stage_never_exceeds_its_concurrency_and_serves_old_prompts_first():
    served = []

    class Watching(SimulatedStudent):
        running = 0
        peak = 0

        async def generate(self, prompt_ids, sampling, *, session=None, **rest):
            self.running += 1
            self.peak = max(self.peak, self.running)
            served.append(int(session.removeprefix("prompt-")))
            try:
                return await super().generate(prompt_ids, sampling, session=session, **rest)
            finally:
                self.running -= 1

    student = Watching()
    policy = OpdPolicy(OpdPolicy.Settings(), context())
    orchestrator, _, _ = build(policy=policy, student=student, concurrency=3, iterations=1, batch_size=32)
    run_on_virtual_time(orchestrator.run())
    assert student.peak == 3
    assert served == sorted(served)


def test_running_out_of_prompts_ends_the_run_and_accounts_for_the_left_over():
    orchestrator, trainer, _ = build(iterations=10, batch_size=16, prompt_limit=40)
    run_on_virtual_time(orchestrator.run())
    assert len(trainer.batches) == 2
    assert orchestrator.book.ordinals(PromptState.LEFT_OVER) == list(range(32, 40))


def test_a_prompt_that_fails_for_good_is_replaced_and_its_reason_kept():
    class Refusing(SimulatedTeacher):
        async def score(self, prompt_ids, response_ids, **rest):
            if len(prompt_ids) == 5 + 3:  # ordinals 3, 10, 17, ...
                raise PermanentError("400: too long for this server")
            return await super().score(prompt_ids, response_ids, **rest)

    # one in seven is more than may die, so the run must stop and say why
    orchestrator, _, _ = build(teacher=Refusing(), iterations=4, batch_size=16)
    with pytest.raises(ExceptionGroup) as stopped:
        run_on_virtual_time(orchestrator.run())
    assert any("too long for this server" in str(e) for e in leaves(stopped.value) if isinstance(e, SpotError))

    class RefusingOne(SimulatedTeacher):
        async def score(self, prompt_ids, response_ids, **rest):
            if len(prompt_ids) == 5 + 3 and not journal_one.dead:
                raise PermanentError("400: too long for this server")
            return await super().score(prompt_ids, response_ids, **rest)

    orchestrator, trainer, journal_one = build(teacher=RefusingOne(), iterations=3, batch_size=16)
    run_on_virtual_time(orchestrator.run())
    ((dead_ordinal, reason),) = journal_one.dead
    assert "too long" in reason
    trained = [s.prompt_ordinal for batch in trainer.batches for s in batch]
    assert trained == [o for o in range(49) if o != dead_ordinal]


def test_too_many_given_up_before_the_first_batch_was_full_are_noticed_once_it_is():
    """Nobody fails afterwards: 4 of 12, when the first batch of 8 is there."""

    class RefusingTheFirst(SimulatedStudent):
        async def generate(self, prompt_ids, sampling, *, session=None, **rest):
            if int(session.removeprefix("prompt-")) < 4:
                raise PermanentError("400: too long for this server")
            return await super().generate(prompt_ids, sampling, session=session, **rest)

    orchestrator, trainer, journal = build(student=RefusingTheFirst(), iterations=3, batch_size=8)
    with pytest.raises(ExceptionGroup) as stopped:
        run_on_virtual_time(orchestrator.run())
    (error,) = leaves(stopped.value)
    assert str(error).startswith("4 of 12 prompts failed for good, more than run.max_dead_share=0.1 allows")
    assert str(error).endswith("400: too long for this server")
    assert len(journal.dead) == 4
    assert trainer.batches == []


def test_transient_failures_are_retried_and_change_nothing():
    class Flaky(SimulatedStudent):
        failures = 0

        async def generate(self, prompt_ids, sampling, **rest):
            if self.failures < 40 and self.requests % 3 == 0:
                self.failures += 1
                self.requests += 1
                await asyncio.sleep(0.01)
                raise TransientError("connection reset")
            return await super().generate(prompt_ids, sampling, **rest)

    def responses(student):
        orchestrator, trainer, _ = build(student=student)
        run_on_virtual_time(orchestrator.run())
        return [s.response_ids.tolist() for batch in trainer.batches for s in batch]

    flaky = Flaky()
    assert responses(flaky) == responses(SimulatedStudent())
    assert flaky.failures == 40


def test_an_endpoint_that_is_away_for_seconds_costs_no_prompt():
    class Away(SimulatedTeacher):
        refused = 0

        async def score(self, prompt_ids, response_ids, **rest):
            if 1.0 < asyncio.get_running_loop().time() < 9.0:
                self.refused += 1
                raise TransientError("teacher/score: connection refused")
            return await super().score(prompt_ids, response_ids, **rest)

    teacher = Away()
    orchestrator, trainer, journal = build(teacher=teacher)
    run_on_virtual_time(orchestrator.run())
    assert teacher.refused > 0
    assert journal.dead == []
    assert len(trainer.batches) == 4


def test_a_prompt_whose_requests_are_never_answered_is_replaced():
    class Failing(SimulatedTeacher):
        async def score(self, prompt_ids, response_ids, **rest):
            if len(prompt_ids) == 5 + 3 and len(journal.dead) < 2:
                raise TransientError("500: out of memory")
            return await super().score(prompt_ids, response_ids, **rest)

    orchestrator, trainer, journal = build(teacher=Failing(), iterations=3, batch_size=32)
    run_on_virtual_time(orchestrator.run())
    dead = [ordinal for ordinal, _ in journal.dead]
    assert len(dead) == 2
    assert {reason for _, reason in journal.dead} == {"500: out of memory"}
    trained = [s.prompt_ordinal for batch in trainer.batches for s in batch]
    assert trained == [o for o in range(98) if o not in dead]


def test_a_dead_endpoint_ends_the_run_within_a_minute_whatever_the_batch():
    class Dead(SimulatedTeacher):
        async def score(self, prompt_ids, response_ids, **rest):
            raise TransientError("teacher/score: connection refused")

    async def scenario(**sizes):
        orchestrator, _, _ = build(teacher=Dead(), **sizes)
        with pytest.raises(ExceptionGroup) as stopped:
            await orchestrator.run()
        assert "teacher/score: connection refused" in str(leaves(stopped.value)[0])
        assert asyncio.get_running_loop().time() < 90.0

    run_on_virtual_time(scenario(batch_size=1000, concurrency=1000))
    run_on_virtual_time(scenario(batch_size=1000, concurrency=1))
    run_on_virtual_time(scenario(batch_size=1))


class RefusingStudent(SimulatedStudent):
    """Takes no new weights the first `refusals` times, and goes on with the old ones."""

    def __init__(self, error, refusals):
        super().__init__()
        self.error, self.refusals, self.asked_at = error, refusals, []

    async def update_weights(self, snapshot, *, deadline):
        self.asked_at.append(asyncio.get_running_loop().time())
        if len(self.asked_at) <= self.refusals:
            raise self.error
        await super().update_weights(snapshot, deadline=deadline)


@pytest.mark.parametrize(
    ("error", "pause_s"), [(TransientError("reset"), 0.1), (ThrottledError("busy", retry_after_s=20.0), 20.0)]
)
def test_new_weights_that_a_server_did_not_take_are_sent_again(error, pause_s):
    student = RefusingStudent(error, refusals=2)
    orchestrator, trainer, journal = build(student=student)
    run_on_virtual_time(orchestrator.run())
    assert len(journal.results) == len(trainer.batches) == 4
    assert len(student.asked_at) == 2 + 4
    assert (np.diff(student.asked_at[:3]) >= pause_s).all()


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (TransientError("reset"), 3),
        (ThrottledError("busy", retry_after_s=40.0), 2),  # a third would come after the time for an update
        (DeadlineExceededError("late"), 1),
        (PermanentError("other weights"), 1),
    ],
)
def test_a_server_that_takes_no_weights_ends_the_run_with_its_reason(error, times):
    student = RefusingStudent(error, refusals=10)
    orchestrator, _, journal = build(student=student)
    with pytest.raises(ExceptionGroup) as stopped:
        run_on_virtual_time(orchestrator.run())
    assert leaves(stopped.value) == [error]
    assert len(student.asked_at) == times
    assert not journal.results


def test_a_server_that_hangs_ends_the_run_with_the_stage_named():
    class Hanging(SimulatedTeacher):
        async def score(self, prompt_ids, response_ids, **rest):
            await asyncio.Event().wait()

    orchestrator, _, _ = build(teacher=Hanging())
    with pytest.raises(ExceptionGroup) as stopped:
        run_on_virtual_time(orchestrator.run())
    assert "score: no answer within 60 s" in str(leaves(stopped.value)[0])


def test_an_endpoint_that_asks_for_a_year_ends_the_run_with_its_own_words():
    class Closed(SimulatedTeacher):
        async def score(self, *args, **rest):
            raise ThrottledError("teacher: HTTP 429: closed for a year", retry_after_s=366 * 86_400.0)

    async def run():
        orchestrator, _, _ = build(teacher=Closed())
        try:
            await orchestrator.run()
        finally:
            ended_s.append(asyncio.get_running_loop().time())

    ended_s = []
    with pytest.raises(ExceptionGroup) as stopped:
        run_on_virtual_time(run())
    assert "3 prompts in a row went unanswered, the last one: teacher: HTTP 429: closed" in str(leaves(stopped.value))
    assert ended_s[0] < 120.0  # its stage allows a minute


@pytest.mark.parametrize("moment_s", [0.001, 0.05, 0.3, 1.0, 2.5, 4.0])
def test_cancelling_at_any_moment_leaves_no_task_behind(moment_s):
    async def cancel_midway():
        orchestrator, _, _ = build(iterations=50)
        run = asyncio.create_task(orchestrator.run())
        await asyncio.sleep(moment_s)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert all(stage.in_flight == 0 and stage.waiting == 0 for stage in orchestrator.stages.all)

    run_on_virtual_time(cancel_midway())


def test_spot_without_positions_is_opd_bit_for_bit():
    def supervision(policy):
        orchestrator, trainer, _ = build(policy=policy)
        run_on_virtual_time(orchestrator.run())
        return [s for batch in trainer.batches for s in batch]

    spot = supervision(SpotPolicy(SpotPolicy.Settings(positions=0), context()))
    opd = supervision(OpdPolicy(OpdPolicy.Settings(), context()))
    for ours, theirs in zip(spot, opd, strict=True):
        assert ours.soft_targets is None
        assert theirs.soft_targets is None
        for name in ("prompt_ids", "response_ids", "behavior_logprobs", "teacher_logprobs"):
            assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
