"""A run that gets nowhere is noticed, explained and ended; one that is only slow is left alone."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from limits import same_limits
from only_teacher import only
from problem_files import FEW

from spot_async.base.tasks import alongside, root_cause
from spot_async.checks.plan import plan_training
from spot_async.checks.questions import Asked
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, StalledError, ThrottledError
from spot_async.loop.events import Phase, ResponseJudged, StepBegan
from spot_async.loop.publishing import LiveEvaluation
from spot_async.policies.opd import OpdPolicy
from spot_async.testing.services import (
    VOCAB_SIZE,
    Latency,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    capabilities,
)
from spot_async.testing.simulation import make_policy, make_run
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import PolicyNeeds
from spot_async.watchdog import monitor
from spot_async.watchdog.monitor import Watchdog
from spot_async.watchdog.silence import (
    MARGIN_S,
    PUMPS,
    Commit,
    Progress,
    look_at_pumps,
    silence_limits,
)

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
LIMITS = dict.fromkeys([None, *get_args(Phase)], TIMEOUT_S)
FOR_EVER = 1e9


class SlowTeacher(SimulatedTeacher):
    """Takes `seconds` for each score, from the given call on; a real one that hangs would ignore its deadline."""

    def __init__(self, seconds, after_calls=0):
        super().__init__()
        self.seconds, self.calls_left = seconds, after_calls

    async def score(self, request, **rest):
        self.calls_left -= 1
        if self.calls_left < 0:
            await asyncio.sleep(self.seconds)
        return await super().score(request, **rest)


class ThrottledTeacher(SimulatedTeacher):
    """Tells the first request to come back long after the watchdog's limit, and the next ones for as long."""

    opens_s = 5 * TIMEOUT_S

    async def score(self, request, **rest):
        left_s = self.opens_s - asyncio.get_running_loop().time()
        if left_s > 0:
            raise ThrottledError("429: daily limit", retry_after_s=left_s)
        return await super().score(request, **rest)


class SlowTrainer(SimulatedTrainer):
    async def train(self, iteration, batch):
        await asyncio.sleep(TIMEOUT_S - 1)
        return await super().train(iteration, batch)


class WaitingPolicy(OpdPolicy):
    """Awaits something of its own for ever, at the fourth prompt."""

    async def supervise(self, prompt, stages):
        if prompt.ordinal == 3:
            await asyncio.sleep(FOR_EVER)
        return await super().supervise(prompt, stages)


class HangingTrainer(SimulatedTrainer):
    """Never ends the second step."""

    async def train(self, iteration, batch):
        if iteration == 1:
            await asyncio.sleep(FOR_EVER)
        return await super().train(iteration, batch)


class Student(SimulatedStudent):
    """Takes `update_s` for new weights, a deadline or not, and for ever for the response to one prompt, if it is told.

    So does a real one whose connection hangs.
    """

    def __init__(self, update_s=0.0, hangs_at=None):
        super().__init__(latency=Latency(base_s=10.0))
        self.update_s, self.hangs_at = update_s, hangs_at

    async def generate(self, prompt_ids, *args, **rest):
        if self.hangs_at is not None and len(prompt_ids) == 5 + self.hangs_at:  # as `simulated_prompts` makes them
            await asyncio.sleep(FOR_EVER)
        return await super().generate(prompt_ids, *args, **rest)

    async def update_weights(self, snapshot, *, deadline):
        await asyncio.sleep(self.update_s)
        self.version = snapshot.version


