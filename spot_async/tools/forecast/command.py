"""`spot-async forecast`: measures, computes, and shows tables, a verdict in words, and a page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.spending.account import FREE
from spot_async.tools.forecast.forecast import make_forecast
from spot_async.tools.forecast.measurement import Measurement
from spot_async.tools.forecast.results import ForecastFile, write
from spot_async.tools.forecast.running import ForecastOptions, measure, policy_keys
from spot_async.tools.forecast.verdict import judge
from spot_async.tools.forecast.view import OUTCOME_STYLES, forecast_page, terminal_tables


def show(
    screen: Console,
    config: Config,
    measurement: Measurement,
    *,
    worth: float,
    notes: Sequence[str],
    name: str,
    output: Path,
    overrides: Sequence[str],
) -> None:
    """Compute the forecast, show it, and write the file and the page. Raises DataError if they cannot be written."""
    prices = getattr(config.student.backend, "prices", None) or FREE
    with screen.status("computing"):
        forecast = make_forecast(
            measurement.prompts,
            policy_keys(config),
            rollouts=measurement.rollouts,
            probes=measurement.probes,
            prices=prices,
        )
    verdict = judge(forecast, worth)
    found = ForecastFile(
        name=name,
        overrides=list(overrides),
        worth=worth,
        verdict=verdict,
        notes=[*notes, *measurement.notes],
        forecast=forecast,
        measurement=measurement,
    )
    for table in terminal_tables(forecast):
        screen.print(table)
    for line in found.notes:
        screen.print(Text(line), soft_wrap=True)
    screen.print(Text(verdict.sentence, style=OUTCOME_STYLES[verdict.outcome]), soft_wrap=True)
    for line in (*verdict.reasons, *verdict.changes):
        screen.print(Text(f"* {line}"), soft_wrap=True)
    write(found, output, forecast_page(found))
    screen.print(Text(f"page: {output.with_suffix('.html')}; for programs: {output}"), soft_wrap=True)


def measured_with_progress(
    screen: Console, config: Config, plan: TrainPlan, directory: Path, options: ForecastOptions
) -> Measurement:
    """Measure, with a bar of the prompts that are finished."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("starting the servers", total=None)

        def tell(line: str) -> None:
            progress.update(task, description=line)

        def on_prompt(finished: int, wanted: int) -> None:
            progress.update(task, description="prompts", completed=finished, total=wanted)

        return asyncio.run(measure(config, plan, directory, options, tell=tell, on_prompt=on_prompt))
