"""Runs a policy over simulated servers while things go wrong, and checks that a run's invariants hold.

    faulty_run(17, make_policy(SpotPolicy), max_staleness=1)

The seed decides everything: how many servers there are and what they do, what goes wrong and when, and which of the
tasks that are ready together continues first. So it replays a run exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import structlog
from limits import same_limits
from ready_order import run_shuffled

from faults.environment import FaultyEnvironment
from faults.invariants import Invariants, OneUpdateAtATime, Witnessed, prefixes, require, whole_response
from faults.plan import (
    MAY_END,
    MAY_KILL,
    Fault,
    FaultyVerifier,
    Scene,
    explained,
    kept_running,
    planned_faults,
)
from faults.servers import Rates, SimulatedReplica, SimulatedServer, SimulatedTeacherReplica, Update
from faults.stateful_trainer import Line, StatefulTrainer, read_weights, scratch_directory
from spot_async.base.events import Listener
from spot_async.base.retry import RetryPolicy
from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import gather, leaves, root_cause, watched
from spot_async.config import FollowsConfig, ServingConfig, teacher_name, teacher_role
from spot_async.errors import RequestError, SpotError
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.publishing import LiveEvaluation
from spot_async.protocols import Policy
from spot_async.replicas.pool import ReplicaPool
from spot_async.stages.services import EnvironmentService, TeacherService
from spot_async.stages.stage import Stage, StageLimits
from spot_async.testing.environments import simulated_environment
from spot_async.testing.services import END_TOKEN, VOCAB_SIZE, capabilities
from spot_async.testing.simulation import (
    SimulatedRun,
    make_run,
    simulated_prompts,
    simulated_turn_ids,
    simulated_vocabulary,
)
from spot_async.types import Generation, IntArray, SamplingSettings, ScoreRequest, TokenScores

LONGEST_S = 1e5  # of a run on virtual time: one that takes longer goes nowhere
UPDATE_TIMEOUT_S = 1500.0  # longer than a server is away that dies in several updates
REQUEST_TIMEOUT_S = 60.0
EVALUATION_ATTEMPTS = 20  # an evaluation that fails would end the run, and there would be less to see


@dataclass(frozen=True)
class FaultyRun:
    """A run in which all invariants held. `error` is what ended it early, which one of the faults explains."""

    run: SimulatedRun
    struck: Mapping[Fault, str]  # what the faults did that came before its end
    seconds: float  # of virtual time
    error: SpotError | None
    logs: Sequence[Mapping[str, Any]]

    @property
    def weights(self) -> Sequence[str]:
        """By step: each a digest of those before it and of what was trained."""
        weights: Sequence[str] = self.run.trainer.weights
        return weights


def faulty_run(
    seed: int,
    policy: Policy,
    *,
    max_staleness: int = 0,
    faults: Sequence[Fault] | None = None,
    listeners: Sequence[Listener] = (),
    follows: FollowsConfig | None = None,
    plays: bool = False,
) -> FaultyRun:
    """Run `policy` with the faults that the seed plans, or with `faults` of these. Its teacher may follow the student.

    Where it `plays`, the student takes turns with an environment.

    Raises what is wrong: `InvariantError`, `DeadlockError`, or any bug.
    """
    faults = planned_faults(seed) if faults is None else faults
    with scratch_directory() as directory, structlog.testing.capture_logs() as logs:
        drill = Drill(seed, policy, max_staleness, faults, directory, follows=follows, plays=plays)
        try:
            return run_shuffled(drill.run(listeners, logs), seed)
        except Exception as error:
            error.add_note(f"  with faults {'; '.join(drill.scene.struck.values()) or 'none'}")
            raise


class Drill:
    """One run, or a part of it: its servers, its faults, and the checks of it."""

    may_end: ClassVar[Mapping[str, str]] = MAY_END  # see `fault_plan.py`
    trainer_class: ClassVar[type[StatefulTrainer]] = StatefulTrainer
    problems = 8  # in an epoch

    def __init__(
        self,
        seed: int,
        policy: Policy,
        max_staleness: int,
        faults: Sequence[Fault],
        directory: Path,
        *,
        line: Line | None = None,
        unpaid: Set[int] = frozenset(),
        witnessed: Witnessed | None = None,
        follows: FollowsConfig | None = None,
        refill_at_most: int | None = None,
        plays: bool = False,
    ) -> None:
        """Make a run with weights in `directory`. `line`, `unpaid` and `witnessed` are those of earlier parts of it."""
        rng = random.Random(derive_seed(seed, "run"))
        self.seed = seed
        self.rng = rng
        self.policy = policy
        self.follows = follows
        self.refill_at_most = refill_at_most
        self.max_staleness = max_staleness
        self.faults = faults
        self.batch_size, self.iterations = self.sizes(rng)
        enough = self.batch_size * self.iterations
        self.prompts = rng.choice([None, None, None, rng.randint(0, enough), enough])  # None: without end
        self._evaluate_every = rng.choice([0, 0, 1, 2])
        self._most_in_flight, self._concurrency = rng.choice([1, 3, 512, 512]), rng.choice([2, 64, 64])
        self._extra_places = rng.choice([0, 0, 3])
        self._step_s = rng.choice([0.2, 2.0, 20.0])
        self._update: Update = rng.choice(get_args(Update))
        rates = Rates(
            tokens_per_s=rng.choice([60.0, 200.0]),
            tokens_per_s_each=20.0,
            start_s=rng.choice([0.5, 5.0]),
            update_s=rng.choice([0.1, 1.0, 10.0, 1.5 * REQUEST_TIMEOUT_S]),
        )
        self.invariants = Invariants(
            batch_size=self.batch_size,
            iterations=self.iterations,
            max_staleness=max_staleness,
            prompts=self.prompts,
            batches=() if line is None else line.batches,
            unpaid=unpaid,
            witnessed=witnessed,
            follows=follows,
            refills=refill_at_most is not None,
        )
        self._line = line or Line()
        self.trainer = self.trainer_class(
            directory,
            keep=max_staleness + 2,
            step_s=lambda: self._step_s * rng.uniform(0.5, 1.5),
            check=self.invariants.check_batch,
            line=self._line,
            write_s=0.8 * self._step_s if max_staleness else None,
            follows=follows,
        )

        def servers(role: str, number: int) -> list[SimulatedServer]:
            names = [f"{role}-{i}" for i in range(1, number + 1)]
            update: Update = self._update if role == "student" else "drain"
            return [SimulatedServer(name, rates, update=update, read=read_weights) for name in names]

        students = servers("student", rng.randint(1, 3))
        names = policy.needs.teachers or [""] if policy.needs.teacher else []
        self._teachers = {teacher_role(name): servers(teacher_role(name), rng.randint(1, 2)) for name in names}
        self.scene = Scene(
            students=students,
            teachers=[server for own in self._teachers.values() for server in own],
            trainer=self.trainer,
            verifier=FaultyVerifier(),
            teachers_follow=follows is not None,
        )
        self._attaches = rng.random() < 0.4
        self._sleeps = max_staleness == 0 and rng.random() < 0.2
        self._environment: EnvironmentService | None = None
        self._attempts = 1  # of a request that hangs
        if plays:
            self.scene.environment = FaultyEnvironment(latency_s=rng.choice([0.01, 1.0]))
            played = simulated_environment(simulated_vocabulary())
            self._environment = replace(played, server=self.scene.environment)
            self._attempts = rng.choice([1, 4])

    async def run(self, listeners: Sequence[Listener], logs: Sequence[Mapping[str, Any]]) -> FaultyRun:
        loop = asyncio.get_running_loop()
        student = self._pool("student", self.scene.students)
        teachers = {role: self._pool(role, own) for role, own in self._teachers.items()}
        pools = {"student": student} | teachers
        run = self._made(student, teachers)
        self.invariants.watch(run.orchestrator, self.trainer)
        self.made(run)
        run.stages.events.subscribe(*listeners)
        if self._attaches:
            await gather(server.start() for server in self.scene.servers)
        going = loop.create_task(self._beside_faults(run, pools), name="run")
        self.scene.interrupt = going.cancel
        error: SpotError | None = None
        try:
            async with asyncio.timeout(LONGEST_S):
                await going
        except ExceptionGroup as failures:
            error = self._explained(failures)
        except asyncio.CancelledError:
            error = SpotError("the run was interrupted")
        self.invariants.check_end(pools, is_early=error is not None)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        require(not left, "I8", f"tasks are left: {left}")
        serving = [each.name for each in self.scene.servers if each.is_running]
        require(self._attaches or not serving, "I8", f"servers are left: {serving}")
        self.check_results(run, is_early=error is not None)
        return FaultyRun(run, self.scene.struck, loop.time(), error, logs)

    def check_results(self, run: SimulatedRun, *, is_early: bool) -> None:
        """Check that no prompt died without a reason, and that every evaluation that was due was made."""
        for ordinal, error in run.journal.dead.items():
            known = explained(error, self.scene.struck.values(), MAY_KILL)
            require(known, "I8", f"no fault explains the death of prompt {ordinal}: {type(error).__name__}: {error}")
        if self.scene.environment is not None:
            counters = run.stages.environments[""].counters
            failed = counters.retried + counters.failed
            counted = counters.transient == failed >= self.scene.environment.raised
            require(counted, "I16", f"{self.scene.environment.raised} answers failed, and {counters} are counted")
        if not is_early:
            self.check_evaluations([each.iteration for each in run.journal.evaluated])

    def check_evaluations(self, made: Sequence[int]) -> None:
        due = [i for i in range(1, self.trainer.step + 1) if self.evaluation_is_due(i)]
        require(made == due, "I7", f"weights {due} were to be evaluated, and {made} were")

    async def _beside_faults(self, run: SimulatedRun, pools: Mapping[str, ReplicaPool[Any]]) -> None:
        async def all_of_it() -> None:
            if self._attaches or self._line.lineage:
                await self.catch_up(pools["student"])
                for role, snapshot in self.trainer.teachers(self.trainer.step).items():
                    until_s = asyncio.get_running_loop().time() + UPDATE_TIMEOUT_S
                    await pools[role].update_weights(snapshot, deadline=until_s)
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(each.strike(self.scene)) for each in self.faults]
                if self._attaches:
                    beside += [group.create_task(kept_running(each, self.rng)) for each in self.scene.servers]
                await run.orchestrator.run()
                for task in beside:
                    task.cancel()

        async with contextlib.AsyncExitStack() as stack:
            for pool in pools.values():
                await stack.enter_async_context(pool)
            await watched(all_of_it(), [pool.watch for pool in pools.values()])

    async def catch_up(self, student: ReplicaPool[Any]) -> None:
        """Bring the student's servers, which started with other weights, to those of the trainer."""
        await self.send(student, self.trainer.step)

    async def send(self, student: ReplicaPool[Any], step: int) -> None:
        until_s = asyncio.get_running_loop().time() + UPDATE_TIMEOUT_S
        await student.update_weights(self.trainer.snapshot(step), deadline=until_s)

    def _explained(self, failures: ExceptionGroup) -> SpotError:
        """Return the error that ended the run early. Raises what no fault explains."""
        for failure in leaves(failures):
            if not isinstance(failure, SpotError):
                raise failure
        error = root_cause(failures)
        known = explained(error, self.struck(), self.may_end)
        require(known, "I8", f"no fault explains the end: {type(error).__name__}: {error}")
        return error

    def _pool(self, role: str, servers: Sequence[SimulatedServer]) -> ReplicaPool[Any]:
        make: Any = self.student if role == "student" else self.teacher
        factories = {each.name: partial(make, each, attaches=self._attaches) for each in servers}
        serving = ServingConfig(
            stall_s=5.0, restarts=100, recovery_timeout_s=3000.0, max_in_flight=self._most_in_flight
        )
        return ReplicaPool(role, factories, serving, are_ours=not self._attaches)

    def student(self, server: SimulatedServer, *, attaches: bool) -> SimulatedReplica:
        return _WitnessedReplica(server, self.invariants.witnessed, attaches=attaches)

    def sizes(self, rng: random.Random) -> tuple[int, int]:
        """Return the batch size and the number of iterations."""
        return rng.randint(2, 4), rng.randint(2, 5)

    def teacher(self, server: SimulatedServer, *, attaches: bool) -> SimulatedTeacherReplica:
        return WitnessedTeacher(server, self.invariants.witnessed, attaches=attaches)

    def made(self, run: SimulatedRun) -> None:
        """Do what is due once a run is made, and before it begins."""

    def struck(self) -> Sequence[str]:
        """Return what the faults did so far."""
        return [*self.scene.struck.values()]

    def kept(self) -> Mapping[str, Any]:
        """Return what the run keeps, and where it continues: arguments of an orchestrator."""
        return {}

    def _made(self, student: ReplicaPool[Any], teachers: Mapping[str, Any]) -> SimulatedRun:
        teacher = teachers.get("teacher")
        offers = capabilities(VOCAB_SIZE, in_flight_updates=self._update != "drain")
        places = (self.max_staleness + 1) * self.batch_size + self._extra_places
        return make_run(
            self.policy,
            student=student,
            teachers={
                teacher_name(role) or "": TeacherService(server=each, render_turns=simulated_turn_ids)
                for role, each in teachers.items()
            },
            verifier=self.scene.verifier,
            environments={} if self._environment is None else {"": self._environment},
            trainer=self.trainer,
            weight_sinks=[OneUpdateAtATime(student)],
            evaluation=LiveEvaluation(self.evaluation_is_due, partial(self.measured, self.evaluations(student))),
            prompts=simulated_prompts(self.prompts, problems=self.problems),
            sleepers=[student] if self._sleeps else [],
            following=[] if self.follows is None else ["teacher"],
            teacher_sinks={} if self.follows is None else {"teacher": OneUpdateAtATime(teacher)},
            teacher_lag=0 if self.follows is None else self.follows.longest_lag,
            capabilities={"student": offers} | dict.fromkeys(teachers, capabilities(VOCAB_SIZE)),
            limits=same_limits(
                timeout_s=self._attempts * REQUEST_TIMEOUT_S,
                attempt_timeout_s=REQUEST_TIMEOUT_S,
                concurrency=self._concurrency,
            ),
            seed=self.seed,
            iterations=self.iterations,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            capacity_prompts=places,
            weight_update_timeout_s=UPDATE_TIMEOUT_S,
            max_dead_share=1.0,
            refill_at_most=self.refill_at_most,
            **self.kept(),
        )

    # Evaluations

    def evaluations(self, student: ReplicaPool[Any]) -> Stage[SimulatedReplica]:
        return Stage(
            "evaluate",
            student,
            StageLimits(concurrency=8, timeout_s=REQUEST_TIMEOUT_S, retry=RetryPolicy(attempts=20), waiting_capacity=8),
            jitter=lambda: 0.5,
        )

    def evaluation_is_due(self, iteration: int) -> bool:
        return self._evaluate_every > 0 and iteration % self._evaluate_every == 0

    async def measured(self, stage: Stage[SimulatedReplica], iteration: int) -> EvaluationResult:
        """Ask the student, and check that all answers are of the weights that are evaluated."""

        async def response(n: int) -> Generation:
            prompt_ids: IntArray = np.arange(5, dtype=np.int32)
            sampling = SamplingSettings(
                max_tokens=16, stop_token_ids=(END_TOKEN,), seed=derive_seed(self.seed, "evaluate", iteration, n)
            )
            for _ in range(EVALUATION_ATTEMPTS):
                with contextlib.suppress(RequestError):
                    return await stage.ask(
                        (n,), lambda each, until_s: each.generate(prompt_ids, sampling, deadline=until_s)
                    )
            raise AssertionError("an evaluation's request failed again and again")

        for each in await gather(response(n) for n in range(3)):
            steps = [span.version.step for span in each.version_spans]
            require(steps == [iteration], "I2", f"an evaluation of weights {iteration} has tokens of {steps}")
        require(self.trainer.path(iteration).is_dir(), "I7", f"weights {iteration} are gone in their evaluation")
        return EvaluationResult(())


class _WitnessedReplica(SimulatedReplica):
    """A student that notes by which weights each token was sampled in truth."""

    def __init__(self, server: SimulatedServer, witnessed: Witnessed, *, attaches: bool) -> None:
        super().__init__(server, attaches=attaches)
        self._witnessed = witnessed

    async def generate(self, prompt_ids: IntArray, *arguments: Any, **more: Any) -> Generation:
        response = await super().generate(prompt_ids, *arguments, **more)
        contents = {held.version: held.contents for held in self.server.held}
        keys = list(prefixes(prompt_ids, response.token_ids))
        for span in response.version_spans:
            for key in keys[span.start : span.end]:
                self._witnessed.setdefault(key, set()).add(contents[span.version])
        return response


class WitnessedTeacher(SimulatedTeacherReplica):
    """A teacher that notes by which weights each response was scored in truth."""

    def __init__(self, server: SimulatedServer, witnessed: Witnessed, *, attaches: bool) -> None:
        super().__init__(server, attaches=attaches)
        self._witnessed = witnessed

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        contents = self.server.held[-1].contents
        scores = await super().score(request, top_k=top_k)
        self._witnessed.setdefault(b"teacher" + whole_response(request), set()).add(contents)
        return scores
