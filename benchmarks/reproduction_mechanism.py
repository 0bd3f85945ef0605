"""Looks into the kept runs of `reproduction.py`: by what the rows gained. Exploratory, no part of the plan.

    python benchmarks/reproduction.py DIR --keep
    python benchmarks/reproduction_mechanism.py DIR         # of the runs in DIR/work; writes DIR/mechanism.md

Three tables. What the students' choices are worth in the contexts that the forecast measured. Where SPOT probed, at the
start and later. In the relay, how a step came to its right end: by a way that the student knew, or without one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from reproduction_rows import ROOT, SETTINGS, Sample, Setting
from reproduction_tables import LAST_LOOKS, OPD, mean_of, read_problems, with_error
from reproduction_values import decision_value

from spot_async.tools.forecast.forecast import Forecast
from spot_async.tools.forecast.results import read_forecast


def load_task() -> Any:
    """Return the relay's `task.py`. The running sum has a module of that name too."""
    loader = SourceFileLoader("relay_task", str(ROOT / "examples" / "relay" / "task.py"))
    module = sys.modules[loader.name] = ModuleType(loader.name)
    loader.exec_module(module)
    return module


task = load_task()


def kept_runs(directory: Path, setting: Setting) -> dict[str, dict[int, Path]]:
    """Return the training directories by row, in the plan's order, and seed."""
    found: dict[str, dict[int, Path]] = {row.name: {} for row in setting.rows}
    for path in (directory / "work" / setting.name).glob("*-seed-*"):
        row, _, seed = path.name.rpartition("-seed-")
        if row in found and (path / "train" / "student").exists():
            found[row][int(seed)] = path / "train"
    return {row: dict(sorted(seeds.items())) for row, seeds in found.items() if seeds}


