"""Finds out whether the servers of a run fit each other and the run. `check` shows it, `train` refuses what is unsafe.

It asks servers that are running already; it starts nothing and prints nothing. `server_diagnosis.py` asks each server,
`agreement.py` compares those of a role, and `capabilities.py` knows what a policy needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec

from spot_async.base.retry import CAPABILITIES_TIMEOUT_S
from spot_async.base.tasks import gather, gather_answers, in_thread
from spot_async.checks import questions
from spot_async.checks.agreement import TOP_K, Agreement, agreement, holds_unknown_weights, servers_of
from spot_async.checks.capabilities import check_capabilities, of_student, sums_ends
from spot_async.checks.plan import TrainPlan, plan_warnings
from spot_async.checks.questions import Asked
from spot_async.checks.server_diagnosis import RESPONSE_TOKENS, Probe, ServerDiagnosis, role_model
from spot_async.checks.server_facts import ServerFacts
from spot_async.config import Config, ModelConfig, teacher_name
from spot_async.errors import ConfigError, FailureClass, RequestError
from spot_async.models.precision import SURE_NATS, logit_errors, noise_nats
from spot_async.protocols import Backend, Generator, Scorer
from spot_async.replicas.pool import ReplicaPool
from spot_async.types import Capabilities, WeightVersion

PROMPTS = 3


@dataclass(frozen=True)
class Diagnosis:
    """What was found of a run's servers, and what follows from it. Every line names the key to change."""

    capabilities: dict[str, Capabilities]  # what all servers of a role offer, by role
    roles: dict[str, ServerFacts]  # by server; a role with several servers has them numbered
    refusals: list[str]
    warnings: list[str]

    def raise_if_unsafe(self) -> None:
        """Raise ConfigError, with a line for each refusal, if there are any."""
        if self.refusals:
            raise ConfigError("\n".join(self.refusals))


async def diagnose(
    config: Config, plan: TrainPlan, backends: Mapping[str, Backend], answered: Callable[[], None] = lambda: None
) -> Diagnosis:
    """Ask every server of a run, and return what was found. Raises a `RequestError` if one does not answer at all.

    `answered` is called with each answer.
    """
    servers = {role: servers_of(role, backend) for role, backend in backends.items()}
    every = {name: backend for each in servers.values() for name, backend in each.items()}
    said = dict(zip(every, await gather(capabilities(backend) for backend in every.values()), strict=True))
    first = next(iter(servers["student"]))
    asked = await _asked(config, plan, every[first], said[first], answered)
    agreements, asked_of = {}, {role: _of_role(asked, plan, role) for role in servers}
    for role, own in servers.items():
        async with _answering(backends[role]):
            agreements[role] = await agreement(role, own, said, asked_of[role])
            await _measure_noise(role_model(config, plan, role), role, own, agreements[role], asked_of[role])
    together = {role: found.together for role, found in agreements.items()}
    together |= of_student(config, together["student"])
    refusals = [line for found in agreements.values() for line in found.refusals]
    try:
        needs = plan.policy.needs
        summing = [role for role, each in plan.teachers.items() if sums_ends(config, needs, plan.student, each)]
        fingerprints = {role: plan.teachers[role].vocabulary.fingerprint for role in plan.own_tokens}
        check_capabilities(config, needs, together, sums_ends=summing, own_fingerprints=fingerprints)
    except ConfigError as error:
        refusals += str(error).splitlines()
    diagnoses = [
        ServerDiagnosis(role, name, backend, said[name], config, plan, asked_of[role])
        for role, each in servers.items()
        for name, backend in each.items()
    ]

    async def do(each: ServerDiagnosis, probes: Iterator[Probe]) -> None:
        async with _answering(backends[each.role]):
            await each.ask(probes)

    await gather_answers(do(each, each.probes()) for each in diagnoses)
    for each in diagnoses:  # one after the other, since servers that share processors would slow each other down
        await do(each, each.time())
        if len(servers[each.role]) > 1:
            each.facts = replace(each.facts, servers_differ_nats=agreements[each.role].largest_nats)
        each.judge()
    warnings = await in_thread(plan_warnings, config, plan) + [
        line for found in agreements.values() for line in found.warnings
    ]
    return Diagnosis(
        capabilities=together,
        roles={each.name: each.facts for each in diagnoses},
        refusals=refusals + [line for each in diagnoses for line in each.refusals],
        warnings=warnings + [line for each in diagnoses for line in each.warnings],
    )


def _answering(backend: Backend) -> AbstractAsyncContextManager[None]:
    """Keep a role's servers awake while each is asked itself."""
    return backend.answering() if isinstance(backend, ReplicaPool) else nullcontext()


