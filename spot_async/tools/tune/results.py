"""Writes what `tune` leaves behind: its measurements (JSON), a page with plots, and a configuration with the limits.

That configuration has the tuned one as its `base`, so that `spot-async train` needs nothing else.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import msgspec

from spot_async.base.files import read_json
from spot_async.errors import ConfigError, DataError
from spot_async.tools.tune.measurement import Ramp
from spot_async.tools.tune.recommendation import Recommendation

FORMAT = 1  # raised when the JSON file can no longer be read as before
FIRST_LINE = "# Limits that spot-async tune measured"
COLUMNS = 110


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """One tuning: everything that was measured, and what follows from it."""

    format: int = FORMAT
    measured: str  # when, in ISO 8601 with the time zone
    seconds: float  # how long each server was measured at most
    prompts: int  # for how many prompts requests were noted
    requests_per_prompt: dict[str, float]  # by server
    ramps: list[Ramp]
    recommendations: list[Recommendation]
    advice: list[str]
    warnings: list[str]


def read_tuning(path: Path) -> Tuning:
    """Return a tuning from its JSON file. Raises DataError if it cannot be read, or is of a newer format."""
    return read_json(path, Tuning, newest_format=FORMAT, otherwise="is no file of spot-async tune")


def as_json(tuning: Tuning) -> bytes:
    return msgspec.json.format(msgspec.json.encode(tuning), indent=2)


def check_output(config: Path, output: Path) -> None:
    """Raise ConfigError if `output` is a file that must not be overwritten."""
    if output.resolve() == config.resolve():
        raise ConfigError(f"-o {output}: is the configuration itself; name another file")
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"-o {output}: name a .yaml file; figures and plots go beside it as .json and .html")
    if output.exists() and not output.read_bytes().startswith(FIRST_LINE.encode()):
        raise ConfigError(f"-o {output}: exists, and tune did not write it; name another file")
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: no directory {str(output.parent)!r}")


def as_yaml(tuning: Tuning, config: Path, output: Path, overrides: list[str]) -> str:
    """Return a configuration with `config` as its base, to be written to `output`. Each key stands under its reason."""
    base = os.path.relpath(config.resolve(), output.resolve().parent)
    lines = [
        f"{FIRST_LINE} on {tuning.measured}: spot-async train {output}",
        f"# {tuning.prompts} prompts' requests, {tuning.seconds:g} s a server; figures and plots are beside this file.",
    ]
    if overrides:
        lines += [f"# Measured with {' '.join(overrides)}: give these again."]
    lines += _comment([*tuning.warnings, *tuning.advice])
    lines += ["", f"base: {_quoted(base)}"]
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


def write(tuning: Tuning, config: Path, output: Path, overrides: list[str], page: str) -> None:
    """Write the three files. Raises DataError if one cannot be written."""
    contents = {
        output: as_yaml(tuning, config, output, overrides).encode(),
        output.with_suffix(".json"): as_json(tuning),
        output.with_suffix(".html"): page.encode(),
    }
    for path, content in contents.items():
        try:
            path.write_bytes(content)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror}): name another file with -o") from None


def _comment(texts: list[str], indent: int = 0) -> list[str]:
    """Return texts as wrapped comment lines. No text, not even a server's words, can break out of its comment."""
    start = " " * indent + "# "
    plain = ("".join(each if each.isprintable() else " " for each in text) for text in texts)
    return [
        line
        for text in plain
        for line in textwrap.wrap(text, COLUMNS, initial_indent=start, subsequent_indent=start + "  ")
    ]


def _quoted(path: str) -> str:
    return msgspec.json.encode(path).decode()  # a JSON string is a YAML one
