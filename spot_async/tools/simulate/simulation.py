"""Runs a configuration's orchestrator on virtual time, over servers and a trainer that work at stated rates.

Policy, stages, replica pools, admission and the search for the bottleneck are those of a run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from spot_async.base import registry
from spot_async.base.events import Event
from spot_async.base.tasks import watched
from spot_async.checks.device_shares import shares_with_trainer
from spot_async.checks.served import answering, served_models
from spot_async.config import Config, model_sections, teacher_name
from spot_async.loop.admission import AdmissionBook
from spot_async.loop.events import IterationFinished, RunEvent
from spot_async.protocols import Policy
from spot_async.replicas.pool import ReplicaPool
from spot_async.stages.services import TeacherService
from spot_async.telemetry.bottleneck import Bottleneck
from spot_async.telemetry.live_bottleneck import LiveBottleneck
from spot_async.telemetry.meters import replica_states
from spot_async.telemetry.run_log import tokens_by_lag
from spot_async.testing.services import VOCAB_SIZE
from spot_async.testing.simulation import make_run, policy_context, simulated_turn_ids
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.simulate.lengths import Asked, Workload
from spot_async.tools.simulate.rates import ClusterRates
from spot_async.tools.simulate.services import (
    RatedServer,
    RatedStudent,
    RatedTeacher,
    RatedTrainer,
    RatedVerifier,
    prompts,
    rated_environment,
)

WARM_UP = 2  # iterations for each n, and one more: until then a run has not found its rhythm

NEARLY = 1.03  # times the fastest is as good


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A lower bound of an iteration's seconds, and what makes it."""

    seconds: float
    by: str
    parts: dict[str, float]  # seconds of an iteration that each server and the trainer need for its work


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated iteration."""

    seconds: float
    train_s: float
    queued: float  # mean number of prompts that are finished and in no batch yet


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run with one `max_staleness` came to, in the iterations that count."""

    max_staleness: int
    iteration_s: float
    bound: Bound
    bottleneck: str
    advice: Sequence[str]
    trainer_idle: float  # share of the time
    busy: dict[str, float]  # share of its rate that each role used
    lag_mean: float  # of a response token, in iterations
    lag_max: int
    lags: dict[int, int]  # response tokens by lag
    response_tokens: float  # of a trained response, as a mean
    queue_mean: float
    queue_max: int
    orchestrator_cores: float  # of this machine; with what the simulated servers take, without HTTP
    rows: list[Row]


@dataclass(eq=False)
class Observer:
    """The listener that sums up the iterations after the `first`, up to the `last`. Make it on the running loop."""

    book: AdmissionBook
    servers: Mapping[str, Sequence[RatedServer]]
    live: LiveBottleneck
    first: int
    last: int

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.responses = 0  # that were trained
        self.tokens = 0  # grains of these, whoever wrote them
        self.lags: Counter[int] = Counter()  # grains of responses by the iterations that their weights are behind
        self.queue_max = 0
        self.cpu_s = 0.0  # of this process
        self.worked = dict.fromkeys(self.servers, 0.0)  # by role: grains that its servers have worked off
        self.bottleneck = Bottleneck("")
        self._ended_s = self._since_s = asyncio.get_running_loop().time()
        self._queued = self._most_queued = 0
        self._queued_prompts_s = 0.0

    def on(self, event: Event) -> None:
        now_s = asyncio.get_running_loop().time()
        self._queued_prompts_s += self._queued * (now_s - self._since_s)
        self._since_s, self._queued = now_s, self.book.waiting
        self._most_queued = max(self._most_queued, self._queued)
        if not isinstance(event, IterationFinished):
            return
        if self.first < event.iteration <= self.last:
            self._add(event, now_s - self._ended_s)
        if event.iteration in (self.first, self.last):  # at the last one, what came since the first
            self.cpu_s = time.process_time() - self.cpu_s
            for role, servers in self.servers.items():
                self.worked[role] = sum(each.worked for each in servers) - self.worked[role]
            self.bottleneck = self.live.judge()
        self._ended_s, self._queued_prompts_s, self._most_queued = now_s, 0.0, self._queued

    def _add(self, event: IterationFinished, seconds: float) -> None:
        trained = [sample.supervision for sample in event.samples if sample.supervision is not None]
        self.rows.append(Row(seconds=seconds, train_s=event.times_s.train, queued=self._queued_prompts_s / seconds))
        self.responses += len(trained)
        self.tokens += sum(len(each.response_ids) for each in trained)
        self.lags.update(tokens_by_lag(event))
        self.queue_max = max(self.queue_max, self._most_queued)


