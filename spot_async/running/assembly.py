"""Makes a run's parts from its configuration and plan: accounts, stages, settings.

Nothing is started here. `services.py` opens the servers, `training.py` enters the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType

from spot_async.base import registry
from spot_async.base.events import Channel
from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.tasks import Opened
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config, PluginSettings, teacher_name
from spot_async.environments.call_reader import CallReader
from spot_async.environments.planning import PlannedEnvironment
from spot_async.environments.served import ServedEnvironment
from spot_async.errors import DataError, PermanentError
from spot_async.loop.orchestrator import OrchestratorSettings
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Verifier
from spot_async.replicas.leasing import Lease, LeaseRequest, pool_of
from spot_async.running.services import OpenServices
from spot_async.spending.run_spending import RunSpending
from spot_async.spending.score_cache import ScoreCache
from spot_async.spending.teacher_cache import TeacherCache
from spot_async.stages.episode import Rules
from spot_async.stages.plugin_contract import computed
from spot_async.stages.services import EnvironmentService, Services, StagesSettings, TeacherService
from spot_async.stages.stages import Stages
from spot_async.types import IntArray, Judgement, Problem, Verdict


def make_spending(config: Config, plan: TrainPlan) -> RunSpending:
    """Make the accounts of what the plan serves and of the verifier, and the caches of teachers that keep answers."""
    caches = {
        role: TeacherCache(ScoreCache(Path(teacher.cache), is_replay=teacher.replay, role=role), teacher, files)
        for role, files in plan.teachers.items()
        if plan.policy.needs.teacher and (teacher := config.teachers_by_role[role]).cache is not None
    }
    return RunSpending(plan.served, caches, config.verifier)


class VerifiersOfSets(Opened):
    """The verifiers of a run's training sets as one: a pool of theirs, since each has its own limits."""

    def __init__(self, default: Verifier, of_set: Mapping[str, Verifier]) -> None:
        """Judge the problems of a set by `of_set[set_key]`, and those of other sets by `default`."""
        self._default = default
        self._of_set = of_set

    async def _open(self, stack: AsyncExitStack) -> None:
        for verifier in dict.fromkeys([self._default, *self._of_set.values()]):
            await stack.enter_async_context(verifier)

    async def lease(self, request: LeaseRequest) -> Lease[Verifier]:
        """Wait until the verifier of the request's set may be asked: `ask_judgement` gives the set as its kind."""
        return await pool_of(self._of_set.get(request.kind, self._default)).lease(request)

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict | Judgement:
        verifier = self._of_set.get(problem.set_key, self._default)
        return await verifier.verify(problem, response_text, deadline=deadline)


def make_verifier(config: Config, spending: RunSpending) -> Verifier:
    """Make the verifier of training, which is charged to its account where it has one, or those of its sets as one."""
    opened: dict[str, Verifier] = {}  # by settings: equal ones share a verifier

    def make(settings: PluginSettings) -> Verifier:
        return opened.setdefault(settings.model_dump_json(), registry.load("verifiers", settings.kind)(settings))

    verifier = make(config.verifier.charged_to(spending.accounts.get("verifier")))
    of_set = {key: make(each.verifier) for key, each in config.data.sets.items() if each.verifier is not None}
    return VerifiersOfSets(verifier, of_set) if of_set else verifier


class RunEnvironment(Opened):
    """An environment of a run's, and what reads the calls of turns: processes that are entered and left together."""

    def __init__(self, planned: PlannedEnvironment, vocabulary: Vocabulary) -> None:
        settings, bridges = planned.settings, planned.bridges
        self.served = ServedEnvironment(settings)
        self._reader = None if planned.calls is None else CallReader(planned.calls, workers=settings.workers)
        rules = Rules(
            vocabulary=vocabulary,
            turn_end=bridges.turn_end,
            between=self._between,
            read_calls=None if self._reader is None else self._reader.read,
            max_turns=settings.max_turns,
            max_observation_tokens=settings.max_observation_tokens,
        )
        self._bridges = bridges
        self.service = EnvironmentService(server=self.served, rules=rules, judge=settings.judge)

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.served)
        if self._reader is not None:
            await stack.enter_async_context(self._reader)

    def _between(self, texts: Sequence[str]) -> IntArray:
        try:
            return self._bridges.between(texts)
        except DataError as error:  # of these texts alone: other prompts go on
            raise PermanentError(str(error)) from None


def make_environments(plan: TrainPlan) -> dict[str, RunEnvironment]:
    """Make the environments of training, by the key of the set. Sets with equal settings share one."""
    made = {each: RunEnvironment(each, plan.student.vocabulary) for each in dict.fromkeys(plan.environments.values())}
    return {key: made[each] for key, each in plan.environments.items()}


def make_stages(
    config: Config,
    plan: TrainPlan,
    services: OpenServices,
    verifier: Verifier,
    environments: Mapping[str, RunEnvironment] = MappingProxyType({}),
    events: Channel | None = None,
    *,
    bounds_prompts: bool = True,
) -> Stages:
    """Make the stages of a run whose servers have answered. The last argument is `StagesSettings.bounds_prompts`."""
    teachers = {
        role: TeacherService(
            server=services.backends.get(plan.answering[role]),
            vocabulary=files.vocabulary,
            own_tokens=plan.own_tokens.get(role),
            kept_scores=services.kept_scores.get(role),
            temperature=config.temperature(role),
            render_turns=plan.teacher_renderers[role].turn_ids,
            weight=config.teachers_by_role[role].weight,
        )
        for role, files in plan.teachers.items()
    }
    are_base = [role for role in config.served_by_student if role not in config.following]
    if plan.reference_is_base:
        are_base.append("reference")
    asked = Services(
        student=services.student,
        verifier=verifier,
        environments={key: each.service for key, each in environments.items()},
        vocabulary=plan.student.vocabulary,
        teachers={teacher_name(role) or "": teacher for role, teacher in teachers.items()},
        # As the base, the student's backend is a `BaseScorer`: the plan has seen to that.
        reference=services.backends.get("student" if plan.reference_is_base else "reference"),
        are_base=are_base,
        following=[*config.following],
        common=plan.common,
        capabilities=services.capabilities,
    )
    settings = StagesSettings(
        limits=config.stages,
        sampling=config.sampling,
        seed=config.run.seed,
        max_prompts=config.queue_capacity_prompts,
        bounds_prompts=bounds_prompts,
        weights_may_change=config.max_staleness > 0,
    )
    return Stages(asked, settings, plan.policy.needs, events)


def orchestrator_settings(config: Config, plan: TrainPlan) -> OrchestratorSettings:
    return OrchestratorSettings(
        iterations=plan.schedule.iterations,
        batch_size=config.training.batch_size,
        max_staleness=config.max_staleness,
        capacity_prompts=config.queue_capacity_prompts,
        capacity_bytes=config.queue.capacity_bytes,
        max_response_tokens=config.sampling.max_response_tokens,
        vocab_size=plan.student.vocab_size,
        weight_update_timeout_s=WEIGHT_UPDATE_TIMEOUT_S,
        max_dead_share=config.run.max_dead_share,
        refill_at_most=config.training.refill_at_most if config.training.refill else None,
        teacher_lag=config.teacher_lag,
        compute=partial(computed, config.training.step_timeout_s),
    )
