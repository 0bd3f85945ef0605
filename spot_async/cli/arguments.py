"""Defines the arguments and options that several commands take. Those of one command stand in its signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/quickstart.yaml")]
TrainingConfigPath = Annotated[
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
