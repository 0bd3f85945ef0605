"""Prints what a benchmark found: one table under the machine, the date and the command."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spot_async.base.processes.resources import cpu_type


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    console = Console(width=110, highlight=False)
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(f"{cpu_type()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    console.print(f"{datetime.date.today().isoformat()}: python {' '.join(sys.argv)}")
    console.print(table)
    for note in notes:
        console.print(note)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, with the smallest and the largest value."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"