def simulate(
    folder, *, policy=OpdPolicy, student=None, teacher=None, trainer=None, iterations=3, evaluate=None, **settings
):
    """A run under a watchdog on virtual time; returns the orchestrator, or raises what ended the run.

    `evaluate(events)` evaluates the weights of each iteration.
    """
    run = make_run(
        make_policy(policy),
        student=student or Student(),
        teachers=teacher and only(teacher),
        trainer=trainer,
        limits=same_limits(timeout_s=FOR_EVER),
        iterations=iterations,
        batch_size=8,
        weight_update_timeout_s=600.0,
        evaluation=evaluate and LiveEvaluation(lambda iteration: True, lambda iteration: evaluate(run.stages.events)),
        **settings,
    )
    orchestrator = run.orchestrator

    async def watched():
        with Watchdog(LIMITS, folder) as watchdog:
            orchestrator.stages.events.subscribe(watchdog)
            watchdog.on(StepBegan("training with opd", orchestrator))
            async with alongside(watchdog.watch):
                await orchestrator.run()
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]
        return orchestrator

    return run_on_virtual_time(watched())


def stalled(folder, **run):
    """The one line and the report of a run that must stall."""
    with pytest.raises(BaseExceptionGroup) as failures:
        simulate(folder, **run)
    cause = root_cause(failures.value)
    assert isinstance(cause, StalledError)
    return str(cause), (folder / "stall-report.txt").read_text()


def test_a_server_that_hangs_is_named_with_its_stage_and_its_oldest_request(tmp_path):
    line, report = stalled(tmp_path, teacher=SlowTeacher(FOR_EVER, after_calls=8 + 5))
    found = re.search(r"stage score of the teacher has not answered for (\d+) s: prompt (\d+) \(problem p(\d+)\)", line)
    assert found, line
    assert int(found[1]) == pytest.approx(TIMEOUT_S, abs=5)
    assert found[2] == found[3]
    assert str(tmp_path / "stall-report.txt") in line
    assert "score: 3 of 64 in flight, 0 waiting" in report
    assert "prompts trained" not in report.split("Counts")[0]
    assert re.search(r"prompts: 3 running, 5 queued, 0 batched, 8 trained", report)
    assert re.search(r"iteration 1 +\(weights confirmed: 1\)", report)
    assert re.search(r"prompts queued: 13\)", report)
    assert "in SlowTeacher.score" in report  # the tasks' stacks go down to what they await
    assert re.search(r"prompt \d+, prompt \d+, prompt \d+\n", report)
    assert "test_watchdog.py" in report.split("Threads")[1]


def test_a_policy_that_waits_by_itself_is_named_with_its_line(tmp_path):
    line, _ = stalled(tmp_path, policy=WaitingPolicy)
    assert "prompt 3 (problem p3) waits in the policy's own code, at " in line
    number = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "sleep(FOR_EVER)" in text)
    assert f"test_watchdog.py:{number} in WaitingPolicy.supervise" in line


def test_answers_that_lead_to_nothing_are_no_progress(tmp_path):
    class NeverContent(OpdPolicy):
        async def supervise(self, prompt, stages):
            while True:
                await stages.rollout()

    line, _ = stalled(tmp_path, policy=NeverContent)
    assert "requests are answered but no prompt finishes" in line
    assert "stage rollout of the student" in line


def test_slow_rollouts_and_long_training_steps_are_left_alone(tmp_path):
    orchestrator = simulate(tmp_path, teacher=SlowTeacher(600.0), trainer=SlowTrainer())
    assert orchestrator.state.iteration == 3
    assert not (tmp_path / "stall-report.txt").exists()


def test_a_run_that_waits_as_an_endpoint_told_it_to_has_not_stalled(tmp_path):
    assert simulate(tmp_path, teacher=ThrottledTeacher()).state.iteration == 3
    assert not (tmp_path / "stall-report.txt").exists()


def test_a_start_has_not_stalled_while_an_endpoint_answers_a_question_now_and_then(tmp_path):
    async def start(questions, retry_after_s):
        with Watchdog(LIMITS, tmp_path) as watchdog:
            asked = Asked([], [], (), timeout_s=2 * TIMEOUT_S, answered=watchdog.answered)
            async with alongside(watchdog.watch):
                for _ in range(questions):
                    refusals = iter([ThrottledError("429", retry_after_s=retry_after_s)])

                    async def ask(deadline, refusals=refusals):
                        for refusal in refusals:
                            raise refusal

                    await asked.answer("score", ask)
            return asyncio.get_running_loop().time()

    assert run_on_virtual_time(start(20, 100.0)) >= 2 * TIMEOUT_S
    with pytest.raises(BaseExceptionGroup) as failures:
        run_on_virtual_time(start(1, 1.5 * TIMEOUT_S))
    assert isinstance(root_cause(failures.value), StalledError)


