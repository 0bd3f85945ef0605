"""Measures the relay's models by themselves, on the held-out problems; no method is run.

    python experiments/mechanism/relay/measure.py student peer teacher reader
    python experiments/mechanism/relay/measure.py reader --with-answers      # each prompt has the problem's answer

Avg@8 is the mean over all samples, Pass@8 the share of problems with a right sample, at temperature 1 and top-p 0.8.
Shares of methods are by rank: by the student's knowledge of an operation's methods, and by the teacher's prior.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import task
import torch
from pretrain import facts_right
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 40  # a solution of four operations has 28
SAMPLES, TOP_P, SEED = 8, 0.8, 20261123


@torch.no_grad()
def measure(
    model: Any, tokenizer: Any, relay: task.Relay, problems: dict[str, tuple[int, str]], *, with_answers: bool
) -> dict[str, Any]:
    torch.manual_seed(SEED)
    model.eval()
    found: dict[str, Any] = {}
    used = {"by the student's knowledge": np.zeros(4), "by the teacher's prior": np.zeros(4)}
    knowledge = np.argsort(np.argsort(-relay.known_share, axis=1), axis=1)  # each method's rank
    prior = np.argsort(np.argsort(-relay.prior, axis=1), axis=1)
    tokens = 0
    for tier in task.TIERS:
        texts = [text for text, (operations, _) in problems.items() if operations == tier]
        read = [f"{text}{{{problems[text][1]}}}" if with_answers else text for text in texts]
        prompts = tokenizer([f"<|user|>{text}<|assistant|>" for text in read], return_tensors="pt")
        sequences = model.generate(
            input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"], do_sample=True, temperature=1.0,
            top_p=TOP_P, top_k=0, num_return_sequences=SAMPLES, max_new_tokens=MAX_NEW_TOKENS,
        )  # fmt: skip
        responses = sequences[:, prompts["input_ids"].shape[1] :]
        tokens += int((responses != tokenizer.pad_token_id).sum())
        right = np.zeros((len(texts), SAMPLES))
        for row, response in enumerate(tokenizer.batch_decode(responses, skip_special_tokens=True)):
            text = texts[row // SAMPLES]
            right[row // SAMPLES, row % SAMPLES] = response.endswith(f"\\boxed{{{problems[text][1]}}}")
            for operation, method in task.read_steps(text, response):
                used["by the student's knowledge"][knowledge[operation, method]] += 1
                used["by the teacher's prior"][prior[operation, method]] += 1
        found[f"tier {tier}"] = shares(right)
        found.setdefault("right", []).append(right)
    found["all"] = shares(np.concatenate(found.pop("right")))
    found |= {f"methods {name}": (each / each.sum()).round(3).tolist() for name, each in used.items()}
    found["probability of the right state, by the share of facts known"] = facts_right(model, relay, 2000)
    return found | {"tokens of a response": round(tokens / len(problems) / SAMPLES, 1)}


def shares(right: np.ndarray) -> dict[str, float]:
    """Return Avg@8 and Pass@8 in percent with their standard errors over problems."""
    columns = {"avg": right.mean(axis=1), "pass": right.max(axis=1)}
    return {name: round(100 * float(each.mean()), 1) for name, each in columns.items()} | {
        f"{name}_error": round(100 * float(each.std(ddof=1)) / len(each) ** 0.5, 1) for name, each in columns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure models on the held-out problems.")
    parser.add_argument("models", nargs="+", help="directories; relative ones lie beside this script")
    parser.add_argument(
        "--with-answers", action="store_true", help="prompts have the answer, as a self-teacher reads it"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        directory = Path(__file__).parent / name
        relay = task.RELAY
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False),
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False),
        )
        found = measure(model, tokenizer, relay, relay.heldout, with_answers=arguments.with_answers)
        print(name, json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
