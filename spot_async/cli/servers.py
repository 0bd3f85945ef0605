"""The commands about servers, without a run: `serve`, `tune` and `forecast`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spot_async.base.tasks import root_cause
from spot_async.cli.arguments import ConfigPath, Overrides
from spot_async.cli.downloads import downloaded
from spot_async.cli.ending import exit_code, fail, screen
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError, SpotError


def serve(context: typer.Context) -> None:
    """Serve a model directory: generation, scoring, weight updates. See serve --help."""
    from spot_async.serving.__main__ import main as serve_model

    serve_model(context.args, program="spot-async serve")


def tune(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="default: CONFIG.tuned.yaml beside CONFIG")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="longest time the ramp of one server may take")] = 20.0,
    limit_requests: Annotated[int | None, typer.Option(min=1, help="sent to one server at most")] = None,
    paid: Annotated[
        bool, typer.Option("--paid", help="also ramp endpoints whose settings name prices or rate limits")
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="also recommend max_staleness, with this run's trainer and lengths"),
    ] = None,
    directory: Annotated[Path | None, typer.Option(help="where the servers' logs go; default: temporary")] = None,
) -> None:
    """Find how many requests in flight each of a run's servers pays for, and write the limits that follow.

    Asks for a few prompts as the run would, then sends those requests again, more and more of them at a time, to one
    server after the other. The file that is written is a configuration to train with: it has CONFIG as its base.
    """
    from spot_async.checks.plan import plan_training
    from spot_async.tools.tune.choice import check_run
    from spot_async.tools.tune.command import TuneOptions, check_options, without_files
    from spot_async.tools.tune.results import check_output

    output = output or config.with_name(f"{config.stem}.tuned.yaml")
    options = TuneOptions(config, overrides or (), output, seconds, limit_requests, paid, run)
    try:
        settings = without_files(load_config(config, overrides or ()))
        check_output(config, output)
        check_options(settings, options)
        if run is not None:
            check_run(run, settings)
        settings = downloaded(settings)
        plan = plan_training(settings)
    except (ConfigError, DataError) as error:
        fail(error, code=2)

    from spot_async.tools.scratch import working_directory
    from spot_async.tools.tune import command

    try:
        with working_directory(directory) as path:
            command.run(screen, settings, plan, path, options)
    except (SpotError, BaseExceptionGroup) as error:
        cause = root_cause(error)
        fail(cause, code=exit_code(cause))


def forecast(
    config: ConfigPath,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=2, help="problems to measure")] = 50,
    rollouts: Annotated[int, typer.Option(min=1, help="responses of the student to each problem")] = 8,
    probes: Annotated[int, typer.Option(min=2, help="continuations of each candidate, more than policy.probes")] = 16,
    limit_tokens: Annotated[
        int | None, typer.Option(min=1, help="begin no further problem once so many tokens were generated")
    ] = None,
    worth: Annotated[float, typer.Option(min=0.0, help="smallest gain in value a decision that counts as help")] = 0.01,
    earlier: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="compute from an earlier forecast's file, and ask no server"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="default: CONFIG.forecast.json beside CONFIG")
    ] = None,
    directory: Annotated[Path | None, typer.Option(help="where the servers' logs go; default: temporary")] = None,
) -> None:
    """Forecast, before any training, whether SPOT can help this student, with this teacher and these problems.

    The untrained student answers a few problems, and SPOT selects and probes as in training, with more probes of each
    candidate. Says how much the values of candidates differ, what B+ keeps, what a decision gains, what probes cost,
    and which keys would change that. Writes a page and a file for programs. Budgets of the configuration hold.
    """
    from spot_async.checks.plan import plan_training
    from spot_async.tools.forecast import command
    from spot_async.tools.forecast.results import check_output, read_forecast
    from spot_async.tools.forecast.running import (
        ForecastOptions,
        check_measurement,
        check_options,
        forecast_config,
        forecast_notes,
    )
    from spot_async.tools.scratch import working_directory

    output = output or config.with_name(f"{config.stem}.forecast.json")
    options = ForecastOptions(prompts, rollouts, probes, limit_tokens, worth)
    try:
        given = load_config(config, overrides or ())
        settings = forecast_config(given)
        check_output(output)
        if earlier is not None:
            measurement = read_forecast(earlier).measurement
            check_measurement(settings, measurement)
        else:
            check_options(settings, options)
            settings = downloaded(settings)
            plan = plan_training(settings)
    except (ConfigError, DataError) as error:
        fail(error, code=2)

    try:
        if earlier is None:
            with working_directory(directory) as path:
                measurement = command.measured_with_progress(screen, settings, plan, path, options)
        command.show(
            screen, settings, measurement, worth=worth, notes=forecast_notes(given), name=config.stem, output=output,
            overrides=overrides or (),
        )  # fmt: skip
    except (SpotError, BaseExceptionGroup) as error:
        cause = root_cause(error)
        fail(cause, code=exit_code(cause))
