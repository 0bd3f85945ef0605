"""Chooses the limits and the `max_staleness` whose simulated iteration is shortest, among those that were measured.

`simulate` says how long an iteration takes; nothing here computes a time. Each server's limit is chosen as if nothing
else took time, so that it stays right when others get faster. Each stage of a server gets the same limit, since a
strict iteration begins with rollouts alone and ends with probes alone. Of limits that are nearly as good as the best,
the smallest is chosen: requests that wait in a server are out of our hands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from spot_async.config import ROLES, Config
from spot_async.errors import DataError
from spot_async.stages.services import STAGE_SERVERS
from spot_async.tools.pages.series import seconds, short_number
from spot_async.tools.simulate.lengths import RecordedLengths, RecordedPrompt, Workload
from spot_async.tools.simulate.measured import ENOUGH, Ramp, Recommendation, Tuning, rates_of_ramps, running_medians
from spot_async.tools.simulate.rates import RATES, ClusterRates, Tree, cluster_rates, served_roles
from spot_async.tools.simulate.reading import Recorded, read_run
from spot_async.tools.simulate.simulation import NEARLY, simulate, simulate_one, sufficient
from spot_async.tools.simulate.view import binding, sharing_words, staleness_words
from spot_async.types import PolicyNeeds

MOST_STALENESS = 2  # that is simulated
ITERATIONS = 6  # of the simulations that are told
COMPARED = 2  # of those that compare limits
AT_ONCE = 1e12  # tokens a second of what holds nothing up


def check_run(run: Path, config: Config) -> None:
    """Raise DataError unless the run has what a simulation needs besides the servers."""
    recorded = read_run(run, config)
    if "trainer" not in recorded.rates or recorded.lengths is None:
        missing = "trained" if "trainer" not in recorded.rates else "is in its trace"
        raise DataError(
            f"--from {run}: no iteration of it {missing}: give a run that has the trainer's rate and lengths"
        )


def choose(
    config: Config, needs: PolicyNeeds, measured: Tuning, prompts: Sequence[RecordedPrompt], run: Path | None
) -> Tuning:
    """Return what was measured with what follows from its ramps.

    `prompts` have the lengths that were met while tuning. A `run` has its own and its trainer, and what it says of
    servers counts as for `simulate --from`. Without one, training takes no time, and `max_staleness` stays. It also
    stays where trainer and servers share cores.
    """
    ramps, recorded = measured.ramps, Recorded({}, None) if run is None else read_run(run, config)
    workload = Workload.of(recorded.lengths or RecordedLengths(prompts), config.sampling.max_response_tokens)
    limits = {ramp.server: limit for ramp in ramps if (limit := enough(config, needs, ramp, workload)) is not None}
    limited = with_limits(config, stage_limits(config, ramps, limits))
    rates, unknown = _rates(config, needs, [rates_of_ramps(ramps), recorded.rates])
    sharing = "" if run is None else sharing_words(config, run)
    decides = run is not None and not sharing  # on the staleness
    most = MOST_STALENESS if decides else config.max_staleness
    outcomes = simulate(limited, rates, workload, most_staleness=most, iterations=ITERATIONS)
    chosen = sufficient(outcomes) if decides else outcomes[-1]
    advice, found = [*binding(chosen), *filter(None, [sharing])], []
    if decides:
        advice = [staleness_words(outcomes), *advice]
        reason = f"with the trainer and the lengths of {run}: {advice[0]}"
        now, best = config.max_staleness, chosen.max_staleness
        found = [Recommendation(key="max_staleness", configured=now, recommended=best, reason=reason)]
    before_s = simulate_one(config, rates, workload, chosen.max_staleness, ITERATIONS).iteration_s
    times = f"a simulated iteration takes {seconds(chosen.iteration_s)}, and {seconds(before_s)} as configured"
    reasons = {ramp.server: _measured(ramp, limits[ramp.server]) for ramp in ramps if ramp.server in limits}
    for stage, limit in stage_limits(config, ramps, limits).items():
        now, reason = getattr(config.stages, stage).concurrency, reasons[STAGE_SERVERS[stage]]
        key, reason = f"stages.{stage}.concurrency", f"{reason}; {times}"
        found.append(Recommendation(key=key, configured=now, recommended=limit, reason=reason))
    if unknown:
        advice.append(f"simulated as if it took no time, since nobody has measured it: {', '.join(unknown)}")
    advice += [f"the {ramp.server} answers at once: no limit of its stages matters" for ramp in ramps
               if ramp.ended == "instant"]  # fmt: skip
    return msgspec.structs.replace(
        measured,
        ramps=[msgspec.structs.replace(ramp, knee=limits.get(ramp.server)) for ramp in ramps],
        recommendations=found,
        advice=advice,
        warnings=[*measured.warnings, *(line for ramp in ramps for line in warnings(ramp, config))],
    )


def enough(config: Config, needs: PolicyNeeds, ramp: Ramp, workload: Workload) -> int | None:
    """Return the smallest measured level with which a simulated strict iteration is nearly the shortest, while all but
    this server take no time. None if none is, or if more than was measured may be better.
    """
    if not ramp.is_whole:
        return None
    rates, _ = _rates(config, needs, [rates_of_ramps([ramp])])

    def iteration_s(level: int | None) -> float:
        limits = {} if level is None else {ramp.server: level}
        limited = with_limits(config, stage_limits(config, [ramp], limits))
        return simulate_one(limited, rates, workload, 0, COMPARED).iteration_s

    levels = not_slower(ramp)
    best_s = min(iteration_s(None), iteration_s(levels[-1]))
    place = bisect_left(levels, True, key=lambda level: iteration_s(level) <= NEARLY * best_s)
    return levels[place] if place < len(levels) else None


def stage_limits(config: Config, ramps: Sequence[Ramp], limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits of the stages from those of their servers, each for all servers of a role together."""
    asked = {stage for ramp in ramps for level in ramp.levels for stage in level.stages}
    numbers = {role: len(config.models.get(role, config.student).backend.servers()) for role in ROLES}
    return {
        stage: limits[server] * numbers.get(server, 1)
        for stage, server in STAGE_SERVERS.items()
        if stage in asked and server in limits
    }


