"""Groups, references, gates and controls: the methods through the orchestrator on virtual time."""

from __future__ import annotations

import statistics
from collections import Counter
from io import StringIO

import numpy as np
import pytest
from joined_policy import Reads
from rich.console import Console

from spot_async.base import wire
from spot_async.config import StageConfig, StagesConfig
from spot_async.loop.admission import PromptState, is_trained
from spot_async.loop.sample_bytes import worst_case_bytes
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.grpo import GrpoPolicy, group_advantages
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.telemetry.console import RunConsole
from spot_async.testing.services import END_TOKEN, SimulatedVerifier, generation, token_scores
from spot_async.testing.simulation import ScriptedStages, make_policy, policy_context, simulated_prompts, simulated_run
from spot_async.types import Judgement, PolicyNeeds, Verdict
from spot_async.verification import BoxedMatch


def grpo():
    return make_policy(GrpoPolicy, policy_context(reference_kl=True))


class Undecided(SimulatedVerifier):
    """Gives this verdict, which is no evidence, where it is due, whatever is asked again."""

    def __init__(self, verdict, due):
        super().__init__()
        self.verdict, self.due = verdict, due

    async def verify(self, problem, response_text, *, deadline):
        verdict = await super().verify(problem, response_text, deadline=deadline)
        return self.verdict if self.due(problem, response_text) else verdict


@pytest.mark.parametrize("narrow", [None, "rollout", "verify", "reference"])
def test_grpo_trains_a_group_per_prompt_with_a_reference_and_without_a_teacher(narrow):
    config = StagesConfig(**{narrow: StageConfig(concurrency=1)} if narrow else {})
    run = simulated_run(grpo(), limits=config)  # whole groups fit into the waiting room of a slow stage
    stages = run.stages
    for step, batch in enumerate(run.batches):
        assert Counter(s.prompt_ordinal for s in batch) == dict.fromkeys(range(16 * step, 16 * step + 16), 8)
        assert {s.version.step for s in batch} == {step}
        assert all(len(s.reference_logprobs) == len(s.advantages) == len(s.response_ids) for s in batch)
        assert len({s.response_ids.tobytes() for s in batch}) > 8 * 16 - 5  # every sample has a seed of its own
    assert {stage.name for stage in stages.all} >= {"rollout", "verify", "reference"}
    assert stages.teacher().score.counters.completed == 0
    assert stages.reference.counters.completed == 2 * 16 * 8


def test_the_first_sample_of_a_group_is_the_rollout_of_a_run_with_one():
    group = simulated_run(grpo(), iterations=1)
    single = simulated_run(make_policy(OpdPolicy), iterations=1)
    firsts = [group.batches[0][8 * i].response_ids.tolist() for i in range(16)]
    assert firsts == [s.response_ids.tolist() for s in single.batches[0]]


def test_samples_without_evidence_are_left_out_of_mean_and_batch_and_counted():
    one_in_six = Undecided(Verdict.TIMEOUT, lambda problem, text: sum(map(int, text.split())) % 6 == 0)
    run = simulated_run(grpo(), verifier=one_in_six)
    samples = run.samples
    left_out = [sample for sample in samples if sample.supervision is None]
    assert len(samples) == 2 * 16 * 8
    assert 10 < len(left_out) < 80
    assert len(run.trained) == len(samples) - len(left_out)
    assert {s.record["left_out"] for s in left_out} == {"verifier: timeout"}
    assert all(s.metrics["grpo/left_out"] == 1.0 for s in left_out)
    for ordinal in range(32):
        group = [s for s in samples if s.record["problem_id"] == f"p{ordinal}"]
        rewards = [1.0 if s.record["verdict"] == "correct" else 0.0 for s in group if s.supervision is not None]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        found = [s.supervision.advantages for s in group if s.supervision is not None]
        for reward, advantages in zip(rewards, found, strict=True):
            assert advantages == pytest.approx((reward - mean) / (deviation + 1e-6), abs=1e-6)


