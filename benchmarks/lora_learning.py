"""Measures what LoRA learns beside full fine-tuning: SPOT, OPD and GRPO on the running sum.

    python benchmarks/lora_learning.py runs/lora

The learning rate of each way to train is chosen by one rule that sees OPD alone: of the rates of a grid, that with the
highest Avg@8 after training, with a seed that the table does not use. All methods then have this rate. Every cell is a
whole run of a file of `configs/running_sum`, in a directory of its own. Finished runs are not made again, so the
command continues where it was stopped. Wall times are not compared: runs may share the machine (`--at-once`).
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from report import show
from toy_runs import CONFIGS, SPOT_KEYS, train, with_error

METHODS = ("opd", "spot", "grpo")
LORA = "training.lora={rank: 8, alpha: 16, targets: all}"
RATES = {"full": (1e-4, 2e-4, 4e-4, 8e-4), "LoRA": (2.5e-4, 5e-4, 1e-3, 2e-3)}
RATE_SEED = 100


class Cell(NamedTuple):
    way: str
    method: str
    rate: float
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of all runs")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)

    def outcome(cell: Cell) -> tuple[float, float]:
        """Return Avg@8 and Pass@8 after training, as shares."""
        name = f"{cell.way}-{cell.method}-{cell.rate:g}-seed-{cell.seed}"
        overrides = [*([LORA] if cell.way == "LoRA" else []), *given.set]
        keys = {"run.seed": cell.seed, "training.learning_rate": cell.rate}
        keys |= SPOT_KEYS if cell.method == "spot" else {}
        after = train(CONFIGS / "running_sum" / f"{cell.method}.yaml", given.directory / name, keys, overrides)
        sys.stderr.write(f"{name}: Avg@8 {100 * after['avg']:.1f}, Pass@8 {100 * after['pass']:.1f}\n")
        return after["avg"], after["pass"]

    with ThreadPoolExecutor(given.at_once) as pool:

        def outcomes(cells: list[Cell]) -> dict[Cell, tuple[float, float]]:
            return dict(zip(cells, pool.map(outcome, cells), strict=True))

        tried = outcomes([Cell(way, "opd", rate, RATE_SEED) for way, rates in RATES.items() for rate in rates])
        chosen = {way: max((tried[Cell(way, "opd", rate, RATE_SEED)], rate) for rate in RATES[way])[1] for way in RATES}
        seeds = range(given.seeds)
        found = outcomes(
            [Cell(way, method, chosen[way], seed) for seed in seeds for method in METHODS for way in RATES]
        )
    rows = []
    for method in METHODS:
        by_way = {way: [found[Cell(way, method, chosen[way], seed)] for seed in seeds] for way in RATES}
        changes = [lora[0] - full[0] for lora, full in zip(by_way["LoRA"], by_way["full"], strict=True)]
        for way, each in by_way.items():
            avg, pass_k = zip(*each, strict=True)
            change = with_error(changes) if way == "LoRA" else ""
            rows.append((method, way, f"{chosen[way]:g}", with_error(avg), with_error(pass_k), change))
    show(
        f"After training, percent ± standard error over {given.seeds} seeds",
        ("method", "weights", "learning rate", "Avg@8", "Pass@8", "Avg@8 against full"),
        rows,
        [
            f"{way}: OPD's Avg@8 with seed {RATE_SEED} at {cell.rate:g}: {100 * each[0]:.1f}"
            for way in RATES
            for cell, each in tried.items()
            if cell.way == way
        ],
    )


if __name__ == "__main__":
    main()