def test_a_run_that_is_told_to_wait_again_and_again_ends_and_says_by_whom(tmp_path):
    class Closed(SimulatedTeacher):
        async def score(self, *args, **rest):
            raise ThrottledError("429", retry_after_s=3600.0)

    line, _ = stalled(tmp_path, teacher=Closed())
    assert "stage score of the teacher has not answered for" in line
    assert re.search(r"sent 2 x, paused for up to 6\d min at a time as it asked", line), line


def test_a_hung_publish_is_named_although_the_trainer_goes_on(tmp_path):
    line, report = stalled(tmp_path, student=Student(update_s=FOR_EVER), trainer=SlowTrainer(), max_staleness=2)
    assert line.startswith(
        "the run stalled: the student's servers have not confirmed the weights of iteration 1 for 900 s; the trainer "
    )
    assert re.search(
        r"The publish pump: iteration 1, waiting for the weight update\.\n.* from 900 s on that is a stall", report
    )
    assert re.search(r"The train pump: iteration \d, waiting for .*\n.* it would be a stall", report)


def test_a_hung_drain_is_named_with_the_request_that_holds_it_up(tmp_path):
    cannot = {"student": capabilities(VOCAB_SIZE, in_flight_updates=False)}
    line, _ = stalled(tmp_path, student=Student(hangs_at=10), max_staleness=1, capabilities=cannot)
    assert "the weights of iteration 1 wait for requests under way at the student: stage rollout of the student" in line
    assert "prompt 10 (problem p10)" in line


def test_a_hung_trainer_is_named_although_publishing_goes_on(tmp_path):
    async def evaluate(events):
        for finished in range(1, 100):
            await asyncio.sleep(100.0)
            events.publish(ResponseJudged(finished, 100))

    line, _ = stalled(tmp_path, trainer=HangingTrainer(), max_staleness=1, evaluate=evaluate)
    assert re.match(r"the run stalled: the trainer has not answered for 90\d s; publishing continues; see ", line)


def test_a_frozen_rank_is_named_beside_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "standing_still", lambda root: ["rank 1 (pid 4242) is STOPPED by a signal"])
    line, _ = stalled(tmp_path, trainer=HangingTrainer())
    assert "the trainer has not answered; rank 1 (pid 4242) is STOPPED by a signal; see " in line


def test_an_evaluation_that_hangs_beside_training_is_named_and_no_prompt_of_training(tmp_path):
    async def evaluate(events):
        await asyncio.sleep(FOR_EVER)

    line, report = stalled(tmp_path, trainer=SlowTrainer(), max_staleness=2, evaluate=evaluate)
    assert "the run stalled: the evaluation of iteration 1 has judged no response for 900 s; the trainer " in line
    assert "The publish pump: iteration 1, waiting for the evaluation." in report


@pytest.mark.parametrize("in_flight_updates", [True, False])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_pumps_that_wait_for_each_other_for_long_are_left_alone(tmp_path, max_staleness, in_flight_updates):
    async def evaluate(events):
        await asyncio.sleep(TIMEOUT_S - 2)

    orchestrator = simulate(
        tmp_path,
        student=Student(update_s=TIMEOUT_S - 2),
        trainer=SlowTrainer(),
        iterations=5,
        max_staleness=max_staleness,
        capabilities={"student": capabilities(VOCAB_SIZE, in_flight_updates=in_flight_updates)},
        evaluate=evaluate,
    )
    assert orchestrator.state.iteration == 5
    assert not (tmp_path / "stall-report.txt").exists()