def make_policy(config: Config) -> Policy:
    """Return the configured policy. It may ask for no more candidates than the simulated vocabulary has."""
    narrow = {
        name: min(value, VOCAB_SIZE)
        for name, value in config.policy
        if name.endswith("top_k") and isinstance(value, int)
    }
    settings = config.policy.model_copy(update=narrow)
    context = policy_context(
        run_seed=config.run.seed,
        reference_kl=config.training.reference_kl > 0,
        teachers=() if config.route is not None else tuple(config.teachers),
        training=config.training,
        max_staleness=config.max_staleness,
    )
    policy: Policy = registry.load("policies", config.policy.kind)(settings, context)
    return policy


def simulate(
    config: Config, rates: ClusterRates, workload: Workload, *, most_staleness: int, iterations: int
) -> list[Outcome]:
    """Return what each `max_staleness` from 0 to `most_staleness` comes to. `iterations` of each count.

    A run whose servers sleep while the trainer works can only be strict.
    """
    outcomes: list[Outcome] = []
    for staleness in range(1 if shares_with_trainer(config) else most_staleness + 1):
        strict_s = outcomes[0].iteration_s if outcomes else None
        outcomes.append(simulate_one(config, rates, workload, staleness, iterations, strict_s))
    return outcomes


def simulate_one(
    config: Config,
    rates: ClusterRates,
    workload: Workload,
    staleness: int,
    iterations: int,
    strict_s: float | None = None,
) -> Outcome:
    """Return what one `max_staleness` comes to; `strict_s` is the time of a strict iteration, where that is known.

    Before the iterations that count come some in which the run gets going, and after them some in which it comes to
    its end.
    """
    # What a run would log of single requests is nobody's concern here.
    logging.getLogger("spot_async").addHandler(logging.NullHandler())
    # Batches that were admitted together may finish together, which repeats every n + 1 iterations.
    counted = max(1, iterations // (staleness + 1)) * (staleness + 1)
    first = 1 + WARM_UP * staleness
    last = first + counted
    observed = run_on_virtual_time(observe(config, rates, workload, staleness, first, last))
    return _outcome(staleness, rates, workload, observed, strict_s)


def sufficient(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the one with the least staleness that is nearly as fast as the fastest. More is no use by itself."""
    fastest_s = min(each.iteration_s for each in outcomes)
    return next(each for each in outcomes if each.iteration_s <= NEARLY * fastest_s)


async def observe(
    config: Config, rates: ClusterRates, workload: Workload, staleness: int, first: int, last: int
) -> Observer:
    """Run to the end, a little beyond the `last` iteration, and return what came after the `first`."""
    policy = make_policy(config)
    servers = {role: _servers(role, rates, workload) for role in served_models(config, policy.needs)}
    is_base = policy.needs.reference and "reference" not in servers
    async with AsyncExitStack() as stack:
        # A pool stands for its servers in every way, which types cannot say.
        pools: dict[str, Any] = {
            role: await stack.enter_async_context(_pool(role, config, own)) for role, own in servers.items()
        }
        run = make_run(
            policy,
            student=pools["student"],
            teachers={
                teacher_name(role) or "": TeacherService(server=pools[by], render_turns=simulated_turn_ids)
                for role, by in answering(config).items()
                if by in pools
            },
            reference=pools["student" if is_base else "reference"] if policy.needs.reference else None,
            are_base=[*config.served_by_student, *(["reference"] if is_base else [])],
            verifier=RatedVerifier(rates),
            environments=rates.environment and {"": rated_environment(rates.environment, workload)},
            trainer=RatedTrainer(rates.trainer, workload.grain),
            capabilities={"student": await pools["student"].capabilities(deadline=0.0)},
            prompts=prompts([""] if config.route is None else [*config.teachers]),
            limits=config.stages,
            sampling=config.sampling.model_copy(update={"max_response_tokens": workload.most}),
            seed=config.run.seed,
            iterations=last + staleness,
            batch_size=config.training.batch_size,
            max_staleness=staleness,
            capacity_bytes=config.queue.capacity_bytes,
        )
        live = LiveBottleneck(
            run.orchestrator,
            lambda line: None,
            _tree(config, rates, staleness),
            every_s=0.0,
            replicas=lambda: replica_states(pools),
        )
        observer = Observer(run.orchestrator.book, servers, live, first, last)
        run.stages.events.subscribe(observer, to=RunEvent)
        await watched(run.orchestrator.run(), [pool.watch for pool in pools.values()])
        return observer


def _servers(role: str, rates: ClusterRates, workload: Workload) -> list[RatedServer]:
    server, asked = RatedStudent if role == "student" else RatedTeacher, Asked()
    return [server(role, rates, workload, asked) for _ in range(rates.of(role).replicas or 1)]


def _pool(role: str, config: Config, servers: Sequence[RatedServer]) -> ReplicaPool[RatedServer]:
    made = {f"{role}-{number}": (lambda own=server: own) for number, server in enumerate(servers, 1)}
    return ReplicaPool(role, made, config.models.get(role, config.student).serving)


def _tree(config: Config, rates: ClusterRates, staleness: int) -> dict[str, Any]:
    """Return the configuration that is simulated, with as many servers and slots as the rates say."""
    tree = {**config.model_dump(), "max_staleness": staleness}
    if rates.environment is not None:  # of all sets together
        tree |= {"data": {}, "environment": {"workers": rates.environment.workers}}
    for role, section in model_sections(tree).items():
        own = rates.of(role)
        section["backend"] |= {"slots": own.slots, "replicas": own.replicas, "url": None}
    return tree


def _outcome(
    staleness: int, rates: ClusterRates, workload: Workload, observed: Observer, strict_s: float | None
) -> Outcome:
    """Return what the iterations came to."""
    rows, lags = observed.rows, observed.lags
    total_s = sum(each.seconds for each in rows)
    iteration_s, train_s = total_s / len(rows), sum(each.train_s for each in rows) / len(rows)
    # What they did in this time, so that none can have done more than its rate allows.
    servers_s = {}
    for role, worked in observed.worked.items():
        own = rates.of(role)
        if own.tokens_per_s is not None:
            servers_s[role] = worked * workload.grain / len(rows) / (own.tokens_per_s * (own.replicas or 1))
    bottleneck = observed.bottleneck
    return Outcome(
        max_staleness=staleness,
        iteration_s=iteration_s,
        bound=bound(staleness, servers_s, train_s, rates.update_s, strict_s or iteration_s),
        bottleneck=bottleneck.sentence,
        advice=[line for line in bottleneck.advice if line != bottleneck.staleness],
        trainer_idle=1.0 - train_s / iteration_s,
        busy={role: seconds / iteration_s for role, seconds in servers_s.items()},
        lag_mean=sum(lag * tokens for lag, tokens in lags.items()) / max(1, lags.total()),
        lag_max=max(lags, default=0),
        lags={lag: tokens * workload.grain for lag, tokens in sorted(lags.items())},
        response_tokens=workload.grain * observed.tokens / max(1, observed.responses),
        queue_mean=sum(each.queued * each.seconds for each in rows) / total_s,
        queue_max=observed.queue_max,
        orchestrator_cores=observed.cpu_s / total_s,
        rows=rows,
    )


def bound(
    max_staleness: int, servers_s: Mapping[str, float], train_s: float, update_s: float, strict_s: float
) -> Bound:
    """Return the bound. `servers_s` are by role; `strict_s` is the time of a strict iteration."""
    parts = {**servers_s, "trainer": train_s}
    if max_staleness == 0:
        slowest = max(servers_s, key=lambda role: servers_s[role], default="")  # none is asked for written responses
        by = f"{slowest}, then trainer" if slowest else "trainer"
        return Bound(seconds=servers_s.get(slowest, 0.0) + train_s + update_s, by=by, parts=parts)
    overlapped = {**parts, "one batch's way": strict_s / (max_staleness + 1)}
    by = max(overlapped, key=lambda name: overlapped[name])
    return Bound(seconds=overlapped[by], by=by, parts=parts)
