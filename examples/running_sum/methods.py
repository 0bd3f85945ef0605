"""Trains the quickstart's student by several methods, from the same start, with many seeds.

    python examples/running_sum/methods.py runs/methods [--seeds 8] [--at-once 2]

It writes `methods.txt` beside this file, which `make quickstart` shows at its end. A run whose figures are there is not
made again, and one that was stopped begins again. What is measured is Avg@8 of the held-out problems. Errors are
standard errors over seeds, and differences are paired by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spot_async.base.processes.resources import cpu_type

ROOT = Path(__file__).parents[2]
METHODS = {  # a file of configs, and the keys beside it
    "OPD, no probes": ["running_sum/opd.yaml"],
    "SPOT, as shipped": ["quickstart.yaml"],
    "SPOT, random positions": ["quickstart.yaml", "policy.selection=random"],
    "SPOT, highest entropy": ["quickstart.yaml", "policy.selection=entropy"],
    "SPOT, the paper's target": ["running_sum/spot.yaml"],
    "GRPO, as many tokens": ["running_sum/grpo.yaml", "training.iterations=35"],
    "GRPO, as many CPU seconds": ["running_sum/grpo.yaml", "training.iterations=122"],
}


def trained(directory: Path, name: str, seed: int) -> dict[str, Any]:
    """Return a run's figures: Avg@8 before and after and Pass@8 after, in percent, tokens and CPU seconds."""
    run = directory / f"{name.replace(', ', '-').replace(' ', '-')}-seed-{seed}"
    record = run.with_name(f"{run.name}.json")
    if not record.exists():
        shutil.rmtree(run, ignore_errors=True)
        config, *keys = METHODS[name]
        command = [sys.executable, "-m", "spot_async", "train", f"configs/{config}", *keys]
        command.append("student.serving.own_cores=0")  # several runs share the cores; no other figure depends on it
        command += [f"run.seed={seed}", f"run.directory={run}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        summary = json.loads((run / "summary.json").read_text())
        before, after = (summary[when]["tiers"]["all"] for when in ("before", "after"))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        figures = {
            "before": 100 * before["avg"],
            "after": 100 * after["avg"],
            "pass": 100 * after["pass"],
            "trained_tokens": sum(row["train/tokens"] for row in rows),
            "cpu_s": used.ru_utime + used.ru_stime,
        }
        record.write_text(json.dumps(figures))
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def with_error(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def page(found: dict[str, list[dict[str, Any]]]) -> str:
    opd = found["OPD, no probes"]
    lines = [
        f"Other methods from the same start, {len(opd)} seeds each:",
        f"  {'% of held-out responses correct':31}{'mean':>11}{'over OPD':>12}{'Pass@8':>7}{'tokens':>7}{'CPU s':>6}",
        f"  {'untrained':31}{statistics.fmean(each['before'] for each in opd):>5.1f}",
    ]
    for name, runs in found.items():
        more = [each["after"] - other["after"] for each, other in zip(runs, opd, strict=True)]
        gain = "" if runs is opd else with_error(more, "+")
        passed, tokens, cpu_s = (
            statistics.fmean(each[key] for each in runs) for key in ("pass", "trained_tokens", "cpu_s")
        )
        mean = with_error([each["after"] for each in runs])
        lines.append(f"  {name:31}{mean:>11}{gain:>12}{passed:>7.1f}{tokens / 1000:>6.0f}k{cpu_s:>6.0f}")
    lines += [
        "± is one standard error over seeds; differences are paired by seed; tokens are those",
        "trained on. This is a toy, and elsewhere the order is another:",
        "experiments/mechanism/README.md.",
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
