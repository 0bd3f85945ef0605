"""Measures how often a model calls the calculator, and how often it ends right, on the held-out problems.

    python examples/calculator/measure.py student teacher runs/x/student

It samples by plain `model.generate`, turn by turn, so the numbers depend on nothing but transformers and the tool.
Shares are over all samples: the standard error of one is at most 1.6 points.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import task
import torch
from calculator import Calculator
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_TURNS = 4
MAX_NEW_TOKENS = 24  # the longest right turn has 13
SAMPLES = 8
TOP_P = 0.8
SEED = 20261130


@torch.no_grad()
def measure(
    model: Any, tokenizer: Any, problems: Sequence[task.Problem], *, samples: int = SAMPLES, has_tool: bool = True
) -> dict[str, float]:
    """Return the share of samples that call, those that end right, by tier too, and the mean number of turns.

    Without the tool a call ends the response as any text does.
    """
    torch.manual_seed(SEED)
    model.eval()
    played = [problem for problem in problems for _ in range(samples)]
    texts = [f"<|user|>{problem.text}<|assistant|>" for problem in played]
    called, turns, answers = [False] * len(played), [0] * len(played), [""] * len(played)
    going = list(range(len(played)))
    for _ in range(MAX_TURNS):
        wrote = _next_turns(model, tokenizer, [texts[i] for i in going]) if going else []
        still = []
        for i, turn in zip(going, wrote, strict=True):
            turns[i] += 1
            answers[i] = task.read_answer(turn) or ""
            expression = task.read_call(turn)
            called[i] |= expression is not None
            if has_tool and expression is not None:
                texts[i] += f"{turn}{tokenizer.eos_token}<|tool|>{answered(expression)}<|assistant|>"
                still.append(i)
        going = still
    right = [answer == problem.answer for answer, problem in zip(answers, played, strict=True)]
    found = {"calls": _mean(called), "right": _mean(right), "turns": _mean(turns)}
    for tier in task.TIERS:
        found[f"right_{tier}"] = _mean([each for each, of in zip(right, played, strict=True) if of.tier == tier])
    return found


def answered(expression: str) -> str:
    """Return what the tool answers, as a run shows it to the model."""
    try:
        return Calculator().calculate(expression)
    except ValueError as error:
        return f"ValueError: {error}"


def _next_turns(model: Any, tokenizer: Any, texts: list[str]) -> list[str]:
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**inputs, do_sample=True, top_k=0, top_p=TOP_P, max_new_tokens=MAX_NEW_TOKENS)
    turns = tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
    return [turn.partition(tokenizer.eos_token)[0] for turn in turns]


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(len(values), 1), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure models on the held-out problems.")
    parser.add_argument("models", nargs="+", type=Path, help="checkpoint directories, or names beside this script")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for path in arguments.models:
        directory = path if path.is_dir() else Path(__file__).parent / path
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        for has_tool in (True, False):
            found = measure(model, tokenizer, task.heldout_problems(), samples=arguments.samples, has_tool=has_tool)
            print(path, "with the tool" if has_tool else "without it", json.dumps(found))


if __name__ == "__main__":
    main()
