"""Groups, references, reused responses, gates and controls: the methods through the orchestrator on virtual time."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from spot_async import wire
from spot_async.config import SamplingConfig, StageConfig, StagesConfig
from spot_async.errors import ConfigError, DataError, PermanentError
from spot_async.ledger import Ledger, PromptState
from spot_async.orchestrator import Orchestrator, OrchestratorSettings
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.grpo import GrpoPolicy, group_advantages
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.simulation.services import (
    END_TOKEN,
    VOCAB_SIZE,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    SimulatedVerifier,
)
from spot_async.simulation.virtual_time import run_on_virtual_time
from spot_async.stages import Services, Stages
from spot_async.supervision_queue import worst_case_bytes
from spot_async.types import (
    PolicyContext,
    PolicyNeeds,
    Problem,
    Prompt,
    SamplingSettings,
    TokenScores,
    Verdict,
    WeightVersion,
)

PROBLEMS = 32


class PlainVocabulary:
    end_token_ids = (END_TOKEN,)

    def decode(self, token_ids):
        return " ".join(map(str, token_ids.tolist()))


class PlainTokenizer:
    all_special_ids = (0, 1)
    added_tokens_decoder: ClassVar = {}
    prefix = "token"

    def get_vocab(self):
        return {f"{self.prefix}-{i}": i for i in range(VOCAB_SIZE)}

    def decode(self, token_ids):
        return f"word{token_ids[0]}"


@dataclass
class Journal:
    results: list = field(default_factory=list)
    dead: list = field(default_factory=list)
    ledger: Ledger | None = None

    def iteration_finished(self, result):
        self.results.append(result)

    def prompt_died(self, prompt, reason):
        self.dead.append((prompt.ordinal, reason))


class Counting(SimulatedStudent):
    """A generator that remembers which prompts it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    async def generate(self, prompt_ids, sampling, **rest):
        self.asked[prompt_ids.tobytes()] += 1
        return await super().generate(prompt_ids, sampling, **rest)


class Undecided(SimulatedVerifier):
    """Gives no evidence for one response in six, whatever is asked again."""

    async def verify(self, problem, response_text, *, deadline):
        verdict = await super().verify(problem, response_text, deadline=deadline)
        return Verdict.TIMEOUT if sum(map(int, response_text.split())) % 6 == 0 else verdict


def context(**settings):
    return PolicyContext(vocab_size=VOCAB_SIZE, tokenizer=PlainTokenizer(), **settings)


def prompts():
    """Every problem again in each epoch."""
    for ordinal in range(100 * PROBLEMS):
        index = ordinal % PROBLEMS
        problem = Problem(id=f"p{index}", text=f"problem {index}", answer="1")
        yield Prompt(ordinal=ordinal, problem=problem, token_ids=np.arange(2, 2 + 5 + index, dtype=np.int32))


def run(policy, *, iterations=2, batch_size=16, capacity=16, narrow=None, verifier=None, **services):
    """Run on virtual time; returns trainer, journal, stages. One request at a time of the `narrow` stage."""
    student = SimulatedStudent()
    needs = policy.needs
    offered = {
        "scorer": SimulatedTeacher() if needs.teacher_top_k else None,
        "teacher_generator": SimulatedStudent() if needs.teacher_responses else None,
        "reference": SimulatedTeacher() if needs.reference else None,
        **services,
    }
    limits = dict.fromkeys(StagesConfig.model_fields, StageConfig(timeout_s=600.0))
    limits |= {narrow: StageConfig(concurrency=1, timeout_s=600.0)} if narrow else {}
    stages = Stages(
        Services(generator=student, candidate_scorer=student, verifier=verifier or SimulatedVerifier(), **offered),
        StagesConfig(**limits),
        SamplingConfig(max_response_tokens=64),
        student=PlainVocabulary(),
        teacher=PlainVocabulary(),
        run_seed=0,
        max_running_prompts=capacity,
        max_probes_per_prompt=needs.probes_per_prompt,
        max_samples_per_prompt=needs.samples_per_prompt,
    )
    journal, trainer = Journal(), SimulatedTrainer()
    orchestrator = Orchestrator(
        OrchestratorSettings(
            iterations=iterations,
            batch_size=batch_size,
            max_staleness=0,
            capacity_prompts=capacity,
            capacity_bytes=1 << 30,
            max_response_tokens=64,
            vocab_size=VOCAB_SIZE,
            weight_update_timeout_s=60.0,
            max_dead_share=0.1,
        ),
        prompts=prompts(),
        policy=policy,
        stages=stages,
        trainer=trainer,
        weight_sinks=[student],
        observer=journal,
    )
    journal.ledger = orchestrator.state.ledger
    run_on_virtual_time(orchestrator.run())
    return trainer, journal, stages


