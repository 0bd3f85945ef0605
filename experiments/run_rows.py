"""Runs every row of an experiment with some seeds, one after the other, and writes a table of the held-out tiers.

    python experiments/run_rows.py teachers runs/teachers [--seeds 5] [section.key=value ...]

The experiment's `rows.yaml` names its rows with their configurations, and the differences of rows that the table shows.
Started again, it continues where it was stopped: a run whose figures are there is not made again. Keys go to all runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

import yaml

import spot_async
from spot_async.evaluation.metrics import EvaluationFigures, read_figures

HERE = Path(__file__).parent
TIERS = ("easy", "medium", "hard")
FIRST_SEED = 200


def measured(
    configuration: Path, seed: int, directory: Path, keys: list[str]
) -> tuple[EvaluationFigures, EvaluationFigures]:
    """Return the figures before and after a run, which is made unless it is there."""
    run = directory / f"{configuration.stem}-{seed}"
    after = run / "evaluation-after.json"
    if not after.exists():
        if (run / "checkpoints").exists():
            spot_async.resume(run)
        else:
            spot_async.run(configuration, [f"run.directory={run}", f"run.seed={seed}", *keys])
    return read_figures(run / "evaluation-before.json"), read_figures(after)


def shares(figures: EvaluationFigures) -> list[float]:
    """Return Avg@k in percent of each tier, and of all problems."""
    (benchmark,) = figures.benchmarks.values()
    parts = [*(benchmark.tiers[tier] for tier in TIERS), benchmark]
    return [100 * each.avg.value for each in parts if each.avg is not None]


def cells(runs: list[list[float]], sign: str = "") -> list[str]:
    """Return each column's mean over seeds, with its standard error where there are several."""
    found = []
    for values in zip(*runs, strict=True):
        error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
        found.append(f"{statistics.mean(values):{sign}.1f}{error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the rows of an experiment, and compare them.")
    parser.add_argument("experiment", choices=sorted(path.parent.name for path in HERE.glob("*/rows.yaml")))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("keys", nargs="*", help="section.key=value, of all runs")
    arguments = parser.parse_intermixed_args()
    lines = ["| | " + " | ".join((*TIERS, "all")) + " |", "|---|" + "---:|" * (len(TIERS) + 1)]
    of_rows: dict[str, list[list[float]]] = {}
    plan = yaml.safe_load((HERE / arguments.experiment / "rows.yaml").read_text())
    students: set[str] = set()
    for name, row in plan["rows"].items():
        seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
        path = HERE / arguments.experiment / f"{row}.yaml"
        found = [measured(path, seed, arguments.directory, arguments.keys) for seed in seeds]
        if (student := str(spot_async.load_config(path).student.model)) not in students:
            students.add(student)
            lines.append(f"| before, {name} | " + " | ".join(cells([shares(before) for before, _ in found[:1]])) + " |")
        of_rows[name] = [shares(after) for _, after in found]
        lines.append(f"| {name} | " + " | ".join(cells(of_rows[name])) + " |")
        (arguments.directory / "table.md").write_text("\n".join(lines) + "\n")
    for one, other in plan["differences"]:
        pairs = zip(of_rows[one], of_rows[other], strict=True)  # of equal seeds
        apart = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
        lines.append(f"| {one} - {other} | " + " | ".join(cells(apart, "+")) + " |")
    (arguments.directory / "table.md").write_text("\n".join(lines) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
