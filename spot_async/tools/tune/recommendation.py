"""Recommends limits of the stages from the measured ramps, each with its reason, and says what no limit can help. Pure.

A server's knee is the number of requests in flight that pays, over all stages that ask it. How stages share it depends
on the run:

* In an asynchronous run (`max_staleness` above 0) the stages' mix is always the same. So they share the knee as they
  did when it was measured. By Little's law, a stage's share is its rate times its latency.
* In a strict run an iteration begins with nothing but rollouts and ends with nothing but probes, each alone with the
  server. So each stage may fill the knee.

No stage gets more than the prompts of a batch can ask for at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from spot_async.config import Config, ModelConfig
from spot_async.stages.services import requests_per_prompt
from spot_async.tools.tune.measurement import Level, Ramp
from spot_async.types import PolicyNeeds

FEEDS_MORE = 2.0  # another server would have work if the run can ask for so many times the knee
NEAR_SLOTS = 0.75  # a knee above this share of a server's slots is taken for the slots


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A value for one configuration key, with its reason."""

    key: str
    configured: int
    recommended: int
    reason: str


class Conclusions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that follows from the ramps."""

    recommendations: list[Recommendation]
    advice: list[str]
    warnings: list[str]


def demands(config: Config, needs: PolicyNeeds) -> dict[str, int]:
    """Return the most requests that each stage can have, waiting or in flight, from all prompts that run at a time."""
    per_prompt = requests_per_prompt(samples=needs.samples_per_prompt, probes=needs.probes_per_prompt)
    return {stage: config.queue_capacity_prompts * count for stage, count in per_prompt.items()}


def conclude(
    config: Config, needs: PolicyNeeds, ramps: Sequence[Ramp], requests_per_prompt: Mapping[str, float]
) -> Conclusions:
    """Return what follows from the ramps. `requests_per_prompt` is how often a prompt asks each server on average."""
    asked = demands(config, needs)
    recommendations: list[Recommendation] = []
    advice: list[str] = []
    warnings: list[str] = []
    for ramp in ramps:
        level = ramp.at_knee
        warnings += _cut_short(ramp)
        if level is None:
            continue
        if ramp.ended == "instant":
            advice.append(f"the {ramp.server} answers in {duration(level.p50_s)}: no limit of its stages matters")
            continue
        servers = _servers(config, ramp.server)
        recommendations += _limits(config, ramp, level, asked, servers)
        warnings += _too_small_batch(config, ramp, level, asked, servers)
    return Conclusions(
        recommendations=recommendations,
        advice=[*_bottleneck(config, ramps, asked, requests_per_prompt), *advice],
        warnings=warnings,
    )


def shares(level: Level) -> dict[str, float]:
    """Return each stage's share of what was in flight: its rate times its latency, over the sum of all stages'."""
    busy_s = sum(load.busy_s for load in level.stages.values())
    return {stage: load.busy_s / busy_s for stage, load in level.stages.items()}


def stage_limit(knee: int, share: float, demand: int, *, is_strict: bool) -> int:
    """Return the limit of one stage. `knee` is that of all the servers of its role together."""
    return max(1, min(demand, knee if is_strict else math.ceil(share * knee)))


def _limits(config: Config, ramp: Ramp, level: Level, asked: Mapping[str, int], servers: int) -> list[Recommendation]:
    is_strict = config.max_staleness == 0
    found = []
    for stage, share in shares(level).items():
        limit = stage_limit(level.concurrency * servers, share, asked[stage], is_strict=is_strict)
        found.append(
            Recommendation(
                key=f"stages.{stage}.concurrency",
                configured=getattr(config.stages, stage).concurrency,
                recommended=limit,
                reason=_reason(ramp, level, stage, share, limit, asked[stage], servers),
            )
        )
    return found


def _reason(ramp: Ramp, level: Level, stage: str, share: float, limit: int, demand: int, servers: int) -> str:
    alone, most = ramp.levels[0], max(each.throughput for each in ramp.levels)
    scatter = f"; {_rate(most)} was a single row, running medians of three decide" if most > ramp.best else ""
    knee = (
        f"the {ramp.server} gives {min(1.0, level.throughput / ramp.best):.0%} of its best throughput "
        f"({_rate(level.throughput)}{scatter}) with {level.concurrency} in flight; half of its answers then take "
        f"{duration(level.p50_s)}, with {alone.concurrency} in flight {duration(alone.p50_s)}"
    )
    if servers > 1:
        knee += f"; {servers} such servers"
    if len(level.stages) > 1:
        knee += f"; {share:.0%} of them were {stage} requests"
    if limit == demand < level.concurrency * servers:
        knee += f"; a batch has no more than {demand} {stage} requests at a time"
    return knee


def _too_small_batch(config: Config, ramp: Ramp, level: Level, asked: Mapping[str, int], servers: int) -> list[str]:
    knee = level.concurrency * servers
    stage = min(level.stages, key=lambda stage: asked[stage])
    if asked[stage] >= knee:
        return []
    return [
        f"training.batch_size={config.training.batch_size}: {asked[stage]} {stage} requests at a time cannot fill the "
        f"{ramp.server}, whose knee is {knee}: a batch that is {math.ceil(knee / asked[stage])} times as large would"
    ]


def _cut_short(ramp: Ramp) -> list[str]:
    """Say why a ramp ended before its time, and that no limits are written if its knee was not met."""
    if not ramp.levels:
        return [f"{ramp.server}: {_nothing_measured(ramp)}"]
    highest = ramp.levels[-1].concurrency
    none = "" if ramp.knee is not None else "; its throughput still rose, so its limits stay as configured"
    match ramp.ended:
        case "throttled":
            return [f"{ramp.server}: asked to be left alone above {highest} in flight: {ramp.failure}{none}"]
        case "failed" | "budget":
            return [f"{ramp.server}: requests failed above {highest} in flight: {ramp.failure}{none}"]
        case "time" | "requests" if none:
            given = "--seconds" if ramp.ended == "time" else "--limit-requests"
            return [f"{ramp.server}: {given} ran out with {highest} in flight: give more{none}"]
        case _:
            return []


def _nothing_measured(ramp: Ramp) -> str:
    match ramp.ended:
        case "time":
            return "not one level was measured in time: give more --seconds, a hundred times a request's latency or so"
        case "requests":
            return "not one level was measured with so few requests: give more --limit-requests"
        case _:
            return f"nothing could be measured: {ramp.failure}"


def _bottleneck(
    config: Config, ramps: Sequence[Ramp], asked: Mapping[str, int], requests_per_prompt: Mapping[str, float]
) -> list[str]:
    """Return which server bounds an iteration when all are at their knees, and what would raise that bound.

    Nothing, if a server's knee was not met: it may be faster than was measured.
    """
    seconds = {
        ramp.server: requests_per_prompt[ramp.server] / ramp.best / _servers(config, ramp.server)
        for ramp in ramps
        if ramp.best > 0
    }
    if not seconds or any(ramp.knee is None for ramp in ramps):
        return []
    slowest = max(ramps, key=lambda ramp: seconds.get(ramp.server, 0.0))
    name, level, batch = slowest.server, slowest.at_knee, config.training.batch_size
    each = ", ".join(f"{server} {duration(s)}" for server, s in sorted(seconds.items(), key=lambda item: -item[1]))
    found = [
        f"at best a prompt takes {each}: so the {name} needs {duration(batch * seconds[name])} for a batch of {batch}, "
        "and no limit changes that"
    ]
    if level is None or name == "verifier":
        return found
    knee, demand = level.concurrency * _servers(config, name), max(asked[stage] for stage in level.stages)
    slots = getattr(getattr(_model(config, name), "backend", None), "slots", None)
    if slots is not None and level.concurrency >= NEAR_SLOTS * slots and demand > slots:
        found.append(f"the {name}'s knee lies at its slots: try {name}.backend.slots={2 * slots} and tune again")
    if demand >= FEEDS_MORE * knee:
        found.append(
            f"a batch has up to {demand} requests for the {name} at a time, and {knee} keep it busy: another replica "
            "on hardware of its own would have work"
        )
    return found


def _servers(config: Config, server: str) -> int:
    model = _model(config, server)
    return 1 if model is None else len(model.backend.servers())


def _model(config: Config, server: str) -> ModelConfig | None:
    """Return the model that a server serves; None for the verifier. A reference without a section is the student's."""
    models = {"student": config.student, "teacher": config.teacher, "reference": config.reference or config.student}
    return models.get(server)


def duration(seconds: float) -> str:
    """Return seconds as people read them, with at least two digits."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"


def _rate(per_s: float) -> str:
    return f"{per_s:.4g} requests a second"
