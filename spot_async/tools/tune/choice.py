"""Chooses the limits and the `max_staleness` whose simulated iteration is shortest, among those that were measured.

`simulate` says how long an iteration takes; nothing here computes a time. Each stage of a server gets the same limit,
since a strict iteration begins with rollouts alone and ends with probes alone. Of limits that are nearly as good as the
best, the smallest is chosen: requests that wait in a server are out of our hands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from spot_async.config import Config
from spot_async.errors import DataError
from spot_async.stages.services import STAGE_SERVERS
from spot_async.tools.pages.series import seconds, short_number
from spot_async.tools.simulate.lengths import RecordedLengths, RecordedPrompt, Workload
from spot_async.tools.simulate.measured import ENOUGH, Ramp, Recommendation, rates_of_ramps, running_medians
from spot_async.tools.simulate.rates import RATES, ROLES, ClusterRates, cluster_rates, configured_slots, served_roles
from spot_async.tools.simulate.reading import Recorded, read_run
from spot_async.tools.simulate.simulation import NEARLY, Outcome, simulate, simulate_one, sufficient
from spot_async.tools.simulate.view import binding, staleness_words
from spot_async.types import PolicyNeeds

MOST_STALENESS = 2  # that is simulated
ITERATIONS = 6  # of the simulations that are told
COMPARED = 2  # of those that compare limits
AT_ONCE = 1e12  # tokens a second of what nobody has measured: it then holds nothing up


class Choice(NamedTuple):
    """What follows from the ramps."""

    ramps: list[Ramp]  # with their knees
    recommendations: list[Recommendation]
    advice: list[str]
    warnings: list[str]


class Limited:
    """The run with limits of its servers. They are by server, as requests in flight at each one."""

    def __init__(self, config: Config, rates: ClusterRates, workload: Workload, ramps: Sequence[Ramp]) -> None:
        self._config = config
        self._rates = rates
        self._workload = workload
        self._stages = {ramp.server: ramp.levels[-1].stages for ramp in ramps}

    def by_stage(self, limits: Mapping[str, int]) -> dict[str, int]:
        """Return the limits of the stages, each of which is for all servers of a role together."""
        return {
            stage: level * (1 if server == "verifier" else self._rates.of(server).replicas or 1)
            for server, level in limits.items()
            for stage in STAGE_SERVERS
            if stage in self._stages[server]
        }

    def iteration_s(self, limits: Mapping[str, int], staleness: int, iterations: int = COMPARED) -> float:
        return simulate_one(self._run(limits), self._rates, self._workload, staleness, iterations).iteration_s

    def outcomes(self, limits: Mapping[str, int], most_staleness: int) -> list[Outcome]:
        run = self._run(limits)
        return simulate(run, self._rates, self._workload, most_staleness=most_staleness, iterations=ITERATIONS)

    def _run(self, limits: Mapping[str, int]) -> Config:
        stages = {
            stage: getattr(self._config.stages, stage).model_copy(update={"concurrency": limit})
            for stage, limit in self.by_stage(limits).items()
        }
        return self._config.model_copy(update={"stages": self._config.stages.model_copy(update=stages)})


def check_run(run: Path, config: Config) -> None:
    """Raise DataError unless the run has what a simulation needs besides the servers."""
    recorded = read_run(run, config)
    if "trainer" not in recorded.rates or recorded.lengths is None:
        missing = "trained" if "trainer" not in recorded.rates else "has samples"
        raise DataError(
            f"--from {run}: no iteration of it {missing}: give a run that has the trainer's rate and lengths"
        )


def choose(
    config: Config, needs: PolicyNeeds, ramps: Sequence[Ramp], prompts: Sequence[RecordedPrompt], run: Path | None
) -> Choice:
    """Return what follows from the ramps.

    `prompts` have the lengths that were met while tuning. A `run` has its own and its trainer, and what it says of
    servers counts as for `simulate --from`. Without one, training takes no time, and `max_staleness` stays.
    """
    recorded = Recorded({}, None) if run is None else read_run(run, config)
    known = rates_of_ramps(ramps) | recorded.rates
    unknown = [name for name in (*served_roles(config, needs), "trainer") if name not in known]
    at_once = {name: dict.fromkeys(RATES if name in ROLES else ["tokens_per_s"], AT_ONCE) for name in unknown}
    sources = [at_once, configured_slots(config, needs), rates_of_ramps(ramps), recorded.rates]
    rates = cluster_rates(sources, config, needs, knows_lengths=True)
    workload = Workload.of(recorded.lengths or RecordedLengths(prompts), config.sampling.max_response_tokens)
    whole = [ramp for ramp in ramps if ramp.is_whole]
    limited = Limited(config, rates, workload, whole)
    if run is None:
        limits = shortest(limited, whole, config.max_staleness)
        chosen = limited.outcomes(limits, config.max_staleness)[-1]
        found, advice = [], binding(chosen)
    else:
        widest = {ramp.server: not_slower(ramp)[-1] for ramp in whole}
        limits = shortest(limited, whole, sufficient(limited.outcomes(widest, MOST_STALENESS)).max_staleness)
        chosen = sufficient(outcomes := limited.outcomes(limits, MOST_STALENESS))
        advice = [staleness_words(outcomes), *binding(chosen)]
        reason = f"with the trainer and the lengths of {run}: {advice[0]}"
        found = [_recommended("max_staleness", config.max_staleness, chosen.max_staleness, reason)]
    before_s = limited.iteration_s({}, chosen.max_staleness, ITERATIONS)
    times = f"a simulated iteration takes {seconds(chosen.iteration_s)}, and {seconds(before_s)} as configured"
    reasons = {
        ramp.server: f"{_measured(ramp, limits[ramp.server])}; {times}" for ramp in whole if ramp.server in limits
    }
    for stage, limit in limited.by_stage(limits).items():
        now, reason = getattr(config.stages, stage).concurrency, reasons[STAGE_SERVERS[stage]]
        found.append(_recommended(f"stages.{stage}.concurrency", now, limit, reason))
    if unknown:
        advice.append(f"simulated as if it took no time, since nobody has measured it: {', '.join(unknown)}")
    advice += [f"the {ramp.server} answers at once: no limit of its stages matters" for ramp in ramps
               if ramp.ended == "instant"]  # fmt: skip
    return Choice(
        [msgspec.structs.replace(ramp, knee=limits.get(ramp.server)) for ramp in ramps],
        found,
        advice,
        [line for ramp in ramps for line in warnings(ramp, config)],
    )


def shortest(limited: Limited, ramps: Sequence[Ramp], staleness: int) -> dict[str, int]:
    """Return the smallest measured limit of each server with which a simulated iteration is nearly the shortest.

    A server of which none is so has no limit here, and its own stays.
    """
    limits = {ramp.server: not_slower(ramp)[-1] for ramp in ramps}
    best_s = min(limited.iteration_s({}, staleness), limited.iteration_s(limits, staleness))
    for ramp in ramps:
        levels = not_slower(ramp)

        def is_enough(level: int, server: str = ramp.server) -> bool:
            return limited.iteration_s({**limits, server: level}, staleness) <= NEARLY * best_s

        place = bisect_left(levels, True, key=is_enough)  # within these, more in flight is no slower
        if place < len(levels):
            limits[ramp.server] = levels[place]
        else:
            del limits[ramp.server]
    return limits


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


def _recommended(key: str, configured: int, recommended: int, reason: str) -> Recommendation:
    return Recommendation(key=key, configured=configured, recommended=recommended, reason=reason)


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
        case "demand" if max(each.throughput for each in ramp.levels[:-1]) < ENOUGH * last.throughput:
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