def with_limits(config: Config, limits: Mapping[str, int]) -> Config:
    stages = {
        stage: getattr(config.stages, stage).model_copy(update={"concurrency": limit})
        for stage, limit in limits.items()
    }
    return config.model_copy(update={"stages": config.stages.model_copy(update=stages)})


def _rates(config: Config, needs: PolicyNeeds, sources: Sequence[Tree]) -> tuple[ClusterRates, list[str]]:
    """Return the rates of these sources, and the names of what none of them knows, which then takes no time."""
    unknown = [
        name for name in (*served_roles(config, needs), "trainer") if not any(name in source for source in sources)
    ]
    at_once = {name: dict.fromkeys(RATES if name in ROLES else ["tokens_per_s"], AT_ONCE) for name in unknown}
    return cluster_rates([at_once, *sources], config, needs, knows_lengths=True), unknown


def not_slower(ramp: Ramp) -> list[int]:
    """Return the measured levels, without those beyond which a server gets slower."""
    calm = running_medians([level.throughput for level in ramp.levels])
    last = max(place for place, throughput in enumerate(calm) if throughput >= ENOUGH * max(calm))
    return [level.concurrency for level in ramp.levels[: last + 1]]


def _measured(ramp: Ramp, chosen: int) -> str:
    level, last = next(each for each in ramp.levels if each.concurrency == chosen), ramp.levels[-1]
    return (
        f"the {ramp.server} answers {short_number(level.throughput)} requests a second with {chosen} in flight, half "
        f"of them within {seconds(level.p50_s)}, and {short_number(last.throughput)} with {last.concurrency}"
    )


def warnings(ramp: Ramp, config: Config) -> list[str]:
    """Say why a ramp ended early, and that its limits stay; or that the run cannot fill the server."""
    if not ramp.levels:
        return [f"{ramp.server}: {_nothing_measured(ramp)}"]
    last, stays = ramp.levels[-1], "; its throughput still rose, so its limits stay as configured"
    match ramp.ended:
        case "throttled":
            return [f"{ramp.server}: asked to be left alone above {last.concurrency} in flight: {ramp.failure}{stays}"]
        case "failed" | "budget":
            return [f"{ramp.server}: requests failed above {last.concurrency} in flight: {ramp.failure}{stays}"]
        case "time" | "requests":
            given = "--seconds" if ramp.ended == "time" else "--limit-requests"
            return [f"{ramp.server}: {given} ran out with {last.concurrency} in flight: give more{stays}"]
        case "demand" if ramp.levels[:-1] and max(e.throughput for e in ramp.levels[:-1]) < ENOUGH * last.throughput:
            return [
                f"training.batch_size={config.training.batch_size}: {last.concurrency} requests at a time, the most "
                f"that it has, do not fill the {ramp.server}: a larger batch would use more of it"
            ]
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
