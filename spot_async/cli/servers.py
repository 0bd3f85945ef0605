"""The commands that ask servers, without a run: `check`, `serve` and `tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from spot_async.base.processes.private_directory import private_directory
from spot_async.base.tasks import root_cause
from spot_async.cli.arguments import ConfigPath, Overrides
from spot_async.cli.ending import downloaded, fail, screen
from spot_async.config import ROLES
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, SpotError
from spot_async.run_directory.layout import RunDirectory, name_of


@contextlib.contextmanager
def working_directory(given: Path | None) -> Iterator[Path]:
    """Make `given`, or a temporary directory that is deleted afterwards. This process's events go to `logs/` in it.

    Raises ConfigError if `given` cannot be made, and StorageError if a temporary directory cannot.
    """
    from spot_async.telemetry.run_log import log_events_to  # with problems and templates: not for --help

    with contextlib.ExitStack() as stack:
        path = given or stack.enter_context(private_directory("spot-async-"))
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made: {error.strerror}") from None
        stack.enter_context(log_events_to(path / "logs" / "events.jsonl"))
        yield path.resolve()


def check(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|FILE", help="a run's YAML file; or a problem file, or its hub id")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="override any key of CONFIG; of FILE, of a problem set: layout=dapo"
        ),
    ] = None,
    no_servers: Annotated[
        bool, typer.Option("--no-servers", help="look at files, problems and this machine alone; start nothing")
    ] = False,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="a run whose responses' lengths are assumed")
    ] = None,
    slope: Annotated[
        int | None,
        typer.Option("--slope", metavar="N", min=2, help="also supervise N problems: is the teacher worth it?"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print what was found of CONFIG as JSON")] = False,
    directory: Annotated[Path | None, typer.Option(help="where the servers' logs go; default: temporary")] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="an evaluation set to look for; may be given again")
    ] = None,
    verifier: Annotated[str | None, typer.Option(metavar="KIND", help="of FILE; default: math")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="whose tokenizer renders prompts of FILE")] = None,
) -> None:
    """Say whether a run is safe to train, and what it takes: memory, disk, tokens and money.

    Of CONFIG, it reads all files as `train` would, then starts or attaches the run's servers and asks them everything
    that a run depends on. `train` makes the same checks before it begins. Nothing is trained. `simulate` estimates the
    time of an iteration. With --slope N the run's policy also supervises N problems: how many points of accuracy do the
    teacher, outcomes and probes each add to a response, to first order?

    Of a problem FILE, it shows what is kept, dropped and mended, which answers cannot be verified, and what overlaps.

    Exit code 1 when the run would be unsafe, a server fails, or an answer in FILE is not right by its own verifier; 2
    when something is wrong with the configuration or cannot be read.
    """
    from spot_async.tools.check import check_command

    if not target.endswith((".yaml", ".yml")):
        if no_servers or earlier or slope or json or directory:
            raise ConfigError("--no-servers, --from, --slope, --json and --directory are for a run's YAML file")
        is_verifiable = check_command.show_file(screen, target, settings or (), against or (), verifier, model)
        if not is_verifiable:
            raise typer.Exit(1)
        return
    from spot_async.checks.machine import check_room
    from spot_async.checks.plan import plan_training  # imports transformers: not for --help
    from spot_async.tools.check.slope import check_slope

    if verifier or model:
        raise ConfigError("--verifier and --model are for files; CONFIG names them")
    if slope and no_servers:
        raise ConfigError("--slope asks the run's servers: leave out --no-servers")
    config = load_config(Path(target), settings or ())
    config = downloaded(config, weights=() if no_servers else ROLES)
    plan = plan_training(config, starts=not no_servers)
    if slope:
        check_slope(config, plan)
    path = RunDirectory.choose_path(config, name_of(Path(target)))
    found = check_command.check_files(config, plan, path, earlier, nodes=config.cluster.nodes or 1, rehearses=True)
    if not json:
        check_command.show_run(screen, config, plan, path, found, against or ())
    of_servers, failure = check_command.ServersCheck(), None
    if not no_servers:
        try:
            with working_directory(directory) as place:
                of_servers.run(screen, config, plan, place, is_shown=not json, problems=slope)
        except (SpotError, BaseExceptionGroup) as error:
            failure = root_cause(error)
    diagnosis = of_servers.diagnosis
    if json and (failure is None or diagnosis is not None):
        check_command.print_json(screen, found, of_servers)
    if failure is not None:
        fail(failure, code=1)
    check_room(path, config, plan)
    if diagnosis is not None and diagnosis.refusals:
        raise typer.Exit(1)


def serve(context: typer.Context) -> None:
    """Serve a model directory: generation, scoring, weight updates. See serve --help."""
    from spot_async.serving.__main__ import main as serve_model

    serve_model(context.args, program="spot-async serve")


def tune(
    config: ConfigPath,
    overrides: Overrides = None,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="NAME", help="of several `teachers`, the one that this is about")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="default: CONFIG.tuned.yaml beside CONFIG")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="longest time the ramp of one server may take")
    ] = 20.0,
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
    from spot_async.tools.tune import tune_command

    output = output or config.with_name(f"{config.stem}.tuned.yaml")
    options = tune_command.TuneOptions(config, overrides or (), output, seconds, limit_requests, paid, run)
    settings = load_config(config, overrides or ()).with_teacher(teacher, "tune")
    tune_command.check_options(settings, options)
    settings = downloaded(settings)
    plan = plan_training(settings)
    with working_directory(directory) as path:
        tune_command.run(screen, settings, plan, path, options)
