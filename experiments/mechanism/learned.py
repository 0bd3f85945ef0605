"""Looks into the kept runs of `run.py`: by what the rows gained. Exploratory, no part of the plan.

    python experiments/mechanism/run.py DIR --keep
    python experiments/mechanism/learned.py DIR         # of the runs in DIR/work; writes DIR/mechanism.md

Three tables. What the students' choices are worth in the contexts that the forecast measured. Where SPOT probed, at the
start and later. In the relay, what the students know and which methods they choose.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from forecasts import Figures, Forecast, read_forecast
from rows import RELAY, ROOT, SETTINGS, Sample, Setting
from tables import OPD, mean_of, read_problems, with_error
from transformers import AutoModelForCausalLM, AutoTokenizer
from values import decision_value

CONTEXTS = 1_000  # solutions of three steps


def load_task() -> Any:
    """Return the relay's `task.py`. The running sum has a module of that name too."""
    loader = SourceFileLoader("relay_task", str(ROOT / RELAY / "task.py"))
    module = sys.modules[loader.name] = ModuleType(loader.name)
    loader.exec_module(module)
    return module


task = load_task()


def kept_runs(directory: Path, setting: Setting) -> dict[str, dict[int, Path]]:
    """Return the training directories by row, in the plan's order, and seed."""
    found: dict[str, dict[int, Path]] = {row.name: {} for row in setting.rows}
    for path in (directory / "work" / setting.name).glob("*-seed-*"):
        row, _, seed = path.name.rpartition("-seed-")
        is_finished = (directory / "records" / setting.name / f"{path.name}.json").exists()
        if row in found and is_finished and (path / "train" / "student").exists():
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


def forecast_of(directory: Path, setting: Setting) -> Forecast:
    file = read_forecast(directory, setting.name)
    if file is None:
        sys.exit(f"{directory / 'forecasts'}: has no {setting.name}.json: README.md says where it is kept")
    return file


def value_table(
    directory: Path, setting: Setting, runs: Mapping[str, Mapping[int, Path]]
) -> tuple[list[str], list[tuple[float, float, float]]]:
    """Return what each row's choices are worth where the forecast measured them, against OPD's of the same seed.

    Beside the table: the gain predicted, that with the probes made, and the gain observed, of each row that has them.
    """
    measured = forecast_of(directory, setting).prompts
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
        file = read_forecast(directory, setting.name, row)
        said = ["", ""]
        if file is not None and (predicted := file.forecast.figures["settled_gain"]) is not None:
            samples = [each for run in runs[row].values() for look in read_samples(run).values() for each in look]
            with_probes = gain_with_probes(file.forecast, probed_share(setting, samples))
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


def gain_with_probes(forecast: Figures, share: float) -> float:
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
    prompts = forecast_of(directory, setting).prompts
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


class Knowledge(NamedTuple):
    """What a student of the relay would do after right beginnings of solutions."""

    facts: np.ndarray  # (4,), probability of the right state, by the share of its method's facts that was known
    methods: np.ndarray  # (4,), probabilities of an operation's methods, the best known first

    @property
    def step_value(self) -> float:
        """How likely a step is right: that of each method, times that of three right states."""
        return float(self.methods @ self.facts**task.STAGES)


