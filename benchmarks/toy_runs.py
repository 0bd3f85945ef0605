"""Whole runs of the running sum, for benchmarks that compare what is learned. A finished run is not made again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CONFIGS = Path(__file__).parents[1] / "configs"
SPOT_KEYS: Mapping[str, float] = {"policy.gamma": 1.0}  # README.md's figures of SPOT are at this; the files ship 4


def train(config: Path, directory: Path, keys: Mapping[str, object], overrides: list[str]) -> dict[str, float]:
    """Train, unless the directory holds a finished run, and return `avg` and `pass` after it, as shares."""
    if not (directory / "summary.json").exists():
        if directory.exists():
            raise SystemExit(f"{directory}: an unfinished run; remove it")
        named = {"run.directory": directory, "run.samples_every": 0, **keys}
        command = [sys.executable, "-m", "spot_async", "train", str(config)]
        command += [f"{key}={value}" for key, value in named.items()]
        done = subprocess.run([*command, *overrides], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{directory}: exit code {done.returncode}: {done.stderr[-2000:] or done.stdout[-2000:]}")
    after: dict[str, float] = json.loads((directory / "summary.json").read_text())["after"]["tiers"]["all"]
    return after


def with_error(values: Any) -> str:
    """Return the mean of shares in percent, with its standard error."""
    values = 100.0 * np.asarray(values)
    return f"{values.mean():.1f} ± {values.std(ddof=1) / len(values) ** 0.5:.1f}"
