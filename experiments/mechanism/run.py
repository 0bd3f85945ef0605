"""Runs every row of README.md through the program, and writes its tables and pictures.

    python experiments/mechanism/run.py runs/reproduction
    python experiments/mechanism/run.py runs/where --part three
    python experiments/mechanism/run.py runs/pilot --part pilot
    python experiments/mechanism/run.py runs/reproduction --tables      # of what is there, and run nothing

Every row is trained by `spot-async train` and measured by `spot-async eval`, in processes of their own. What a run came
to is one file, `records/<setting>/<row>-seed-<seed>.json`, and a run that has one is not made again. So a stop loses
the runs under way and nothing else. The rest of a run's directory is removed unless `--keep` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pilot import write_pilot
from rows import ALL_SEEDS, FIRST_SEED, PART_SEEDS, PARTS, ROOT, SETTINGS, Row, Setting
from tables import write_tables

SAMPLES_EVERY = 10  # iterations between two looks at the student's choices
WIDE_SAMPLES = 64  # for the curves of Pass@k


class Job(NamedTuple):
    setting: Setting
    row: Row
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}/{self.row.name}-seed-{self.seed}"


class Usage(NamedTuple):
    """What a command and its children took."""

    wall_s: float
    cpu_s: float


class CommandFailed(Exception):
    """A command of `spot-async` ended with an error."""


def call(command: Sequence[str], log: Path) -> Usage:
    """Run `spot-async` to its end. Raises CommandFailed if it fails."""
    started = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "spot_async", *command], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise CommandFailed(f"{log}: exit code {process.returncode}")
    return Usage(time.monotonic() - started, used.ru_utime + used.ru_stime)


def overrides(keys: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def evaluate(
    setting: Setting, model: str, directory: Path, keys: Mapping[str, object], extra: list[str]
) -> dict[str, Any]:
    """Return `evaluation.json` of a model on the setting's held-out problems."""
    named = {"student.model": model, "run.directory": str(directory), **keys}
    call(["eval", setting.config, *overrides(named), *extra], directory.with_suffix(".log"))
    found: dict[str, Any] = json.loads((directory / "evaluation.json").read_text())
    return found["benchmarks"]["problems"]


def counts(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"samples": figures["samples"], "correct": figures["correct"], "mean_tokens": figures["mean_tokens"]}


def choices(setting: Setting, samples: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Return how often the student made each choice, by iteration and by what the choice depends on."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for place, choice in setting.read_choices(sample):
            found[str(sample["iteration"])][place][choice] += 1
    return {iteration: {place: dict(each) for place, each in places.items()} for iteration, places in found.items()}


def run(job: Job, directory: Path, *, wide: bool, keep: bool, extra: list[str]) -> None:
    """Train and measure one run, and write its record."""
    record = directory / "records" / f"{job.name}.json"
    if record.exists():
        return
    work = directory / "work" / job.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    trained = work / "train"
    keys = {
        "run.directory": str(trained),
        "run.seed": job.seed,
        "run.samples_every": SAMPLES_EVERY,
        "evaluation": None,
        "training.checkpoint_every": 0,
        **job.row.keys,
    }
    used = call(["train", job.setting.config, *overrides(keys), *extra], work / "train.log")
    student = str(trained / "student")
    figures = evaluate(job.setting, student, work / "eval", job.setting.evaluation, extra)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    found = {
        "setting": job.setting.name,
        "row": job.row.name,
        "seed": job.seed,
        "keys": job.row.keys,
        "evaluation": counts(figures),
        "wide": counts(evaluate(job.setting, student, work / "wide", wide_keys(job.setting), extra)) if wide else None,
        "choices": choices(job.setting, trained / "samples.jsonl"),
        "wall_s": used.wall_s,
        "cpu_s": used.cpu_s,
        "trained_tokens": sum(row["train/tokens"] for row in rows),
        "probe_tokens": sum(row.get("probe/tokens", 0.0) * job.row.prompts for row in rows),
    }
    write_record(record, found)
    if not keep:
        shutil.rmtree(work)


def wide_keys(setting: Setting) -> dict[str, object]:
    return {**setting.evaluation, "evaluation.problems": setting.wide, "evaluation.samples": WIDE_SAMPLES}


def measure_base(setting: Setting, directory: Path, *, extra: list[str]) -> None:
    """Measure the untrained student."""
    record = directory / "records" / setting.name / "base.json"
    if record.exists():
        return
    work = directory / "work" / setting.name / "base"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    figures = evaluate(setting, setting.student, work / "eval", setting.evaluation, extra)
    wide = (
        counts(evaluate(setting, setting.student, work / "wide", wide_keys(setting), extra)) if setting.wide else None
    )
    write_record(record, {"evaluation": counts(figures), "wide": wide})


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".partial")
    whole.write_text(json.dumps(content))
    whole.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--part", choices=PARTS, default="two", help="of README.md: whose settings")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="these settings only")
    parser.add_argument("--rows", nargs="+", help="these rows only")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of those of the part")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", action="store_true", help="keep the runs' directories: 30 MB each")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of all commands")
    given = parser.parse_args()
    directory = given.directory.resolve()
    settings = [SETTINGS[name] for name in given.settings] if given.settings else PARTS[given.part]
    seeds = given.seeds or list(PART_SEEDS.get(given.part, range(FIRST_SEED, FIRST_SEED + ALL_SEEDS)))
    # Seed by seed, so that a stop leaves all rows with the same seeds, and paired.
    jobs = [
        Job(setting, row, seed)
        for place, seed in enumerate(seeds)
        for setting in settings
        for row in setting.rows
        if place < row.seeds and (not given.rows or row.name in given.rows)
    ]

    def job(each: Job) -> None:
        try:
            wide = bool(each.setting.wide) and each.seed == seeds[0]
            run(each, directory, wide=wide, keep=given.keep, extra=given.set)
        except CommandFailed as error:
            # The other rows continue. The next start tries this one again.
            sys.stderr.write(f"{each.name} failed: {error}\n")
            return
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {each.name}\n")

    if not given.tables:
        with ThreadPoolExecutor(given.at_once) as pool:
            list(pool.map(lambda each: measure_base(each, directory, extra=given.set), settings))
            list(pool.map(job, jobs))
    (write_pilot if given.part == "pilot" else write_tables)(directory, settings)


if __name__ == "__main__":
    main()
