"""The command `check`. Without servers it is what `train --dry-run` shows, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from spot_async.base.tasks import root_cause
from spot_async.cli.downloads import downloaded
from spot_async.cli.ending import exit_code, fail, screen
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError, SpotError
from spot_async.models.hub import ROLES
from spot_async.run_directory.layout import RunDirectory, name_of


def check(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|FILE", help="a run's YAML file; or a problem file, or its hub id")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="override any key of CONFIG; of FILE, of a problem set: fields.answer=gold"
        ),
    ] = None,
    no_servers: Annotated[
        bool, typer.Option("--no-servers", help="look at files, problems and this machine alone; start nothing")
    ] = False,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="a run whose responses' lengths are assumed")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print what was found of CONFIG as JSON")] = False,
    directory: Annotated[Path | None, typer.Option(help="where the servers' logs go; default: temporary")] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="an evaluation set to look for; may be given again")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="of FILE: short for layout=NAME; see docs/data.md")] = None,
    verifier: Annotated[str | None, typer.Option(metavar="KIND", help="of FILE; default: boxed_match")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="whose tokenizer renders prompts of FILE")] = None,
) -> None:
    """Say whether a run is safe to train, and what it takes: memory, disk, tokens and money.

    Of CONFIG, it reads all files as `train` would, then starts or attaches the run's servers and asks them everything
    that a run depends on. `train` makes the same checks before it begins. Nothing is trained. `simulate` estimates the
    time of an iteration.

    Of a problem FILE, it shows what is kept, dropped and mended, which answers cannot be verified, and what overlaps.

    Exit code 1 when the run would be unsafe, a server fails, or an answer in FILE is not right by its own verifier; 2
    when something is wrong with the configuration or cannot be read.
    """
    if not target.endswith((".yaml", ".yml")):
        if no_servers or earlier or json or directory:
            fail(ConfigError("--no-servers, --from, --json and --directory are for a run's YAML file"), code=2)
        chosen = [*(settings or ()), *([f"layout={layout}"] if layout else ())]
        _check_file(target, chosen, against or (), verifier, model)
        return
    from spot_async.checks.plan import plan_training  # imports transformers: not for --help
    from spot_async.checks.room import check_room
    from spot_async.tools.check import command
    from spot_async.tools.scratch import working_directory

    try:
        if layout or verifier or model:
            raise ConfigError("--layout, --verifier and --model are for files; CONFIG names them")
        config = downloaded(load_config(Path(target), settings or ()), weights=() if no_servers else ROLES)
        plan = plan_training(config)
        path = RunDirectory.choose_path(config, name_of(Path(target)))
        found = command.check_files(config, plan, path, earlier, nodes=config.cluster.nodes or 1)
        if not json:
            command.show_run(screen, config, plan, path, found, against or ())
    except (ConfigError, DataError) as error:
        fail(error, code=2)
    diagnosis = None
    if not no_servers:
        try:
            with working_directory(directory) as place:
                diagnosis = command.check_servers(screen, config, plan, place, is_shown=not json)
        except (SpotError, BaseExceptionGroup) as error:
            fail(root_cause(error), code=1)
    if json:
        command.print_json(screen, found.needed, diagnosis)
    try:
        check_room(path, config, plan)
    except (ConfigError, DataError) as error:
        fail(error, code=2)
    if diagnosis is not None and diagnosis.refusals:
        raise typer.Exit(1)


def _check_file(
    path: str, settings: Sequence[str], against: Sequence[str], verifier: str | None, model: str | None
) -> None:
    from spot_async.tools.check.command import show_file

    try:
        is_verifiable = show_file(screen, path, settings, against, verifier, model)
    except (SpotError, ExceptionGroup) as error:
        cause = root_cause(error)
        fail(cause, code=exit_code(cause))
    if not is_verifiable:
        raise typer.Exit(1)
