"""Recommends a `max_staleness`, by simulating the run with the servers as they were measured.

The ramps know no trainer and few lengths. Both are taken from an earlier run of the same student.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from spot_async.config import Config, StagesConfig
from spot_async.errors import DataError
from spot_async.tools.simulate.command import configured_slots
from spot_async.tools.simulate.lengths import Workload
from spot_async.tools.simulate.rates import cluster_rates
from spot_async.tools.simulate.reading import rates_of_ramps, read_run
from spot_async.tools.simulate.simulation import simulate, sufficient
from spot_async.tools.tune.recommendation import Recommendation, conclude
from spot_async.tools.tune.results import Tuning
from spot_async.types import PolicyNeeds

MOST_STALENESS = 2  # that is simulated
ITERATIONS = 6  # of each simulation that count


def check_run(run: Path, config: Config) -> None:
    """Raise DataError unless the run has what a simulation needs besides the servers."""
    recorded = read_run(run, config)
    if "trainer" not in recorded.rates or recorded.lengths is None:
        missing = "trained" if "trainer" not in recorded.rates else "has samples"
        raise DataError(
            f"--from {run}: no iteration of it {missing}: give a run that has the trainer's rate and lengths"
        )


def with_staleness(tuning: Tuning, config: Config, needs: PolicyNeeds, run: Path) -> Tuning:
    """Return the tuning with a recommended `max_staleness`, and with limits for it."""
    lagging = config.model_copy(update={"max_staleness": max(1, config.max_staleness)})
    shared = conclude(lagging, needs, tuning.ramps, tuning.requests_per_prompt)
    recorded = read_run(run, config)
    sources = [configured_slots(config, needs), recorded.rates, rates_of_ramps(tuning.ramps)]
    rates = cluster_rates(sources, config, needs, knows_lengths=recorded.lengths is not None)
    assert recorded.lengths is not None  # as `check_run` saw
    outcomes = simulate(
        config.model_copy(update={"stages": _limited(config.stages, shared.recommendations)}),
        rates,
        Workload.of(recorded.lengths, config.sampling.max_response_tokens),
        most_staleness=MOST_STALENESS,
        iterations=ITERATIONS,
    )
    enough = sufficient(outcomes)
    times = ", ".join(f"{each.iteration_s:.3g} s with {each.max_staleness}" for each in outcomes)
    found = Recommendation(
        key="max_staleness",
        configured=config.max_staleness,
        recommended=enough.max_staleness,
        reason=f"simulated with trainer and lengths of {run}, an iteration takes {times}; none can be shorter than "
        f"{enough.bound.seconds:.3g} s ({enough.bound.by})",
    )
    chosen = conclude(
        config.model_copy(update={"max_staleness": enough.max_staleness}),
        needs,
        tuning.ramps,
        tuning.requests_per_prompt,
    )
    return msgspec.structs.replace(
        tuning, recommendations=[found, *chosen.recommendations], advice=chosen.advice, warnings=tuning.warnings
    )


def _limited(stages: StagesConfig, recommendations: list[Recommendation]) -> StagesConfig:
    """Return the stages with the recommended limits."""
    limits = {each.key.split(".")[1]: each.recommended for each in recommendations}
    return stages.model_copy(
        update={name: getattr(stages, name).model_copy(update={"concurrency": n}) for name, n in limits.items()}
    )