def grpo(**settings):
    return GrpoPolicy(GrpoPolicy.Settings(**settings), context(reference_kl=True))


def kd(**settings):
    return KdPolicy(KdPolicy.Settings(**settings), context())


@pytest.mark.parametrize("narrow", [None, "rollout", "verify", "reference"])
def test_grpo_trains_a_group_per_prompt_with_a_reference_and_without_a_teacher(narrow):
    trainer, _, stages = run(grpo(), narrow=narrow)  # whole groups fit into the mailbox of a slow stage
    for step, batch in enumerate(trainer.batches):
        assert Counter(s.prompt_ordinal for s in batch) == dict.fromkeys(range(16 * step, 16 * step + 16), 8)
        assert {s.version.step for s in batch} == {step}
        assert all(len(s.reference_logprobs) == len(s.advantages) == len(s.response_ids) for s in batch)
        assert len({s.response_ids.tobytes() for s in batch}) > 8 * 16 - 5  # every sample has a seed of its own
    assert {stage.name for stage in stages.all} >= {"rollout", "verify", "reference"}
    assert stages.score.counters.completed == 0
    assert stages.reference.counters.completed == 2 * 16 * 8


def test_the_first_sample_of_a_group_is_the_rollout_of_a_run_with_one():
    group, _, _ = run(grpo(), iterations=1)
    single, _, _ = run(OpdPolicy(OpdPolicy.Settings(), context()), iterations=1)
    firsts = [group.batches[0][8 * i].response_ids.tolist() for i in range(16)]
    assert firsts == [s.response_ids.tolist() for s in single.batches[0]]


def test_samples_without_evidence_are_left_out_of_mean_and_batch_and_counted():
    trainer, journal, _ = run(grpo(), verifier=Undecided())
    samples = [sample for result in journal.results for sample in result.samples]
    left_out = [sample for sample in samples if sample.supervision is None]
    assert len(samples) == 2 * 16 * 8
    assert 10 < len(left_out) < 80
    assert sum(map(len, trainer.batches)) == len(samples) - len(left_out)
    assert {s.record["left_out"] for s in left_out} == {"verifier: timeout"}
    assert all(s.metrics["grpo/left_out"] == 1.0 for s in left_out)
    for ordinal in range(32):
        group = [s for s in samples if s.record["problem_id"] == f"p{ordinal}"]
        rewards = [1.0 if s.record["verdict"] == "correct" else 0.0 for s in group if s.supervision is not None]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        found = [s.supervision.advantages for s in group if s.supervision is not None]
        for reward, advantages in zip(rewards, found, strict=True):
            assert advantages == pytest.approx((reward - mean) / (deviation + 1e-6), abs=1e-6)


def test_a_prompt_whose_whole_group_has_no_evidence_is_accounted_as_left_out_and_counts_for_staleness():
    class UndecidedOnSome(SimulatedVerifier):
        async def verify(self, problem, response_text, *, deadline):
            verdict = await super().verify(problem, response_text, deadline=deadline)
            return Verdict.ERROR if problem.id in ("p3", "p20") else verdict

    trainer, journal, _ = run(grpo(), iterations=4, capacity=64, verifier=UndecidedOnSome())
    ledger = journal.ledger
    assert ledger.ordinals(PromptState.LEFT_OUT) == [3, 20, 35, 52]
    assert ledger.count(PromptState.TRAINED) == 4 * 16 - 4
    trained = {sample.prompt_ordinal for batch in trainer.batches for sample in batch}
    assert trained == set(ledger.ordinals(PromptState.TRAINED))
    for step, batch in enumerate(trainer.batches):  # none was admitted in its place, before the weights were due
        assert {sample.version.step for sample in batch} == {step}


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 1.0, 1.0], [0.0, 0.0]])
def test_a_group_without_direction_has_no_advantages(rewards):
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_room_is_reserved_for_every_sample_and_every_soft_target():
    one = worst_case_bytes(100, 1000, PolicyNeeds())
    assert worst_case_bytes(100, 1000, PolicyNeeds(samples_per_prompt=8)) == 8 * one
    eopd = EopdPolicy(EopdPolicy.Settings(tau_nats=0.0), context())
    spot = SpotPolicy(SpotPolicy.Settings(verifier_guidance=False), context())
    for policy in (grpo(), kd(), eopd, spot):
        trainer, _, _ = run(policy, iterations=1)
        sizes = Counter()
        for sample in trainer.batches[0]:
            sizes[sample.prompt_ordinal] += len(wire.encode(sample))
            if (targets := sample.soft_targets) is not None:
                arrays = [getattr(targets, name) for name in targets.__struct_fields__]
                needs, tokens = policy.needs, len(sample.response_ids)
                reserved = needs.soft_target_bytes + tokens * needs.soft_target_bytes_per_token
                assert sum(array.nbytes for array in arrays if array is not None) <= reserved
            longest = max(len(s.response_ids) for s in trainer.batches[0] if s.prompt_ordinal == sample.prompt_ordinal)
            bound = worst_case_bytes(len(sample.prompt_ids), longest, policy.needs)
        assert max(sizes.values()) <= worst_case_bytes(40, 64, policy.needs)
        assert sizes[sample.prompt_ordinal] <= bound


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
        asked = 0

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
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x05\x00\x00\x00hello")
    with pytest.raises(DataError, match="is no file of teacher responses"):
        kd(load=str(garbage))
    with pytest.raises(ConfigError, match="cannot read"):
        kd(load=str(tmp_path / "nowhere"))
    changed = Prompt(ordinal=0, problem=next(prompts()).problem, token_ids=np.array([9, 9], np.int32))
    with pytest.raises(DataError, match="rendered differently"):
        asyncio.run(kd(load=str(path), top_k=4).supervise(changed, _NoStages()))


