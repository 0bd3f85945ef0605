"""Trains the quickstart's student by several methods, from the same start and at the same settings, with many seeds.

    python examples/running_sum/methods.py runs/methods [--seeds 8] [--at-once 2]

It writes `methods.txt` beside this file, which `make quickstart` shows at its end. A run that is finished is not made
again, and one that was stopped continues. What is measured is Avg@8 of the held-out problems. Errors are standard
errors over seeds, and differences are paired by seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spot_async.base.processes.resources import cpu_type

ROOT = Path(__file__).parents[2]
METHODS = {  # the keys beside configs/quickstart.yaml
    "OPD, no probes": ["policy.kind=opd"],
    "SPOT, as shipped": [],
    "SPOT, random positions": ["policy.selection=random"],
    "SPOT, highest entropy": ["policy.selection=entropy"],
}


def trained(directory: Path, name: str, seed: int) -> tuple[float, float]:
    """Return Avg@8 before and after a run, in percent."""
    run = directory / f"{name.replace(', ', '-').replace(' ', '-')}-seed-{seed}"
    if not (run / "summary.json").exists():
        command = [sys.executable, "-m", "spot_async", "train", "configs/quickstart.yaml", *METHODS[name]]
        command.append("student.serving.own_cores=0")  # several runs share the cores; no figure depends on it
        command += [f"run.seed={seed}", f"run.directory={run}", "--resume", "auto"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((run / "summary.json").read_text())
    before, after = (100 * found[when]["tiers"]["all"]["avg"] for when in ("before", "after"))
    return before, after


def with_error(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def page(found: dict[str, list[tuple[float, float]]]) -> str:
    after = {name: [each for _, each in runs] for name, runs in found.items()}
    opd = after["OPD, no probes"]
    untrained = statistics.fmean(before for before, _ in found["OPD, no probes"])
    lines = [
        f"Other methods from the same start, at the same settings, {len(opd)} seeds each:",
        f"  {'% of held-out responses correct':32}{'mean':>12}{'over OPD':>14}",
        f"  {'untrained':32}{untrained:>6.1f}",
    ]
    for name, values in after.items():
        more = [each - other for each, other in zip(values, opd, strict=True)]
        gain = "" if name == "OPD, no probes" else with_error(more, "+")
        lines.append(f"  {name:32}{with_error(values):>12}{gain:>14}")
    lines += [
        "± is one standard error over seeds; differences are paired by seed. This is a toy,",
        "and elsewhere the order is another: experiments/mechanism/README.md.",
        f"Measured on {time.strftime('%Y-%m-%d')} on {cpu_type()}, by",
        "python examples/running_sum/methods.py runs/methods",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=2)
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("--seeds: an error over seeds needs 2 at least")
    jobs = [(name, seed) for seed in range(given.seeds) for name in METHODS]
    with ThreadPoolExecutor(given.at_once) as pool:
        outcomes = dict(zip(jobs, pool.map(lambda job: trained(given.directory.resolve(), *job), jobs), strict=True))
    found = {name: [outcomes[name, seed] for seed in range(given.seeds)] for name in METHODS}
    text = page(found)
    (Path(__file__).parent / "methods.txt").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