def test_grpo_learns_from_a_verifiers_own_number_also_where_it_gives_no_verdict():
    class Grades(SimulatedVerifier):
        async def verify(self, problem, response_text, *, deadline):
            if problem.id == "p3":
                return Judgement(Verdict.UNJUDGED, 0.7, "as good as all others")
            return Judgement(Verdict.WRONG, len(response_text) / 10)

    run = simulated_run(grpo(), iterations=1, verifier=Grades())
    for ordinal in range(16):
        group = [s for s in run.samples if s.record["problem_id"] == f"p{ordinal}"]
        rewards = [s.record["reward"] for s in group]
        assert rewards == ([0.7] * 8 if ordinal == 3 else [len(s.record["response"]) / 10 for s in group])
        wanted = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
        advantages = np.array([s.supervision.advantages[0] for s in group])
        assert advantages == pytest.approx(np.zeros(8) if ordinal == 3 else wanted, abs=1e-5)
        assert {s.metrics["grpo/no_signal"] == 1.0 for s in group} == {len(set(rewards)) == 1}
        assert {s.metrics.get("rollout/accuracy") for s in group} == {None if ordinal == 3 else 0.0}
        assert [s.metrics["rollout/reward"] for s in group] == rewards
        assert {s.record.get("feedback") for s in group} == {"as good as all others" if ordinal == 3 else None}


def test_a_prompt_whose_whole_group_has_no_evidence_is_accounted_as_left_out_and_counts_for_staleness():
    on_some = Undecided(Verdict.ERROR, lambda problem, text: problem.id in ("p3", "p20"))
    run = simulated_run(grpo(), iterations=4, capacity_prompts=64, verifier=on_some)
    book = run.orchestrator.book
    assert book.ordinals(PromptState.LEFT_OUT) == [3, 20, 35, 52]
    assert book.count(PromptState.TRAINED) == 4 * 16 - 4
    assert {each.prompt_ordinal for each in run.trained} == set(book.ordinals(PromptState.TRAINED))
    for step, batch in enumerate(run.batches):  # none was admitted in its place, before the weights were due
        assert {sample.version.step for sample in batch} == {step}


def test_a_batch_in_which_every_prompt_was_left_out_makes_no_step_says_so_and_the_run_goes_on():
    on_two = Undecided(Verdict.ERROR, lambda problem, text: problem.id in ("p2", "p3"))
    run = simulated_run(grpo(), iterations=3, batch_size=2, verifier=on_two)
    assert [len(batch) for batch in run.batches] == [16, 0, 16]
    assert [{sample.version.step for sample in batch} for batch in run.batches] == [{0}, set(), {2}]
    assert [is_trained(result.samples) for result in run.journal.results] == [True, False, True]
    written = StringIO()
    console = RunConsole(Console(file=written, width=300), iterations=3)
    for result in run.journal.results:
        console.on(result)
    first, warning, second, third = written.getvalue().splitlines()
    assert warning == (
        "warning: iteration 2 made no step: none of its 16 samples could be trained on (16 x verifier: error); "
        "the weights stay as they are"
    )
    assert ["loss" in line for line in (first, second, third)] == [True, False, True]


@pytest.mark.parametrize(
    "policy",
    [
        lambda: make_policy(OpdPolicy),
        lambda: make_policy(EopdPolicy),
        lambda: make_policy(SpotPolicy, verifier_guidance=False),
        lambda: make_policy(KdPolicy),
    ],
)
def test_problems_without_answers_train_and_say_nothing_of_accuracy(policy):
    """Neither that all is wrong nor that nothing could be verified."""
    verifier = BoxedMatch(BoxedMatch.Settings())
    run = simulated_run(policy(), verifier=verifier, prompts=simulated_prompts(answer=""))
    judged = simulated_run(policy(), verifier=verifier)
    assert [s.response_ids.tolist() for s in run.trained] == [s.response_ids.tolist() for s in judged.trained]
    assert run.stages.verify.counters.failed == 0
    assert run.stages.verify.counters.completed == 2 * 16  # asked once
    assert {sample.record["verdict"] for sample in run.samples} == {"unjudged"}
    names = {name for sample in run.samples for name in sample.metrics}
    assert not names & {"rollout/accuracy", "rollout/unverified", "teacher/accuracy", "probe/accuracy"}


def test_a_policy_may_learn_from_the_responses_in_the_data_and_ask_no_server():
    run = simulated_run(Reads(), max_staleness=1)
    prompts = simulated_prompts(len(run.trained))
    written = [[*map(int, prompt.problem.response.split()), END_TOKEN] for prompt in prompts]
    assert [each.response_ids.tolist() for each in run.trained] == written
    assert not any(stage.counters.completed for stage in run.stages.all)


@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_a_group_without_direction_has_no_advantages(rewards):
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_a_response_without_a_reward_stands_beside_its_group():
    assert group_advantages([1.0, None, 0.0]) == pytest.approx([0.5**0.5, 0.0, -(0.5**0.5)], abs=1e-5)


