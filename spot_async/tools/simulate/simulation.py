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


@dataclass(frozen=True)
class Observed:
    """One iteration."""

    ended_s: float
    train_s: float
    queued_prompts_s: float  # seconds that finished prompts waited for their batch, all together
    most_queued: int
    cpu_s: float  # of this process since its start
    worked: Mapping[str, float]  # by role: grains that its servers have worked off since the start
    responses: int  # that were trained
    tokens: int  # grains of these, whoever wrote them
    lags: Mapping[int, int]  # grains of responses by the iterations that their weights are behind
    bottleneck: Bottleneck  # since the iteration before


class Observer:
    """The listener that keeps finished iterations. Make it on the running loop."""

    def __init__(
        self, book: AdmissionBook, servers: Mapping[str, Sequence[RatedServer]], live: LiveBottleneck, judged: set[int]
    ) -> None:
        """`judged` are the iterations after which the bottleneck is asked for, each time since the last one."""
        self.iterations: list[Observed] = []
        self._book = book
        self._servers = servers
        self._live = live
        self._judged = judged
        self._since_s = asyncio.get_running_loop().time()
        self._queued = self._most_queued = 0
        self._queued_prompts_s = 0.0

    def on(self, event: Event) -> None:
        now_s = asyncio.get_running_loop().time()
        self._queued_prompts_s += self._queued * (now_s - self._since_s)
        self._since_s, self._queued = now_s, self._book.waiting
        self._most_queued = max(self._most_queued, self._queued)
        if isinstance(event, IterationFinished):
            self._finish(event, now_s)

    def _finish(self, event: IterationFinished, now_s: float) -> None:
        trained = [sample.supervision for sample in event.samples if sample.supervision is not None]
        self.iterations.append(
            Observed(
                ended_s=now_s,
                train_s=event.times_s.train,
                queued_prompts_s=self._queued_prompts_s,
                most_queued=self._most_queued,
                cpu_s=time.process_time(),
                worked={role: sum(each.worked for each in servers) for role, servers in self._servers.items()},
                responses=len(trained),
                tokens=sum(len(each.response_ids) for each in trained),
                lags=tokens_by_lag(event),
                bottleneck=self._live.judge() if event.iteration in self._judged else Bottleneck(""),
            )
        )
        self._queued_prompts_s, self._most_queued = 0.0, self._queued


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
    observed = run_on_virtual_time(observe(config, rates, workload, staleness, last + staleness, {first, last}))
    return _outcome(staleness, rates, workload, observed[first - 1 : last], strict_s)


def sufficient(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the one with the least staleness that is nearly as fast as the fastest. More is no use by itself."""
    fastest_s = min(each.iteration_s for each in outcomes)
    return next(each for each in outcomes if each.iteration_s <= NEARLY * fastest_s)


async def observe(
    config: Config, rates: ClusterRates, workload: Workload, staleness: int, iterations: int, judged: set[int]
) -> list[Observed]:
    """Run to the end, and return all iterations."""
    policy, batch_size = make_policy(config), config.training.batch_size
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
            trainer=RatedTrainer(rates.trainer, workload.grain),
            capabilities={"student": await pools["student"].capabilities(deadline=0.0)},
            prompts=prompts([""] if config.route is None else [*config.teachers]),
            limits=config.stages,
            sampling=config.sampling.model_copy(update={"max_response_tokens": workload.most}),
            seed=config.run.seed,
            iterations=iterations,
            batch_size=batch_size,
            max_staleness=staleness,
            capacity_prompts=(staleness + 1) * batch_size,
            capacity_bytes=config.queue.capacity_bytes,
        )
        live = LiveBottleneck(
            run.orchestrator,
            lambda line: None,
            _tree(config, rates, staleness),
            every_s=0.0,
            replicas=lambda: replica_states(pools),
        )
        observer = Observer(run.orchestrator.book, servers, live, judged)
        run.stages.events.subscribe(observer, to=RunEvent)
        await watched(run.orchestrator.run(), [pool.watch for pool in pools.values()])
        return observer.iterations


def _servers(role: str, rates: ClusterRates, workload: Workload) -> list[RatedServer]:
    server, asked = RatedStudent if role == "student" else RatedTeacher, Asked()
    return [server(role, rates, workload, asked) for _ in range(rates.of(role).replicas or 1)]


def _pool(role: str, config: Config, servers: Sequence[RatedServer]) -> ReplicaPool[RatedServer]:
    made = {f"{role}-{number}": (lambda own=server: own) for number, server in enumerate(servers, 1)}
    return ReplicaPool(role, made, config.models.get(role, config.student).serving)


def _tree(config: Config, rates: ClusterRates, staleness: int) -> dict[str, Any]:
    """Return the configuration that is simulated, with as many servers and slots as the rates say."""
    tree = {**config.model_dump(), "max_staleness": staleness}
    for role, section in model_sections(tree).items():
        own = rates.of(role)
        section["backend"] |= {"slots": own.slots, "replicas": own.replicas, "url": None}
    return tree


def _outcome(
    staleness: int, rates: ClusterRates, workload: Workload, observed: Sequence[Observed], strict_s: float | None
) -> Outcome:
    """Return what the iterations after the first of `observed` came to."""
    before, counted = observed[0], observed[1:]
    total_s = counted[-1].ended_s - before.ended_s
    iteration_s, train_s = total_s / len(counted), sum(each.train_s for each in counted) / len(counted)
    # What they did in this time, so that none can have done more than its rate allows.
    servers_s = {
        role: (worked - before.worked[role]) * workload.grain / len(counted) / _tokens_per_s(rates, role)
        for role, worked in counted[-1].worked.items()
        if rates.of(role).tokens_per_s is not None
    }
    lags: Counter[int] = Counter()
    for each in counted:
        lags.update(each.lags)
    starts_s = [each.ended_s for each in observed]
    rows = [
        Row(
            seconds=each.ended_s - start_s,
            train_s=each.train_s,
            queued=each.queued_prompts_s / (each.ended_s - start_s),
        )
        for start_s, each in zip(starts_s, counted, strict=False)
    ]
    bottleneck = counted[-1].bottleneck
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
        response_tokens=workload.grain
        * sum(each.tokens for each in counted)
        / max(1, sum(each.responses for each in counted)),
        queue_mean=sum(each.queued_prompts_s for each in counted) / total_s,
        queue_max=max(each.most_queued for each in counted),
        orchestrator_cores=(counted[-1].cpu_s - before.cpu_s) / total_s,
        rows=rows,
    )


def _tokens_per_s(rates: ClusterRates, role: str) -> float:
    own = rates.of(role)
    return (own.tokens_per_s or 1.0) * (own.replicas or 1)


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
