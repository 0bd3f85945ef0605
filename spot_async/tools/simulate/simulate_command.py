"""`spot-async simulate`: gathers rates and lengths, simulates, and shows what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spot_async.base.files import as_json
from spot_async.base.tasks import root_cause
from spot_async.base.text import rough_time
from spot_async.config import Config
from spot_async.config.loading import apply_override, read_tree
from spot_async.errors import SpotError
from spot_async.tools.simulate.lengths import Lengths, Workload
from spot_async.tools.simulate.measured import rates_of_ramps, read_tuning
from spot_async.tools.simulate.rates import ClusterRates, Tree, cluster_rates
from spot_async.tools.simulate.reading import Recorded, read_run, tune_beside
from spot_async.tools.simulate.simulation import Outcome, make_policy, simulate, sufficient
from spot_async.tools.simulate.view import (
    binding,
    core_words,
    outcome_table,
    own_words,
    rate_lines,
    sharing_words,
    staleness_words,
)


@dataclass(frozen=True)
class SimulateOptions:
    """The options of the command. The command line has checked their ranges."""

    run: Path | None = None  # whose files have rates and lengths
    tuning: Path | None = None  # a file of `tune`; default: the one beside the configuration
    rates: Path | None = None  # a file of stated rates
    stated: Sequence[str] = ()  # single rates, key=value
    max_staleness: int = 2
    iterations: int = 6
    is_json: bool = False


def run(screen: Console, source: Path, config: Config, options: SimulateOptions) -> None:
    """Simulate a configuration, and show it. Raises ConfigError or DataError for what cannot be simulated."""
    rates, lengths, told = gathered(source, config, options)
    workload = Workload.of(lengths, config.sampling.max_response_tokens, rates.environment)
    try:
        with screen.status("simulating"):
            outcomes = simulate(
                config, rates, workload, most_staleness=options.max_staleness, iterations=options.iterations
            )
    except ExceptionGroup as failures:
        raise SpotError(f"the simulated run ended early: {root_cause(failures)}") from failures
    if len(outcomes) <= options.max_staleness:
        told.append("with sleep_while_training only max_staleness=0 can be run: no other is simulated")
    if options.run is not None and not options.rates and not options.stated:
        told += own_words(options.run, outcomes)
    lines = [
        *([staleness_words(outcomes)] if len(outcomes) > 1 else []),
        *binding(sufficient(outcomes)),
        core_words(sufficient(outcomes)),
        *duration_lines(config, outcomes),
        *told,
        *rate_lines(rates, outcomes[0].response_tokens),
    ]
    if options.is_json:
        found = as_json({"rates": rates.model_dump(), "sources": told, "outcomes": outcomes})
        screen.print(found.decode(), end="", markup=False, highlight=False, soft_wrap=True)
    else:
        screen.print(outcome_table(outcomes))
        for line in lines:
            screen.print(Text(line), soft_wrap=True)


def duration_lines(config: Config, outcomes: Sequence[Outcome]) -> list[str]:
    """Return how long the whole run would take; nothing where its iterations follow from its problems."""
    count = config.training.iterations
    times = ", ".join(
        f"{rough_time(count * each.iteration_s)} with max_staleness={each.max_staleness}" for each in outcomes if count
    )
    about = "at least" if config.training.refill else "about"
    return [f"training.iterations={count} take {about} {times}; evaluations are left out"] if count else []


def gathered(source: Path, config: Config, options: SimulateOptions) -> tuple[ClusterRates, Lengths, list[str]]:
    """Return rates and lengths from all sources, and lines that name these.

    What is stated wins, then the run's own, then what `tune` measured.
    """
    needs = make_policy(config).needs
    sources: list[Tree] = []
    told: list[str] = []
    tuning = options.tuning or tune_beside(source)
    if tuning is not None:
        sources.append(rates_of_ramps(read_tuning(tuning).ramps))
        told.append(f"servers as spot-async tune measured them: {tuning}")
    recorded = Recorded({}, None)
    if options.run is not None:
        recorded = read_run(options.run, config)
        sources.append(recorded.rates)
        told.append(f"as the run measured them, {', '.join(recorded.rates) or 'nothing'}: {options.run}")
        told += filter(None, [sharing_words(config, options.run)])
    stated: Tree = {} if options.rates is None else read_tree(options.rates)
    for each in options.stated:
        apply_override(stated, each)
    sources.append(stated)
    knows_lengths = recorded.lengths is not None and "lengths" not in stated
    rates = cluster_rates(sources, config, needs, knows_lengths=knows_lengths)
    lengths = recorded.lengths if knows_lengths else None
    return rates, lengths or rates.lengths, told