@pytest.mark.parametrize(
    ("training", "publishing", "silences_s", "overdue", "is_stalled"),
    [
        ("train", "update weights", (10.0, 900.0), "publish", True),
        ("train", "update weights", (900.0, 10.0), "train", True),
        ("train", "wait for weights", (10.0, 5000.0), "train", False),  # publishing has nothing to do
        ("wait for batch", "drain", (5000.0, 900.0), "publish", True),  # which holds all requests up
        ("wait for batch", "write weights", (5000.0, 10.0), "publish", False),
        ("wait for batch", "drain", (5000.0, 10.0), "publish", False),
        ("update weights", "evaluate", (5000.0, 10.0), "publish", False),
        ("update weights", "wait for weights", (5000.0, 900.0), "publish", True),  # a bug, since each waits
    ],
)
def test_a_pump_that_waits_for_the_other_is_not_at_fault(training, publishing, silences_s, overdue, is_stalled):
    progress, now_s = Progress(now_s=0.0), 5000.0
    for pump, silence_s in zip(PUMPS, silences_s, strict=True):
        progress.begin((pump,), now_s - silence_s)
    phases = {"train": (training, 3), "publish": (publishing, 2)}
    looks = look_at_pumps(phases, progress, LIMITS, now_s)
    assert looks[0].is_stalled == is_stalled
    assert is_stalled or not any(look.is_stalled for look in looks)
    assert looks[0].pump == overdue or looks[0].waits_for_other


def test_a_process_that_did_not_run_has_not_been_silent():
    progress = Progress(now_s=0.0)
    progress.commit(Commit.PROMPT_QUEUED, "prompt 1", 100.0)
    progress.forgive(5000.0, 5110.0)
    assert progress.silence_s(5110.0) == 10.0
    progress.forgive(5000.0, 5111.0)  # never into the future
    assert progress.silence_s(5111.0) == 0.0


def quickstart(*overrides):
    return load_config(ROOT / "configs" / "quickstart.yaml", [FEW, *overrides])


SPOT_NEEDS = PolicyNeeds(teacher_top_k=16, candidate_logprobs=True, probes_per_prompt=8)


def test_the_default_is_longer_than_every_deadline_of_the_run():
    config = quickstart("training.step_timeout_s=7200", "evaluation.timeout_s=3000")
    limits = silence_limits(config, SPOT_NEEDS)
    chain = ["rollout", "score", "candidates", "probe", "verify", "verify"]
    prompt_s = len(chain) * config.stages.timeout_s + config.teacher.serving.recovery_timeout_s
    assert limits["wait for batch"] > prompt_s
    assert limits["train"] > 7200
    assert limits["update weights"] > 600
    assert limits["evaluate"] > 3 * 3000
    assert limits[None] > 7200
    assert silence_limits(config, SPOT_NEEDS, revises=True)["train"] > 2 * 7200  # a look has a deadline of its own


def test_a_policy_that_goes_through_its_stages_in_rounds_may_be_silent_for_as_many_deadlines():
    config = quickstart()
    recovery_s = config.teacher.serving.recovery_timeout_s

    def prompt_s(rounds):
        needs = msgspec.structs.replace(SPOT_NEEDS, rounds=rounds)
        return silence_limits(config, needs)["wait for batch"] - MARGIN_S - recovery_s

    assert prompt_s(4) == 4 * prompt_s(1)
    with pytest.raises(ConfigError, match=r"\(24 x stages.timeout_s \+ student.serving.recovery_timeout_s\)"):
        silence_limits(quickstart("run.stall_timeout_s=60"), msgspec.structs.replace(SPOT_NEEDS, rounds=4))


def test_a_time_out_shorter_than_the_stages_deadlines_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"run.stall_timeout_s=60 is shorter .*6 x stages.timeout_s \+ "):
        plan_training(quickstart("run.stall_timeout_s=60"))
    assert silence_limits(quickstart("run.stall_timeout_s=0"), SPOT_NEEDS) is None