def knowledge_of(model: Path) -> Knowledge:
    """Return what a student knows and chooses, over right solutions with all methods equally often."""
    random = np.random.default_rng(0)
    relay, count, operations = task.RELAY, CONTEXTS, 3
    starts, asked = relay.problems(random, count, operations)
    even = np.full_like(relay.prior, 1 / len(task.METHODS))
    written = task.write_solutions(relay, starts, asked, even, random, is_known=np.ones_like(relay.is_known))
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    prompts = [f"<|user|>{task.problem_text(*each)}<|assistant|>" for each in zip(starts, asked, strict=True)]
    texts = [
        prompt + "".join(
            f"{task.OPERATIONS[operation]}{task.METHODS[method]}{task.states_text(states)}{task.CONNECTIVES[connective]}"
            for operation, method, states, connective in zip(
                asked[row], written.methods[row], written.states[row], written.connectives[row], strict=True
            )
        )
        for row, prompt in enumerate(prompts)
    ]  # fmt: skip
    ids = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    begin = len(tokenizer(prompts[0], add_special_tokens=False)["input_ids"])
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.inference_mode():
        chances = student(ids).logits[:, :-1].double().softmax(-1)  # row t predicts token t + 1
    right = chances.gather(-1, ids[:, 1:, None])[..., 0].numpy()
    known = relay.known_share[asked]  # (count, operations, 4)
    of_method = np.take_along_axis(known, written.methods[..., None], axis=-1)[..., 0]
    letters = tokenizer.convert_tokens_to_ids(list(task.METHODS))
    facts: dict[float, list[float]] = {level: [] for level in task.KNOWN_SHARES}
    methods = np.zeros(len(task.METHODS))
    for step in range(operations):
        first = begin + task.STEP_LETTERS * step
        states = right[:, first + 1 : first + 1 + task.STAGES].mean(axis=1)
        for level in task.KNOWN_SHARES:
            facts[level] += states[of_method[:, step] == level].tolist()
        chosen = chances[:, first][:, letters].numpy()
        ranked = np.take_along_axis(chosen, np.argsort(-known[:, step], axis=1), axis=1)
        methods += (ranked / ranked.sum(axis=1, keepdims=True)).mean(axis=0) / operations
    return Knowledge(np.array([np.mean(facts[level]) for level in task.KNOWN_SHARES]), methods)


def knowledge_table(setting: Setting, runs: Mapping[str, Mapping[int, Path]]) -> list[str]:
    """Return what the relay's students know and choose, and how much of a right step's gain each of the two is."""
    lines = [f"### {setting.name}: facts and methods", "",
             "Percent, mean over seeds ± standard error. Facts are the probability of a right state, by the share of "
             "its method's facts that the untrained student knew. Methods are in the same order. A step is right by "
             "a method's probability times that of three states, summed. Last its gain over OPD's, and what it "
             "would be with OPD's facts, and with OPD's methods.",
             "", "| row | seeds | facts of 85 % | 60 % | 40 % | 20 % | methods of 85 % | 60 % | 40 % | 20 % "
             "| gain of a step | by methods | by facts |", f"|{'---|' * 13}"]  # fmt: skip
    found = {row: {seed: knowledge_of(run / "student") for seed, run in seeds.items()} for row, seeds in runs.items()}
    found = {"base": {0: knowledge_of(ROOT / setting.student)}, **found}
    for row, seeds in found.items():
        shown = [with_error(*mean_of([float(part) for part in parts]))
                 for kind in ("facts", "methods")
                 for parts in zip(*(getattr(each, kind) for each in seeds.values()), strict=True)]  # fmt: skip
        pairs = [(each, found[OPD][seed]) for seed, each in seeds.items() if row != OPD and seed in found.get(OPD, {})]
        gains = [
            [each.step_value - opd.step_value for each, opd in pairs],
            [each._replace(facts=opd.facts).step_value - opd.step_value for each, opd in pairs],
            [each._replace(methods=opd.methods).step_value - opd.step_value for each, opd in pairs],
        ]
        shown += [with_error(*mean_of(each)) for each in gains] if pairs else ["", "", ""]
        lines.append(f"| {row} | {len(seeds)} | {' | '.join(shown)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory.resolve()
    torch.set_num_threads(1)
    lines, pairs = ["## By what the rows gained", ""], []
    for setting in SETTINGS.values():
        if not (runs := kept_runs(directory, setting)):
            sys.stderr.write(f"{setting.name}: no kept runs in {directory / 'work'} (run.py --keep)\n")
            continue
        table, of_rows = value_table(directory, setting, runs)
        lines += table + probes_table(directory, setting, runs)
        pairs += of_rows
        if setting.folder == RELAY:
            lines += knowledge_table(setting, runs)
    if len(pairs) > 2:
        both = np.corrcoef(pairs, rowvar=False)[-1]
        lines.append(f"Correlation with the gain over {len(pairs)} rows: of the forecast {both[0]:.2f}, with the "
                     f"probes made {both[1]:.2f}.")  # fmt: skip
    (directory / "mechanism.md").write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
