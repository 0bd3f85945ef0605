"""A run that is killed at any moment and continues trains every prompt once, to the weights of one that was not killed.

Ledger and manifests are the real ones. The trainer's weights are a hash of everything that it was fed, in order, so the
last ones are equal only if nothing was lost, repeated, or trained in another order.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from only_teacher import only

from spot_async.base import wire
from spot_async.errors import BudgetSpentError, PermanentError
from spot_async.loop.publishing import LiveEvaluation
from spot_async.loop.resuming import Resumption
from spot_async.policies.grpo import GrpoPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.run_directory import manifest
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.run_directory.manifest import Manifest
from spot_async.running.checkpoints import go_back
from spot_async.testing.services import VOCAB_SIZE, SimulatedStudent, SimulatedTeacher, capabilities
from spot_async.testing.simulation import make_policy, make_run, simulated_prompts
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import TrainReport, WeightSnapshot, WeightVersion

ITERATIONS, BATCH, EVERY = 7, 4, 2
DEAD = 9  # the ordinal of a prompt that is given up whenever it is tried


@dataclass
class HashingTrainer:
    """Its weights are a hash of all that it was fed. Versions count as the same whatever their lineage."""

    lineage: int = 0
    weights: str = ""
    trained: Counter[int] = field(default_factory=Counter)
    to_save: tuple[Path, str] | None = None

    async def train(self, iteration, batch):
        await asyncio.sleep(1.0)
        for each in batch:
            assert each.version.lineage == self.lineage
        fed = wire.encode([(each.prompt_ordinal, each.response_ids, each.version.step) for each in batch])
        self.weights = hashlib.blake2b(self.weights.encode() + fed, digest_size=8).hexdigest()
        self.trained.update({each.prompt_ordinal for each in batch})
        snapshot = WeightSnapshot(directory=f"step-{iteration + 1}", version=WeightVersion(self.lineage, iteration + 1))
        return TrainReport(snapshot=snapshot, metrics={})

    async def published(self, step):
        return ()

    async def save(self, step, directory):
        self.to_save = Path(directory), self.weights

    async def saved(self, step):
        await asyncio.sleep(0.3)
        write(*self.to_save)
        await asyncio.sleep(0.3)
        return 0.6


def write(directory, weights):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "weights").write_text(weights)


class NowAndThen:
    """`Checkpoints` without threads, which a virtual loop cannot have."""

    def __init__(self, run, beginning, ledger):
        self.run, self.beginning, self.ledger = run, beginning, ledger

    def is_due(self, iteration):
        return iteration % EVERY == 0

    def directory(self, iteration):
        return str(manifest.checkpoint_directory(self.run, iteration))

    async def commit(self, iteration):
        await asyncio.sleep(0.2)
        directory = manifest.checkpoint_directory(self.run, iteration)
        manifest.commit(directory, Manifest(step=iteration, lineages=self.beginning.lineages, keys="", data=""))
        self.ledger.forget_samples(iteration)
        manifest.prune(self.run, keep=2, keep_every=None)


class Teacher(SimulatedTeacher):
    """Counts what it is asked, and refuses one problem."""

    asked = 0

    async def score(self, request, **rest):
        self.asked += 1
        if len(request.prompt_ids) == 5 + DEAD:
            raise PermanentError("400: too long")
        return await super().score(request, **rest)


def part_of_a_run(path, policy, max_staleness, kill_s, teacher, *, stop_s=None):
    """Begin or continue the run in `path`. Return its trainer; None if it was killed at `kill_s`.

    At `stop_s` it is asked to stop.
    """
    directory = RunDirectory(path)
    with closing(Ledger.open(path)) as ledger:
        beginning, resumption, trainer = Manifest(step=0, lineages=(0,), keys="", data=""), None, HashingTrainer()
        if manifest.committed(path):
            found = manifest.newest(path)
            lineages = (*found.manifest.lineages, found.manifest.step)
            beginning = Manifest(step=found.manifest.step, lineages=lineages, keys="", data="")
            trainer = HashingTrainer(len(lineages) - 1, (found.directory / "weights").read_text())
        if any(True for _ in ledger.prompts()):
            limits = {"max_staleness": max_staleness, "batch_size": BATCH, "refill_at_most": None, "teacher_lag": 0}
            resumption = go_back(directory, beginning, ledger, SimpleNamespace(**limits))
        student = SimulatedStudent()
        student.version = WeightVersion(beginning.lineage, beginning.step)
        run = make_run(
            policy,
            student=student,
            teachers=only(teacher),
            trainer=trainer,
            capabilities={"student": capabilities(VOCAB_SIZE)},
            prompts=simulated_prompts(problems=1000),
            iterations=ITERATIONS,
            batch_size=BATCH,
            max_staleness=max_staleness,
            max_dead_share=1.0,
            ledger=ledger,
            checkpoints=NowAndThen(path, beginning, ledger),
            resumption=resumption or Resumption(),
        )

        async def until_killed():
            if stop_s is not None:
                asyncio.get_running_loop().call_later(stop_s, run.orchestrator.stop)
            async with asyncio.timeout(kill_s):
                await run.orchestrator.run()

        with suppress(TimeoutError):
            run_on_virtual_time(until_killed())
            return trainer
    return None


def whole_run(path, policy, max_staleness, kills, teacher):
    """Run to the end through these kills, and return the trainer of its last part and how often it began."""
    path.mkdir()
    for begun, kill_s in enumerate((*kills, None), start=1):
        trainer = part_of_a_run(path, policy, max_staleness, kill_s, teacher)
        if trainer is not None:
            return trainer, begun
    raise AssertionError("it did not end")


def check_once(path):
    """Every prompt before the last trained one is in exactly one batch, or dead."""
    with closing(Ledger.open(path)) as ledger:
        rows = list(ledger.prompts())
    batches = Counter(row.batch for row in rows if row.state in ("batched", "left_out"))
    assert batches == dict.fromkeys(range(ITERATIONS), BATCH)
    assert [row.ordinal for row in rows if row.state == "dead"] == [DEAD]
    assert [row.ordinal for row in rows] == list(range(ITERATIONS * BATCH + 1))


@pytest.mark.parametrize("policy", [SpotPolicy, pytest.param(GrpoPolicy, marks=pytest.mark.long)])
def test_a_strict_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(policy, tmp_path):
    made = make_policy(policy)
    needs_teacher = made.needs.teacher
    asked = Teacher()
    expected, _ = whole_run(tmp_path / "whole", made, 0, (), asked if needs_teacher else None)
    for seed in range(8):
        rng = random.Random(f"{policy.__name__} {seed}")
        kills = [rng.uniform(0.05, 9.0) for _ in range(rng.randint(1, 4))]
        path, teacher = tmp_path / str(seed), Teacher()
        trainer, begun = whole_run(path, made, 0, kills, teacher if needs_teacher else None)
        assert trainer.weights == expected.weights, (kills, begun)
        if needs_teacher:
            check_once(path)
            # What was finished is in the ledger. Only samples of weights that no checkpoint has are asked for again:
            # those after the last one, and those whose checkpoint is being saved.
            assert teacher.asked <= asked.asked + (begun - 1) * EVERY * BATCH


@pytest.mark.parametrize("max_staleness", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_asynchronous_run_that_was_killed_trains_every_prompt_once(max_staleness, tmp_path):
    for seed in range(6):
        rng = random.Random(f"{max_staleness} {seed}")
        kills = [rng.uniform(0.05, 7.0) for _ in range(rng.randint(1, 4))]
        path = tmp_path / str(seed)
        whole_run(path, make_policy(SpotPolicy), max_staleness, kills, Teacher())
        check_once(path)


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_run_that_was_asked_to_stop_loses_no_step(max_staleness, tmp_path):
    policy = make_policy(SpotPolicy)
    expected, _ = whole_run(tmp_path / "whole", policy, max_staleness, (), Teacher())
    for seed in range(4):
        path, rng = tmp_path / str(seed), random.Random(f"{max_staleness} {seed}")
        path.mkdir()
        trained, stopped_s = Counter(), []
        while expected.trained.keys() - trained.keys():
            stopped_s.append(rng.uniform(0.05, 6.0))
            trainer = part_of_a_run(path, policy, max_staleness, None, Teacher(), stop_s=stopped_s[-1])
            trained += trainer.trained
            if trainer.trained and expected.trained.keys() - trained.keys():
                assert (manifest.newest(path).directory / "weights").read_text() == trainer.weights
        assert set(trained.values()) == {1}, (stopped_s, "steps were made twice")
        check_once(path)
        if max_staleness == 0:
            assert trainer.weights == expected.weights, stopped_s


class PoorTeacher(Teacher):
    """There is money for three batches and some prompts of the fourth."""

    async def score(self, request, **rest):
        if self.asked > 3 * BATCH + 2:
            raise BudgetSpentError("teacher.backend.budget=1 is spent")
        return await super().score(request, **rest)


def test_a_run_that_ran_out_of_money_goes_on_when_there_is_more(tmp_path):
    policy = make_policy(SpotPolicy)
    expected, _ = whole_run(tmp_path / "whole", policy, 0, (), Teacher())
    path = tmp_path / "poor"
    path.mkdir()
    poor = part_of_a_run(path, policy, 0, None, PoorTeacher())
    assert 0 < len(poor.trained) < len(expected.trained)
    assert (manifest.newest(path).directory / "weights").read_text() == poor.weights
    assert part_of_a_run(path, policy, 0, None, Teacher()).weights == expected.weights
    check_once(path)


def test_a_run_that_was_asked_to_stop_waits_only_for_the_step_that_is_under_way(tmp_path):
    """Neither for its prompts, nor for an update of the student's servers, nor for an evaluation."""
    tmp_path.joinpath("0").mkdir()
    with closing(Ledger.open(tmp_path / "0")) as ledger:
        trainer, beginning = HashingTrainer(), Manifest(step=0, lineages=(0,), keys="", data="")
        ended_s = {}

        async def evaluate(iteration):
            await asyncio.sleep(1000.0)

        run = make_run(
            make_policy(SpotPolicy),
            student=SimulatedStudent(),
            trainer=trainer,
            capabilities={"student": capabilities(VOCAB_SIZE)},
            prompts=simulated_prompts(problems=1000),
            iterations=ITERATIONS,
            batch_size=BATCH,
            ledger=ledger,
            checkpoints=NowAndThen(tmp_path / "0", beginning, ledger),
            evaluation=LiveEvaluation(lambda iteration: iteration == 1, evaluate),
        )

        async def until_stopped():
            loop = asyncio.get_running_loop()
            loop.call_later(100.0, run.orchestrator.stop)
            await run.orchestrator.run()
            ended_s["run"] = loop.time()

        run_on_virtual_time(until_stopped())
    assert ended_s["run"] < 102.0
    assert run.orchestrator.state.iteration == manifest.newest(tmp_path / "0").manifest.step == 1
