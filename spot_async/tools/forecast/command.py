"""`spot-async forecast`: measures, computes, and shows tables, a verdict in words, and a page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from spot_async.base.files import read_json
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import ConfigError, DataError
from spot_async.spending.account import FREE
from spot_async.tools.forecast.forecast import make_forecast
from spot_async.tools.forecast.measurement import Measurement
from spot_async.tools.forecast.running import ForecastOptions, measure, policy_keys
from spot_async.tools.forecast.verdict import FORMAT, ForecastFile, default_worth, judge
from spot_async.tools.forecast.view import OUTCOME_STYLES, forecast_page, terminal_tables
from spot_async.tools.pages.page import write_files


def read_forecast(path: Path) -> ForecastFile:
    """Return a forecast from its file. Raises DataError if it cannot be read, or is of a newer format."""
    return read_json(path, ForecastFile, newest_format=FORMAT, otherwise="is no file of spot-async forecast")


def check_output(output: Path) -> None:
    """Raise ConfigError if `output` cannot be written, or is another program's file. Nothing is measured then."""
    if output.suffix != ".json":
        raise ConfigError(f"-o {output}: name a .json file; the page goes beside it as .html")
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: no directory {str(output.parent)!r}")
    if output.exists():
        try:
            read_forecast(output)
        except DataError:
            raise ConfigError(f"-o {output}: exists, and forecast did not write it; name another file") from None


def show(screen: Console, config: Config, measurement: Measurement, options: ForecastOptions, notes: list[str]) -> None:
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
    if config.sampling.top_p < 1:  # nobody knows it then: telemetry/outcome_slope.py
        forecast.figures.update(opd_gain=None, opd_reward_gain=None)
    worth = default_worth(forecast) if options.worth is None else options.worth
    verdict = judge(forecast, worth)
    found = ForecastFile(
        name=options.name,
        overrides=list(options.overrides),
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
    page = options.output.with_suffix(".html")
    write_files({options.output: msgspec.json.encode(found) + b"\n", page: forecast_page(found).encode()}, "-o")
    screen.print(Text(f"page: {page}; for programs: {options.output}"), soft_wrap=True)


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
