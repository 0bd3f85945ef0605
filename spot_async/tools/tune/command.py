"""`spot-async tune`: measures, shows tables, and writes its recommendation with a page beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.tools.tune.measurement import Level
from spot_async.tools.tune.recommendation import duration
from spot_async.tools.tune.results import write
from spot_async.tools.tune.running import TuneOptions, tune
from spot_async.tools.tune.staleness import with_staleness
from spot_async.tools.tune.view import terminal_tables, tuning_page


def run(
    screen: Console,
    config: Config,
    plan: TrainPlan,
    directory: Path,
    options: TuneOptions,
    *,
    source: Path,
    output: Path,
    overrides: Sequence[str],
) -> None:
    """Tune, and show and write the results. Raises what `tune` raises, and DataError if they cannot be written."""
    with screen.status("starting the servers") as status:

        def tell(line: str) -> None:
            screen.print(Text(line), soft_wrap=True)

        def show(server: str, level: Level) -> None:
            status.update(
                f"{server}: {level.throughput:.4g} requests/s with {level.concurrency} in flight, "
                f"half of them within {duration(level.p50_s)}"
            )

        tuning = asyncio.run(tune(config, plan, directory, options, tell=tell, on_level=show))
    if options.run is not None:
        with screen.status("simulating"):
            tuning = with_staleness(tuning, config, plan.policy.needs, options.run)
    for table in terminal_tables(tuning):
        screen.print(table)
    for warning in tuning.warnings:
        screen.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for line in tuning.advice:
        screen.print(Text(line), soft_wrap=True)
    write(tuning, source, output, list(overrides), tuning_page(tuning, source.stem))
    train = " ".join(["spot-async train", str(output), *overrides])
    screen.print(Text(f"to train with these limits: {train}"), soft_wrap=True)
    screen.print(Text(f"page: {output.with_suffix('.html')}"), soft_wrap=True)