async def test_eopds_gate_falls_to_the_midpoints_side_where_only_bounds_are_known_and_counts_it():
    class Bounded:
        teacher = None

        async def rollout(self):
            return await SimulatedStudent().generate(prompt.token_ids, sampling, deadline=0)

        async def score(self, response_ids, *, top_k):
            given = await SimulatedTeacher().score(
                prompt.token_ids, response_ids, top_k=top_k, temperature=1.0, deadline=0
            )
            middle = np.linspace(0.5, 1.4, len(response_ids), dtype=np.float32)
            return TokenScores(
                **{name: getattr(given, name) for name in ("logprobs", "topk_ids", "topk_logprobs")},
                entropy=middle,
                entropy_lower=middle - 0.1,
                entropy_upper=middle + 0.1,
                version=WeightVersion(0, 0),
            )

        async def verify(self, response_ids):
            return Verdict.WRONG

        def decode(self, token_ids):
            return ""

    prompt = next(prompts())
    sampling = SamplingSettings(max_tokens=61, stop_token_ids=(END_TOKEN,), seed=3)
    (sample,) = await EopdPolicy(EopdPolicy.Settings(), context()).supervise(prompt, Bounded())
    middle = np.linspace(0.5, 1.4, len(sample.supervision.response_ids))
    assert sample.supervision.soft_targets.positions.tolist() == np.flatnonzero(middle > 0.8).tolist()
    assert sample.metrics["eopd/uncertain"] == pytest.approx(np.mean(np.abs(middle - 0.8) < 0.1), abs=1e-9)


@pytest.mark.parametrize("selection", ["score", "random", "entropy"])
def test_controls_choose_positions_without_asking_the_student(selection):
    _, journal, stages = run(SpotPolicy(SpotPolicy.Settings(selection=selection), context(run_seed=5)))
    records = [s.record for r in journal.results for s in r.samples]
    assert stages.candidates.counters.completed == (32 if selection == "score" else 0)
    assert sum(len(r["selected_positions"]) for r in records) > 55
    by_entropy = 0
    for record in records:
        entropy = record["teacher_entropy_nats"]
        allowed = [i for i, token in enumerate(record["response_ids"]) if token > 1]
        best = sorted(sorted(allowed, key=lambda i: -entropy[i])[:2])
        by_entropy += record["selected_positions"] == best
    assert (by_entropy == len(records)) == (selection == "entropy")
    if selection == "entropy":  # the same choice as the score's variant H, without its requests
        _, variant, _ = run(SpotPolicy(SpotPolicy.Settings(score_variant="H"), context()))
        chosen = [s.record["selected_positions"] for r in variant.results for s in r.samples]
        assert chosen == [record["selected_positions"] for record in records]
    again, other = (
        [s.record["selected_positions"] for r in run(policy)[1].results for s in r.samples]
        for policy in (SpotPolicy(SpotPolicy.Settings(selection=selection), context(run_seed=seed)) for seed in (5, 6))
    )
    assert again == [record["selected_positions"] for record in records]
    assert (again != other) == (selection == "random")


def test_without_verifier_guidance_every_selected_position_keeps_the_teachers_prior_and_nothing_is_probed():
    _, journal, stages = run(SpotPolicy(SpotPolicy.Settings(verifier_guidance=False), context()))
    assert stages.probe.counters.completed == 0
    for result in journal.results:
        for sample in result.samples:
            targets = sample.supervision.soft_targets
            assert targets.positions.tolist() == sample.record["selected_positions"]
            assert targets.weights == pytest.approx([0.1 / len(targets.positions)] * len(targets.positions))
            priors = [[c["prior"] for c in branch["candidates"]] for branch in sample.record["branches"]]
            assert targets.probabilities == pytest.approx(np.array(priors), abs=1e-5)
