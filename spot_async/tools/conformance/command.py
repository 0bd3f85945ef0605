"""`spot-async conformance`: makes settings from its arguments, and a table from the outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.config import ModelConfig
from spot_async.config.loading import apply_override, validate_as
from spot_async.tools.conformance.checks import Outcome, Status
from spot_async.tools.conformance.running import check_backend
from spot_async.tools.scratch import working_directory

STYLE: dict[Status, str] = {"passed": "green", "failed": "bold red", "not offered": "dim", "not checked": "yellow"}


def read_settings(
    kind: str, model: str, url: str | None, launch_python: str | None, settings: Sequence[str]
) -> ModelConfig:
    """Return the backend that the arguments describe. Raises ConfigError, which names the key at fault."""
    backend: dict[str, Any] = {"kind": kind}
    shortcuts = [("url", url), ("launch.python", launch_python)]
    for setting in [*(f"{key}={value}" for key, value in shortcuts if value is not None), *settings]:
        apply_override(backend, setting)
    return validate_as(ModelConfig, {"model": model, "backend": backend})


def run(
    screen: Console, config: ModelConfig, directory: Path | None, *, role: str, tolerance_nats: float, device: str
) -> bool:
    """Check, print the table, and return whether a check failed."""
    outcomes: list[Outcome] = []
    with working_directory(directory) as path, screen.status("starting") as status:

        def show(outcome: Outcome) -> None:
            outcomes.append(outcome)
            status.update(f"{outcome.name} {outcome.status}")

        asyncio.run(
            check_backend(config, path, role=role, tolerance_nats=tolerance_nats, device=device, on_outcome=show)
        )
    screen.print(table(outcomes))
    counts = Counter(outcome.status for outcome in outcomes)
    kind = config.backend.kind
    screen.print(Text(f"{kind}: " + ", ".join(f"{counts[status]} {status}" for status in STYLE if counts[status])))
    return counts["failed"] > 0


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = Table("check", "", "max |d| nats", "", box=box.SIMPLE_HEAD, pad_edge=False)
    rows.columns[2].justify = "right"
    for outcome in outcomes:
        nats = "" if outcome.nats is None else f"{outcome.nats:.1e}"
        rows.add_row(outcome.name, Text(outcome.status, STYLE[outcome.status]), nats, Text(outcome.note))
    return rows
