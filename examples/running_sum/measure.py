"""Measures the accuracy and the habits of a running-sum model on the held-out problems.

    python examples/running_sum/measure.py student teacher

It samples by plain `model.generate`, so the numbers depend on nothing but transformers. Avg@8 is the mean over all
samples, Pass@8 the share of problems with at least one right sample. Standard errors are over problems.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import task
import torch
from rich.console import Console
from rich.table import Table
from tokenizer import chat
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 192  # the longest correct solution has 156


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    samples: int = 8
    temperature: float = 1.0
    top_p: float = 0.8
    seed: int = 20261120


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Avg and Pass as shares in 0..1, each with its standard error over problems."""

    problems: int
    mean: float
    mean_error: float
    any_right: float
    any_right_error: float


@dataclass(frozen=True, slots=True)
class Habit:
    """How often a strategy was used, as a share of all lines, and how often its line was exact."""

    used: float
    exact: float


@dataclass(frozen=True, slots=True)
class Measurement:
    sampling: SamplingPlan
    accuracy: dict[str, Accuracy]  # by tier, and "all"
    habits: dict[str, Habit]  # by strategy
    response_tokens_mean: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure(
    model: Any, tokenizer: Any, problems: Sequence[task.Problem], sampling: SamplingPlan | None = None
) -> Measurement:
    sampling = sampling or SamplingPlan()
    torch.manual_seed(sampling.seed)
    model.eval()
    correct = torch.zeros(len(problems), sampling.samples)
    lines: list[task.Line] = []
    token_count = 0
    for tier in task.TIERS:  # one tier at a time: its prompts have similar lengths, so little is padding
        places = [i for i, problem in enumerate(problems) if problem.tier == tier]
        if not places:
            continue
        prompts = tokenizer.apply_chat_template(
            [chat(problems[i].text) for i in places],
            add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        sequences = model.generate(
            **prompts, do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0,
            num_return_sequences=sampling.samples, max_new_tokens=MAX_NEW_TOKENS,
        )  # fmt: skip
        responses = sequences[:, prompts["input_ids"].shape[1] :]
        token_count += int((responses != tokenizer.pad_token_id).sum())
        for row, text in enumerate(tokenizer.batch_decode(responses, skip_special_tokens=True)):
            place, sample = places[row // sampling.samples], row % sampling.samples
            correct[place, sample] = task.read_answer(text) == problems[place].answer
            lines += task.read_lines(text)
    accuracy = {}
    for tier in (*task.TIERS, "all"):
        rows = [i for i, problem in enumerate(problems) if tier in (problem.tier, "all")]
        if rows:
            accuracy[tier] = _accuracy(correct[rows])
    habits = {name: _habit([line for line in lines if line.strategy == name], len(lines)) for name in task.STRATEGIES}
    return Measurement(sampling, accuracy, habits, round(token_count / correct.numel(), 1))


def _accuracy(correct: torch.Tensor) -> Accuracy:  # (problems, samples)
    root = len(correct) ** 0.5
    mean, any_right = correct.mean(1), correct.amax(1)
    shares = (mean.mean(), mean.std() / root, any_right.mean(), any_right.std() / root)
    return Accuracy(len(correct), *(round(float(share), 4) for share in shares))


def _habit(lines: Sequence[task.Line], line_count: int) -> Habit:
    exact = sum(line.is_exact for line in lines)
    return Habit(round(len(lines) / max(line_count, 1), 3), round(exact / max(len(lines), 1), 3))


def table(measurements: dict[str, Measurement]) -> Table:
    """Return a table with a row for each model: Avg/Pass by tier in percent, then use and exactness by strategy."""
    result = Table("model", *(f"{tier} Avg@k / Pass@k" for tier in (*task.TIERS, "all")), "used@exact by line")
    for name, measured in measurements.items():
        cells = [f"{100 * a.mean:.1f} / {100 * a.any_right:.1f}" for a in measured.accuracy.values()]
        habits = " ".join(
            f"{strategy} {habit.used:.2f}@{habit.exact:.2f}" for strategy, habit in measured.habits.items()
        )
        result.add_row(name, *cells, habits)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure models on the held-out problems.")
    parser.add_argument("models", nargs="+", type=Path, help="checkpoint directories, or names beside this script")
    parser.add_argument("--samples", type=int, default=SamplingPlan().samples)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    here = Path(__file__).parent
    measurements = {}
    for path in arguments.models:
        directory = path if path.is_dir() else here / path
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        plan = SamplingPlan(samples=arguments.samples)
        measurements[path.name] = measure(model, tokenizer, task.heldout_problems(), plan)
    Console().print(table(measurements))


if __name__ == "__main__":
    main()