def test_room_is_reserved_for_every_sample_and_every_soft_target():
    one = worst_case_bytes(100, 1000, PolicyNeeds())
    assert worst_case_bytes(100, 1000, PolicyNeeds(samples_per_prompt=8)) == 8 * one
    eopd = make_policy(EopdPolicy, tau_nats=0.0)
    spot = make_policy(SpotPolicy, verifier_guidance=False)
    for policy in (grpo(), make_policy(KdPolicy), eopd, spot):
        trained = simulated_run(policy, iterations=1).trained
        sizes = Counter()
        for sample in trained:
            sizes[sample.prompt_ordinal] += len(wire.encode(sample))
            arrays = [getattr(each, name) for each in sample.soft_targets for name in each.__struct_fields__]
            needs, tokens = policy.needs, len(sample.response_ids)
            reserved = needs.term_bytes + tokens * needs.term_bytes_per_token
            assert sum(array.nbytes for array in arrays if isinstance(array, np.ndarray)) <= reserved
            longest = max(len(s.response_ids) for s in trained if s.prompt_ordinal == sample.prompt_ordinal)
            bound = worst_case_bytes(len(sample.prompt_ids), longest, policy.needs)
        assert max(sizes.values()) <= worst_case_bytes(40, 64, policy.needs)
        assert sizes[sample.prompt_ordinal] <= bound


async def test_eopds_gate_falls_to_the_midpoints_side_where_only_bounds_are_known_and_counts_it():
    middle = np.linspace(0.5, 1.4, 61, dtype=np.float32)
    bounds = {"entropy_lower": middle - 0.1, "entropy_upper": middle + 0.1}
    scores = token_scores(np.zeros(61), entropy=middle, topk_ids=np.tile(np.arange(2, 18), (61, 1)), **bounds)
    stages = ScriptedStages(generation(range(2, 63)), scores)
    (sample,) = await make_policy(EopdPolicy).supervise(next(simulated_prompts()), stages)
    assert sample.supervision.soft_targets[0].positions.tolist() == np.flatnonzero(middle > 0.8).tolist()
    assert sample.metrics["eopd/uncertain"] == pytest.approx(np.mean(np.abs(middle - 0.8) < 0.1), abs=1e-9)


@pytest.mark.parametrize(
    "selection",
    ["score", "entropy", *(pytest.param(each, marks=pytest.mark.long) for each in ("random", "earliest"))],
)
def test_controls_choose_positions_without_asking_the_student(selection):
    run = simulated_run(make_policy(SpotPolicy, policy_context(run_seed=5), selection=selection))
    records = [sample.record for sample in run.samples]
    assert run.stages.candidates.counters.completed == 32  # of a control: about what it chose, for the record
    assert sum(len(r["selected_positions"]) for r in records) > 55
    by_entropy = by_place = 0
    for record in records:
        entropy = record["teacher_entropy_nats"]
        allowed = [i for i, token in enumerate(record["response_ids"]) if token > 1]
        best = sorted(sorted(allowed, key=lambda i: -entropy[i])[:2])
        by_entropy += record["selected_positions"] == best
        by_place += record["selected_positions"] == allowed[:2]
    assert (by_entropy == len(records)) == (selection == "entropy")
    assert (by_place == len(records)) == (selection == "earliest")
    if selection == "entropy":  # the same choice as the score's variant H, without its requests
        variant = simulated_run(make_policy(SpotPolicy, score_variant="H"))
        chosen = [sample.record["selected_positions"] for sample in variant.samples]
        assert chosen == [record["selected_positions"] for record in records]
    again, other = (
        [sample.record["selected_positions"] for sample in simulated_run(policy).samples]
        for policy in (make_policy(SpotPolicy, policy_context(run_seed=seed), selection=selection) for seed in (5, 6))
    )
    assert again == [record["selected_positions"] for record in records]
    assert (again != other) == (selection == "random")


def test_without_verifier_guidance_every_selected_position_keeps_the_teachers_prior_and_nothing_is_probed():
    run = simulated_run(make_policy(SpotPolicy, verifier_guidance=False))
    assert run.stages.probe.counters.completed == 0
    for sample in run.samples:
        (targets,) = sample.supervision.soft_targets
        assert targets.positions.tolist() == sample.record["selected_positions"]
        assert targets.weights == pytest.approx([0.1 / len(targets.positions)] * len(targets.positions))
        priors = [[c["prior"] for c in branch["candidates"]] for branch in sample.record["branches"]]
        assert targets.probabilities == pytest.approx(np.array(priors), abs=1e-5)