async def _measure_noise(
    model: ModelConfig, role: str, servers: Mapping[str, Backend], found: Agreement, asked: Asked
) -> None:
    """Measure the noise of servers in 16 bits on the run's own prompts, where the configuration does not state it.

    What a server finds at its start is of a few rows. It stands where noise is that of float32.
    """
    together, first = found.together, next(iter(servers.values()))
    stated = getattr(model.backend, "logprob_noise_nats", None)
    is_measurable = together.max_top_k > 0 and isinstance(first, Scorer)
    if (
        stated is not None
        or found.refusals
        or together.logprob_noise_nats <= SURE_NATS
        or not is_measurable
        or holds_unknown_weights(together)
    ):
        return
    speaks = isinstance(first, Generator) and together.generation and together.max_generation_top_k > 0
    top_k = min(TOP_K, together.max_top_k, together.max_generation_top_k if speaks else TOP_K)
    try:
        differences = await questions.recomputed(
            list(servers.values()), asked, top_k=top_k, max_tokens=RESPONSE_TOKENS, speaks=speaks
        )
    except RequestError as error:
        lines = found.refusals if error.failure_class is FailureClass.THROTTLED else found.warnings
        lines.append(f"{role}.backend: its noise could not be measured on the run's prompts: {error}")
        return
    if (errors := logit_errors(differences)).size:
        found.together = msgspec.structs.replace(together, logprob_noise_nats=noise_nats(errors))


async def compare_students(
    config: Config,
    plan: TrainPlan,
    student: Backend,
    found: Capabilities,
    warn: Callable[[str], None],
    answered: Callable[[], None] = lambda: None,
) -> Capabilities:
    """Return what the student's servers offer together, once they hold this run's weights.

    They could not be compared before, if it was not known which weights they held. Raises ConfigError if they differ
    by more than noise.
    """
    servers = servers_of("student", student)
    if len(servers) < 2 or not holds_unknown_weights(found):
        return found
    said = {name: msgspec.structs.replace(found, version=WeightVersion(0, 0)) for name in servers}
    first = next(iter(servers))
    asked = await _asked(config, plan, servers[first], said[first], answered)
    compared = await agreement("student", servers, said, asked)
    if compared.refusals:
        raise ConfigError("\n".join(compared.refusals))
    for warning in compared.warnings:
        warn(warning)
    return msgspec.structs.replace(compared.together, version=found.version)


async def capabilities(backend: Backend) -> Capabilities:
    deadline = asyncio.get_running_loop().time() + CAPABILITIES_TIMEOUT_S
    return await backend.capabilities(deadline=deadline)


def _of_role(asked: Asked, plan: TrainPlan, role: str) -> Asked:
    """Return what is asked of this role's servers: of a teacher's behind its own prompts too, and in its own tokens."""
    if plan.teacher_renderers.get(role, plan.renderer) is plan.renderer:
        return asked
    name = teacher_name(role) or ""
    if (own_tokens := plan.own_tokens.get(role)) is None:
        return replace(asked, teacher_prompts=[each.read_by(name) for each in islice(plan.schedule, PROMPTS)])
    asking = (prompt for prompt in plan.schedule if prompt.problem.asks(name))
    prompts = [prompt.read_by(name) for prompt in islice(asking, PROMPTS)]
    # A young student may write nothing that is text.
    readings = [own_tokens.read(response) for response in asked.responses[: len(prompts)]]
    read = [
        reading.ids if len(reading.ids) > 1 else prompt[-RESPONSE_TOKENS:]
        for reading, prompt in zip(readings, prompts, strict=True)
    ]
    ends = plan.teachers[role].vocabulary.end_token_ids
    return replace(asked, prompts=prompts, responses=read, readings=readings, stop_token_ids=ends, vocab_limit=None)


async def _asked(
    config: Config, plan: TrainPlan, student: Any, said: Capabilities, answered: Callable[[], None] = lambda: None
) -> Asked:
    """Return prompts of the run, each with a response of the student."""
    prompts = [prompt.token_ids for prompt in islice(plan.schedule, PROMPTS)]
    asked = Asked(
        prompts,
        [prompt[-RESPONSE_TOKENS:] for prompt in prompts],
        plan.stop_token_ids,
        plan.common.limit,
        attempt_timeout_s=config.stages.attempt_timeout_s,
        answered=answered,
    )
    if not said.generation:
        return asked
    return replace(asked, responses=await questions.responses(student, asked, RESPONSE_TOKENS))
