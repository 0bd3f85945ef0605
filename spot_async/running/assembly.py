"""Makes a run's parts from its configuration and plan: pools of backends, stages, orchestrator, trainer settings.

Nothing is started here; `training.py` enters what this makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spot_async.base.processes.cores import CoreShares
from spot_async.base.retry import RetryPolicy
from spot_async.base.timeouts import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.checks.plan import TrainPlan, sleeps_while_training
from spot_async.config import Config, ModelConfig
from spot_async.loop.orchestrator import LiveEvaluation, Orchestrator, OrchestratorSettings, RunObserver
from spot_async.protocols import Backend, CandidateScorer, Generator, Scorer, Sleeper, Trainer, Verifier, WeightSink
from spot_async.replicas.pool import ReplicaPool
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.servers import backend_factories
from spot_async.spending.account import Account
from spot_async.spending.run_spending import RunSpending
from spot_async.spending.score_cache import ScoreCache
from spot_async.spending.teacher_cache import TeacherCache
from spot_async.stages.stages import Services, Stages
from spot_async.trainer.settings import TrainerSettings


class StudentBackend(Backend, Generator, CandidateScorer, WeightSink, Protocol):
    """What the student's backend must be."""


class TeacherBackend(Backend, Scorer, Generator, Protocol):
    """What the teacher's backend must be, as far as the policy's needs go."""


class ReferenceBackend(Backend, Scorer, Protocol):
    """What the frozen reference's backend must be."""


@dataclass(frozen=True)
class Backends:
    """The inference services of a training run, by role; None where the policy asks for none."""

    student: StudentBackend | ReplicaPool[StudentBackend]
    teacher: TeacherBackend | ReplicaPool[TeacherBackend] | None
    reference: ReferenceBackend | ReplicaPool[ReferenceBackend] | None

    def by_role(self) -> dict[str, Backend]:
        return {role: backend for role, backend in vars(self).items() if backend is not None}

    def pools(self) -> dict[str, ReplicaPool[Any]]:
        return {role: each for role, each in self.by_role().items() if isinstance(each, ReplicaPool)}


def make_pool(
    model: ModelConfig,
    role: str,
    directory: RunDirectory,
    account: Account | None = None,
    cores: CoreShares | None = None,
) -> ReplicaPool[Any]:
    """All servers of a role, not yet started. What is asked of them is charged to the `account`."""
    places = [each.place for each in model.backend.servers()]
    return ReplicaPool(
        role,
        backend_factories(model, role, directory.path, account, cores),
        model.serving,
        are_ours=not any(place is not None and place.is_attached for place in places),
        rate_limit=account.rate_limit if account is not None and account.is_limited else None,
    )


def make_spending(config: Config, plan: TrainPlan) -> RunSpending:
    """The accounts of what the plan serves, and the teacher's cache where one is kept."""
    teacher = config.teacher if plan.policy.needs.teacher else None
    if teacher is None or teacher.cache is None or plan.teacher is None:
        return RunSpending(plan.served)
    cache = ScoreCache(Path(teacher.cache), is_replay=teacher.replay)
    return RunSpending(plan.served, TeacherCache(cache, teacher, plan.teacher))


def make_backends(
    config: Config,
    plan: TrainPlan,
    directory: RunDirectory,
    spending: RunSpending | None = None,
    cores: CoreShares | None = None,
) -> Backends:
    """What must be served, not yet started. What is asked of it is charged to `spending`."""
    spending = spending or make_spending(config, plan)
    backends: dict[str, Any] = {
        role: make_pool(model, role, directory, spending.accounts.get(role), cores)
        for role, model in plan.served.items()
    }
    if spending.replayed_teacher is not None:
        backends["teacher"] = spending.replayed_teacher
    return Backends(backends["student"], backends.get("teacher"), backends.get("reference"))


def make_stages(
    config: Config,
    plan: TrainPlan,
    backends: Backends,
    verifier: Verifier,
    retry: Callable[[int], RetryPolicy] = RetryPolicy,
) -> Stages:
    student, teacher, needs = backends.student, backends.teacher, plan.policy.needs
    return Stages(
        Services(
            generator=student,
            scorer=teacher,
            candidate_scorer=student,
            verifier=verifier,
            teacher_generator=teacher if needs.teacher_responses else None,
            reference=backends.reference,
        ),
        config.stages,
        config.sampling,
        student=plan.student.vocabulary,
        teacher=(plan.teacher or plan.student).vocabulary,
        run_seed=config.run.seed,
        max_running_prompts=config.queue_capacity_prompts,
        max_probes_per_prompt=needs.probes_per_prompt,
        max_samples_per_prompt=needs.samples_per_prompt,
        retry=retry,
        common=plan.common,
    )


def make_orchestrator(
    config: Config,
    plan: TrainPlan,
    stages: Stages,
    trainer: Trainer,
    weight_sinks: Sequence[WeightSink],
    observer: RunObserver,
    evaluate: LiveEvaluation,
) -> Orchestrator:
    return Orchestrator(
        OrchestratorSettings(
            iterations=plan.schedule.iterations,
            batch_size=config.training.batch_size,
            max_staleness=config.max_staleness,
            capacity_prompts=config.queue_capacity_prompts,
            capacity_bytes=config.queue.capacity_bytes,
            max_response_tokens=config.sampling.max_response_tokens,
            vocab_size=plan.student.vocab_size,
            weight_update_timeout_s=WEIGHT_UPDATE_TIMEOUT_S,
            max_dead_share=config.run.max_dead_share,
        ),
        prompts=plan.schedule,
        policy=plan.policy,
        stages=stages,
        trainer=trainer,
        weight_sinks=weight_sinks,
        observer=observer,
        evaluate=evaluate,
        sleepers=[each for each in weight_sinks if isinstance(each, Sleeper) and each.sleeps_while_training],
    )


def trainer_settings(config: Config, plan: TrainPlan, directory: RunDirectory) -> TrainerSettings:
    return TrainerSettings(
        training=config.training,
        model_directory=str(Path(config.student.model).resolve()),
        run_directory=str(directory.path),
        temperature=config.sampling.temperature,
        seed=config.run.seed,
        iterations=plan.schedule.iterations,
        end_token_ids=plan.stop_token_ids,
        shares_devices=sleeps_while_training(config.student),
    )
