"""Measures what staleness costs in learning: the running sum, trained at several `max_staleness`, seeds and behaviours.

    python benchmarks/staleness_learning.py runs/staleness

Every cell is a whole run of `configs/running_sum/spot.yaml` with other keys, in a directory of its own. Finished runs
are not made again, so the command continues where it was stopped. The table has Avg@8 and Pass@8 after training, as the
mean over the seeds with its standard error; the change to the strict run of the same seed, paired; and the mean lag of
the tokens that were trained on. Wall times are not compared: runs may share the machine (`--at-once`).

`--behaviors served` pushes on gaps that have closed since, which is what `recomputed` mends (docs/methods.md).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from report import show
from toy_runs import CONFIGS, SPOT_KEYS, train, with_error

WARM_UP = 5  # iterations whose lag does not count: the first batches cannot lag


class Cell(NamedTuple):
    max_staleness: int
    behavior: str


class Outcome(NamedTuple):
    avg: float
    pass_k: float
    lag: float


def run(cell: Cell, seed: int, directory: Path, overrides: list[str]) -> Outcome:
    """Train, unless the directory holds a finished run, and return what it came to."""
    keys = {
        "run.seed": seed,
        "max_staleness": cell.max_staleness,
        "training.behavior": cell.behavior,
        "training.keep_weights": cell.max_staleness + 2,
        **SPOT_KEYS,
    }
    after = train(CONFIGS / "running_sum" / "spot.yaml", directory, keys, overrides)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    return Outcome(after["avg"], after["pass"], float(np.mean([row.get("train/lag_mean", 0.0) for row in rows])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--behaviors", nargs="+", default=["served", "recomputed"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of all runs")
    given = parser.parse_args()
    cells = [Cell(*each) for each in itertools.product(given.staleness, given.behaviors)]
    jobs = [(cell, seed) for seed in range(given.seeds) for cell in cells]

    def job(each: tuple[Cell, int]) -> Outcome:
        cell, seed = each
        name = f"staleness-{cell.max_staleness}-{cell.behavior}-seed-{seed}"
        outcome = run(cell, seed, given.directory / name, given.set)
        sys.stderr.write(f"{name}: Avg@8 {100 * outcome.avg:.1f}, mean lag {outcome.lag:.2f}\n")
        return outcome

    given.directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.at_once) as pool:
        outcomes = dict(zip(jobs, pool.map(job, jobs), strict=True))
    strict = Cell(0, "served")
    rows = []
    for cell in cells:
        of_cell = [outcomes[cell, seed] for seed in range(given.seeds)]
        changes = (
            [each.avg - outcomes[strict, seed].avg for seed, each in enumerate(of_cell)] if strict in cells else []
        )
        rows.append(
            (
                str(cell.max_staleness),
                cell.behavior,
                f"{np.mean([each.lag for each in of_cell]):.2f}",
                with_error([each.avg for each in of_cell]),
                with_error([each.pass_k for each in of_cell]),
                with_error(changes) if changes else "",
            )
        )
    show(
        f"After training, percent ± standard error over {given.seeds} seeds",
        ("max_staleness", "behavior", "mean lag", "Avg@8", "Pass@8", "Avg@8 against strict"),
        rows,
    )


if __name__ == "__main__":
    main()
