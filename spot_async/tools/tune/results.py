"""What `tune` leaves behind: tables in the terminal, measurements (JSON), and a configuration with the limits.

That configuration has the tuned one as its `base`, so that `spot-async train` needs nothing else.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from spot_async.base.files import open_regular, reading
from spot_async.errors import ConfigError
from spot_async.telemetry.screen import number_table
from spot_async.tools.pages import svg
from spot_async.tools.pages.page import Plot, Section
from spot_async.tools.pages.series import Series, seconds, short_number
from spot_async.tools.simulate.measured import ENDED, Recommendation, Tuning

FIRST_LINE = "# Limits that spot-async tune measured"
COLUMNS = 110
HEADINGS = ("in flight", "req/s", "tokens/s", "p50", "p95", "answers", "failed")


def terminal_tables(tuning: Tuning) -> list[Table]:
    """Return one table per server, with the knee marked, and one of what is recommended."""
    tables = []
    for ramp in tuning.ramps:
        table = number_table(*HEADINGS, "", title=ramp.server)
        table.caption = f"ended: {ENDED[ramp.ended]}{f' ({ramp.failure})' if ramp.failure else ''}"
        for level in ramp.levels:
            is_knee = level.concurrency == ramp.knee
            table.add_row(
                str(level.concurrency),
                short_number(level.throughput),
                short_number(level.tokens_per_s),
                seconds(level.p50_s),
                seconds(level.p95_s),
                str(level.requests),
                str(level.failures),
                "knee" if is_knee else "",
                style="bold green" if is_knee else None,
            )
        tables.append(table)
    if tuning.recommendations:
        table = number_table("key", "configured", "recommended")
        for each in tuning.recommendations:
            changed = each.recommended != each.configured
            table.add_row(each.key, str(each.configured), Text(str(each.recommended), "bold" if changed else ""))
        tables.append(table)
    return tables


def tuning_section(tuning: Tuning) -> Section:
    """Return plots of throughput and latency against concurrency, with the knee as a vertical line.

    Servers for which a limit does not matter have none.
    """
    plots: list[Plot] = []
    for ramp in (each for each in tuning.ramps if each.ended != "instant"):
        rates = [(float(level.concurrency), level.throughput) for level in ramp.levels]
        halves, most = (
            [(float(level.concurrency), getattr(level, name)) for level in ramp.levels] for name in ("p50_s", "p95_s")
        )
        figures = {
            "throughput": ("Answers per second.", [Series("", rates)], short_number),
            "latency": ("Of half of the answers, and of 95 %.", [Series("p50", halves), Series("p95", most)], seconds),
        }  # fmt: skip
        for what, (note, series, form) in figures.items():
            knee = f" The knee, {ramp.knee}, is marked." if ramp.knee is not None else ""
            figure = svg.level_plot(series, x_name="in flight", marked=ramp.knee, format_y=form)
            plots.append(Plot(f"{ramp.server}: {what}", note + knee, figure))
    return Section(f"Servers by requests in flight, measured {tuning.measured}", tuple(plots))


def check_output(config: Path, output: Path) -> None:
    """Raise ConfigError if `output` is a file that must not be overwritten."""
    if output.resolve() == config.resolve():
        raise ConfigError(f"-o {output}: is the configuration itself; name another file")
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"-o {output}: name a .yaml file; figures go beside it as .json")
    if output.exists():
        with reading(output), open_regular(output) as file:
            is_ours = file.read(len(FIRST_LINE)) == FIRST_LINE.encode()
        if not is_ours:
            raise ConfigError(f"-o {output}: exists, and tune did not write it; name another file")
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: no directory {str(output.parent)!r}")


def as_yaml(tuning: Tuning, config: Path, output: Path, overrides: Sequence[str]) -> str:
    """Return a configuration with `config` as its base, to be written to `output`. Each key stands under its reason."""
    base = os.path.relpath(config.resolve(), output.resolve().parent)
    quoted = msgspec.json.encode(base).decode()  # a JSON string is a YAML one
    lines = [
        f"{FIRST_LINE} on {tuning.measured}: spot-async train {output}",
        f"# {tuning.prompts} prompts' requests, {tuning.seconds:g} s a server; figures are beside this file.",
    ]
    if overrides:
        lines += [f"# Measured with {' '.join(overrides)}: give these again."]
    lines += _comment([*tuning.warnings, *tuning.advice])
    lines += ["", f"base: {quoted}"]
    stages = [each for each in tuning.recommendations if each.key.startswith("stages.")]
    for each in (each for each in tuning.recommendations if each not in stages):
        lines += ["", *_comment([_change(each)]), f"{each.key}: {each.recommended}"]
    lines += ["", "stages:"] if stages else []
    for each in stages:
        _, stage, key = each.key.split(".")
        lines += [f"  {stage}:", *_comment([_change(each)], indent=4), f"    {key}: {each.recommended}"]
    return "\n".join(lines) + "\n"


def _change(each: Recommendation) -> str:
    change = "as configured" if each.recommended == each.configured else f"{each.configured} as configured"
    return f"{change}; {each.reason}"


def _comment(texts: list[str], indent: int = 0) -> list[str]:
    """Return texts as wrapped comment lines. No text, not even a server's words, can break out of its comment."""
    start = " " * indent + "# "
    plain = ("".join(each if each.isprintable() else " " for each in text) for text in texts)
    return [
        line
        for text in plain
        for line in textwrap.wrap(text, COLUMNS, initial_indent=start, subsequent_indent=start + "  ")
    ]
