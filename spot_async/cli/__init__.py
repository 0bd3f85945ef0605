"""The `spot-async` command: puts its commands under their names. They do their work in other rooms.

Exit codes: 0 done, 1 the run failed, 2 it could not start (configuration or data), 3 it stalled, 4 its budget is
spent, 75 stopped by SIGTERM or SIGUSR1 with a checkpoint to resume from, 130, 143, 138 and 129 stopped by Ctrl-C,
SIGTERM, SIGUSR1 or a terminal that was closed.
"""

from __future__ import annotations

import importlib.metadata
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from spot_async.base.processes.resources import tune_gc
from spot_async.base.tasks import root_cause
from spot_async.cli import files, runs, servers
from spot_async.cli.arguments import ConfiguredCommand
from spot_async.cli.ending import exit_code, fail, screen, stderr
from spot_async.config.suggestions import other_name
from spot_async.errors import ConfigError, SpotError
from spot_async.telemetry.screen import show_nearest_characters


class Commands(TyperGroup):
    """The commands. Of an option or a file in a command's place, it says which command is meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        given = args[0]
        if given not in self.commands:
            if given in ("dry-run", "resume"):
                meant = f"train --{given}"
            elif given.endswith((".yaml", ".yml")):
                meant = f"train {given}"
            elif (renamed := other_name(given, "commands_before")) is not None:
                raise ConfigError(f"{given}: is now `{renamed.here}`")
            else:
                return super().resolve_command(ctx, args)
            raise ConfigError(f"{given}: no such command; did you mean `spot-async {meant}`?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An error of ours ends it with one line, and with the exit code of its class."""
        try:
            return super().invoke(ctx)
        except (SpotError, OSError, BaseExceptionGroup) as error:
            cause = root_cause(error)
            fail(cause, code=exit_code(cause))


app = typer.Typer(
    name="spot-async",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    if wanted:
        screen.print(f"spot-async {importlib.metadata.version('spot-async')}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """On-policy distillation of small reasoning models, with sparse probing and outcome calibration."""


def flowing(command: Callable[..., None]) -> str:
    """Return a command's help with each paragraph on one line, since screens may be narrower than source files."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.__doc__ or "").split("\n\n"))


app.command(cls=ConfiguredCommand, help=flowing(runs.train))(runs.train)
app.command("eval", cls=ConfiguredCommand, help=flowing(runs.evaluate))(runs.evaluate)
app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="MODEL_DIR [--uds PATH | --port N] [OPTIONS]",
)(servers.serve)
app.command(cls=ConfiguredCommand, help=flowing(servers.check))(servers.check)
app.command(cls=ConfiguredCommand, help=flowing(servers.tune))(servers.tune)
app.command(cls=ConfiguredCommand, help=flowing(files.simulate))(files.simulate)
app.command("inspect", help=flowing(files.inspect_run))(files.inspect_run)
app.command(help=flowing(files.report))(files.report)
app.command("verify-run", help=flowing(files.verify_run))(files.verify_run)
app.command(help=flowing(files.push))(files.push)
app.command("compare", help=flowing(files.compare_runs))(files.compare_runs)


def main() -> None:
    """Entry point of the `spot-async` command."""
    tune_gc()  # what is imported from here on is no garbage
    show_nearest_characters()
    try:
        app()
    except Exception:  # noqa: BLE001 - a bug, whose trace may quote what a server said
        stderr.print(Text(traceback.format_exc().rstrip()))
        raise SystemExit(1) from None