def read_samples(run: Path) -> dict[int, list[Sample]]:
    """Return the samples of a run by the iterations that were looked at."""
    found: dict[int, list[Sample]] = defaultdict(list)
    with (run / "samples.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            sample = json.loads(line)
            found[sample["iteration"]].append(sample)
    return dict(sorted(found.items()))


def value_table(
    directory: Path, setting: Setting, runs: Mapping[str, Mapping[int, Path]]
) -> tuple[list[str], list[tuple[float, float, float]]]:
    """Return what each row's choices are worth where the forecast measured them, against OPD's of the same seed.

    Beside the table: the gain predicted, that with the probes made, and the gain observed, of each row that has them.
    """
    measured = read_forecast(directory / "forecasts" / f"{setting.name}.json").measurement.prompts
    values = {row: {seed: decision_value(run / "student", measured) for seed, run in seeds.items()}
              for row, seeds in runs.items()}  # fmt: skip
    base = decision_value(ROOT / setting.student, measured)
    lines = [
        f"### {setting.name}: value of a choice in the forecast's contexts", "",
        f"In percent; the untrained student's is {100 * base:.2f}. Against OPD in points, same seeds.", "",
        "*With the probes made*: the forecast's formula, with the branch weight times the share of choices probed.", "",
        "| row | seeds | value | against OPD | predicted | with the probes made |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    pairs = []
    for row, of_seeds in values.items():
        common = [of_seeds[seed] - values[OPD][seed] for seed in of_seeds if seed in values.get(OPD, {})]
        gained = with_error(*mean_of(common)) if common and row != OPD else ""
        file = directory / "forecasts" / f"{setting.name}-{row.replace(' ', '-')}.json"
        forecast = read_forecast(file).forecast if file.exists() else None
        said = ["", ""]
        if forecast is not None and (predicted := forecast.figures["settled_gain"]) is not None:
            samples = [each for run in runs[row].values() for look in read_samples(run).values() for each in look]
            with_probes = gain_with_probes(forecast, probed_share(setting, samples))
            said = [with_error(predicted.value, predicted.standard_error), f"{100 * with_probes:.1f}"]
            if common:
                pairs.append((predicted.value, with_probes, float(np.mean(common))))
        lines.append(f"| {row} | {len(of_seeds)} | {with_error(*mean_of(list(of_seeds.values())))} | {gained} | "
                     f"{' | '.join(said)} |")  # fmt: skip
    return [*lines, ""], pairs


def probed_share(setting: Setting, samples: Sequence[Sample]) -> float:
    """Return the share of the choices made that were probed."""
    made = sum(1 for sample in samples for _ in setting.read_choices(sample))
    return probed_choices(setting, samples)[1] / made


def gain_with_probes(forecast: Forecast, share: float) -> float:
    """Return the gain where the losses settle if the branch loss sees only this share of the choices."""
    gain, weight = forecast.figures["gain"], forecast.figures["branch_weight"]
    assert gain is not None
    assert weight is not None
    seen = weight.value * share
    return gain.value * seen / (1.0 + seen)


def probed_choices(setting: Setting, samples: Sequence[Sample]) -> tuple[int, int]:
    """Return how many positions were probed, and how many of them are a choice."""
    probed = [(sample, branch) for sample in samples for branch in sample.get("branches", [])]
    return len(probed), sum(is_choice(setting, sample, branch) for sample, branch in probed)


def is_choice(setting: Setting, sample: Sample, branch: Mapping[str, Any]) -> bool:
    place = setting.place_of(branch["position"], sample["problem"], sample["tier"])
    return place is not None and branch["sampled"].strip() in setting.choices


def probes_table(directory: Path, setting: Setting, runs: Mapping[str, Mapping[int, Path]]) -> list[str]:
    """Return the share of probed positions that are choices: before training, at the first looks and at the last."""
    problems = {each["id"]: each["problem"] for each in read_problems(setting.train)}
    prompts = read_forecast(directory / "forecasts" / f"{setting.name}.json").measurement.prompts
    at_start = [
        setting.place_of(each.position, problems[prompt.problem_id], prompt.tier or "") is not None
        and each.sampled.strip() in setting.choices
        for prompt in prompts
        for each in prompt.positions
    ]
    lines = [f"### {setting.name}: share of the probed positions that are a choice", "",
             f"Before training {100 * np.mean(at_start):.0f} %, by the forecast.", "",
             "| row | seeds | first look | middle | last |", "|---|---|---|---|---|"]  # fmt: skip
    for row, seeds in runs.items():
        looks = [[probed_choices(setting, samples) for samples in read_samples(run).values()] for run in seeds.values()]
        shares = [sum(chosen for _, chosen in each) / sum(probed for probed, _ in each)
                  for each in zip(*looks, strict=True) if sum(probed for probed, _ in each)]  # fmt: skip
        if shares:
            shown = [shares[0], shares[len(shares) // 2 - 1], shares[-1]]
            lines.append(f"| {row} | {len(seeds)} | " + " | ".join(f"{100 * each:.0f} %" for each in shown) + " |")
    return [*lines, ""]


def steps(problem: str, response: str) -> Iterator[tuple[bool, bool]]:
    """Yield for each step that began at a right state: did it end right, and did the student know its method's way?

    A way is known if each of its three facts is. `task` has the tables.
    """
    relay, state = task.RELAY, int(problem[0])
    for number, letter in enumerate(problem[1:]):
        step = response[task.STEP_LETTERS * number :][: task.STEP_LETTERS]
        if not re.fullmatch(rf"{letter}[{task.METHODS}]\d\d\d[{task.CONNECTIVES}]", step):
            return
        operation, method = task.OPERATIONS.index(letter), task.METHODS.index(step[1])
        right = [state]
        for stage in range(task.STAGES):
            right.append(int(relay.facts[stage, method, operation, right[-1]]))
        known = all(relay.is_known[stage, method, operation, right[stage]] for stage in range(task.STAGES))
        yield int(step[task.STAGES + 1]) == right[-1], bool(known)
        state = int(step[task.STAGES + 1])
        if state != right[-1]:
            return


def step_counts(samples: Sequence[Sample]) -> Counter[str]:
    found: Counter[str] = Counter()
    for sample in samples:
        for is_right, is_known in steps(sample["problem"], sample["response"]):
            found["steps"] += 1
            found["way known"] += is_known
            found["right"] += is_right
            found["right unknown"] += is_right and not is_known
    return found


def steps_table(setting: Setting, runs: Mapping[str, Mapping[int, Path]]) -> list[str]:
    """Return how the relay's steps came out at the last looks: of those that began at a right state."""
    lines = [f"### {setting.name}: steps that began at a right state", "",
             f"Percent, over the last {LAST_LOOKS} looks. A way is known if the untrained student knew its facts.",
             "", "| row | seeds | chose a known way | ended right | ended right, of those without a known way |",
             "|---|---|---|---|---|"]  # fmt: skip
    for row, seeds in runs.items():
        each_seed = [
            sum((step_counts(samples) for samples in list(read_samples(run).values())[-LAST_LOOKS:]), Counter())
            for run in seeds.values()
        ]
        if not all(each["steps"] > each["way known"] for each in each_seed):
            lines.append(f"| {row} | {len(seeds)} | a run with no such steps | | |")
            continue
        figures = [
            [each["way known"] / each["steps"] for each in each_seed],
            [each["right"] / each["steps"] for each in each_seed],
            [each["right unknown"] / (each["steps"] - each["way known"]) for each in each_seed],
        ]
        lines.append(f"| {row} | {len(seeds)} | " + " | ".join(with_error(*mean_of(each)) for each in figures) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory.resolve()
    torch.set_num_threads(1)
    lines, pairs = ["## By what the rows gained", ""], []
    for setting in SETTINGS.values():
        if not (runs := kept_runs(directory, setting)):
            sys.stderr.write(f"{setting.name}: no kept runs in {directory / 'work'} (reproduction.py --keep)\n")
            continue
        table, of_rows = value_table(directory, setting, runs)
        lines += table + probes_table(directory, setting, runs)
        pairs += of_rows
        if setting.folder == "examples/relay":
            lines += steps_table(setting, runs)
    if len(pairs) > 2:
        both = np.corrcoef(pairs, rowvar=False)[-1]
        lines.append(f"Correlation with the gain over {len(pairs)} rows: of the forecast {both[0]:.2f}, with the "
                     f"probes made {both[1]:.2f}.")  # fmt: skip
    (directory / "mechanism.md").write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
