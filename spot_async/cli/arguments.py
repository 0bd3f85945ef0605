"""Defines the arguments and options that several commands take. Those of one command stand in its signature."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from spot_async.config import Config
from spot_async.config.suggestions import unknown_option
from spot_async.errors import ConfigError

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/quickstart.yaml")]
OptionalConfigPath = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file; see configs/quickstart.yaml")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="override any key, e.g. training.learning_rate=1e-4"),
]
EvaluationOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="override any key, e.g. evaluation.samples=16"),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
PagePath = Annotated[Path | None, typer.Option("--html", metavar="PATH", help="where the page goes")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show configuration, a prompt and what would start; start nothing")
]
Brief = Annotated[bool, typer.Option("--brief", help="with --dry-run: leave the configuration out")]


class ConfiguredCommand(TyperCommand):
    """A command with overrides. Of an option that it does not have, it says which key is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [option for each in self.params for option in (*each.opts, *each.secondary_opts)]
        options = ["--help", *(each for each in options if each.startswith("-"))]  # arguments have names there, too
        for at, given in enumerate(args[: args.index("--")] if "--" in args else args):
            option, _, value = given.partition("=")
            is_option = option.startswith("-") and option.lstrip("-")[:1].isalpha() and len(option) > 2
            is_short = not option.startswith("--") and option[:2] in options  # with its value, as in `-oFILE`
            if is_option and not is_short and not difflib.get_close_matches(option, options, n=1, cutoff=0.8):
                value = value or next((each for each in args[at + 1 : at + 2] if not each.startswith("-")), "")
                raise ConfigError(unknown_option(option, value, Config))
        return super().parse_args(ctx, args)
