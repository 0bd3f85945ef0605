"""Trains the running-sum student and teacher from scratch, by supervised learning on generated solutions.

    python examples/running_sum/pretrain.py [--only student|teacher|short|long] [--steps SHARE] [--out DIR]

A model's skill comes from the amount of training, its habits from the last phase's mix of line lengths. `RECIPES` holds
all settings: sizes, seeds, mixes, steps, rates. Phases are counted in steps, never in seconds, so that a slow machine
makes the same model.
`SPECIALISTS` are for other runs than the quickstart: teachers that saw some tiers only, and models with another
tokenizer. They are made where `--only` names one. Writes a Hugging Face directory for each model, with a
`manifest.json` that says how it was made and measured.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import platform
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import task
import tokenizers
import torch
import transformers
from measure import SamplingPlan, measure, table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizer import CONTEXT_TOKENS, build_tokenizer, chat, save_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WARMUP_STEPS = 50
FINAL_RATE_SHARE = 0.05
INITIALIZER_RANGE = 0.06  # the usual 0.02 is meant for widths ten times as large
WEIGHT_DECAY = 0.01
ADAM_BETAS = (0.9, 0.98)
GRADIENT_NORM = 1.0
BATCHES_PER_DRAW = 16  # so many are drawn together and sorted by length, so that little of a batch is padding
IGNORED = -100  # the label that cross entropy skips


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training with one mix of line lengths and one warm-up and cosine decay of the rate."""

    name: str
    steps: int
    mix: task.StrategyMix
    learning_rate: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class Recipe:
    layers: int
    hidden: int
    head_dim: int
    seed: int
    habit: str
    phases: tuple[Phase, ...]
    tiers: tuple[task.Tier, ...] = task.TIERS  # of the problems that it sees
    joins: bool = False  # its tokenizer, numbers of two digits


RECIPES: dict[str, Recipe] = {
    "student": Recipe(
        layers=2,
        hidden=64,
        head_dim=16,
        seed=11,
        habit="By design it prefers three terms a line, its least reliable style; the last phase taught it so.",
        phases=(
            Phase("skills", 2200, (0.65, 0.22, 0.13), 3e-3, 32),
            Phase("plateau", 1000, (0.65, 0.22, 0.13), 1e-3, 32),
            Phase("habit", 150, (0.10, 0.25, 0.65), 5e-4, 32),
        ),
    ),
    "teacher": Recipe(
        layers=3,
        hidden=96,
        head_dim=24,
        seed=12,
        habit="By design it prefers one term a line, the most reliable style; the last phase taught it so.",
        phases=(
            Phase("skills", 2500, (0.2, 0.35, 0.45), 2e-3, 32),
            Phase("plateau", 1200, (0.3, 0.35, 0.35), 1.5e-3, 32),
            Phase("habit", 150, (0.35, 0.37, 0.28), 5e-4, 32),
        ),
    ),
}

SPECIALISTS: dict[str, Recipe] = {
    "short": replace(
        RECIPES["teacher"], seed=13, tiers=("easy", "medium"), habit="By design it has never seen a hard problem."
    ),
    "long": replace(RECIPES["teacher"], seed=14, tiers=("hard",), habit="By design it has seen hard problems only."),
    "joining_student": replace(RECIPES["student"], seed=15, joins=True),
    "joining_teacher": replace(RECIPES["teacher"], seed=16, joins=True),
}


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=3 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return model


def draw_batches(
    phase: Phase, tokenizer: PreTrainedTokenizerFast, problems: Iterator[task.Problem], rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw (input ids, labels) without end, both (batch, longest), padded right.

    Only the solution and its end token have labels.
    """
    while True:
        drawn = [next(problems) for _ in range(BATCHES_PER_DRAW * phase.batch_size)]
        prompts = tokenizer.apply_chat_template(
            [chat(problem.text) for problem in drawn], add_generation_prompt=True, return_dict=False
        )
        solutions = tokenizer([task.write_solution(problem, phase.mix, rng) for problem in drawn])["input_ids"]
        examples = [(prompt, [*ids, tokenizer.eos_token_id]) for prompt, ids in zip(prompts, solutions, strict=True)]
        examples.sort(key=lambda example: len(example[0]) + len(example[1]))
        batches = [examples[i : i + phase.batch_size] for i in range(0, len(examples), phase.batch_size)]
        rng.shuffle(batches)
        for batch in batches:
            longest = max(len(prompt) + len(solution) for prompt, solution in batch)
            ids = torch.full((len(batch), longest), tokenizer.pad_token_id)
            labels = torch.full((len(batch), longest), IGNORED)
            for row, (prompt, solution) in enumerate(batch):
                end = len(prompt) + len(solution)
                ids[row, :end] = torch.tensor(prompt + solution)
                labels[row, len(prompt) : end] = torch.tensor(solution)
            yield ids, labels


def learning_rate(phase: Phase, step: int) -> float:
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, phase.steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / phase.steps))
    return phase.learning_rate * warmup * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


def train(name: str, recipe: Recipe, console: Console) -> tuple[Qwen3ForCausalLM, int]:
    """Train a model; return it and the number of tokens that it saw, without padding."""
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    tokenizer = build_tokenizer(joins=recipe.joins)
    model = build_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY)
    heldout = task.heldout_problems()
    excluded = {problem.text for problem in heldout}
    problems = (each for each in task.draw_problems(rng, excluded) if each.tier in recipe.tiers)
    tokens_seen = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    for phase in recipe.phases:
        batches = draw_batches(phase, tokenizer, problems, rng)
        model.train()
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(f"{name} {phase.name}", total=phase.steps)
            for step in range(phase.steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(phase, step)
                ids, labels = next(batches)
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
                )
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
                optimizer.step()
                tokens_seen += int((ids != tokenizer.pad_token_id).sum())
                progress.update(bar, advance=1, description=f"{name} {phase.name} loss {loss.item():.3f}")
        glance = measure(model, tokenizer, heldout, SamplingPlan(samples=2))
        console.print(table({f"{name} after {phase.name}": glance}))
    return model, tokens_seen


def write_checkpoint(name: str, recipe: Recipe, model: Qwen3ForCausalLM, tokens_seen: int, directory: Path) -> None:
    """Write the model, its tokenizer and its manifest, with a measurement of this very model."""
    measured = measure(model, build_tokenizer(joins=recipe.joins), task.heldout_problems())
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    save_tokenizer(directory, joins=recipe.joins)
    weights = directory / "model.safetensors"
    manifest: dict[str, Any] = {
        "model": name,
        "date": datetime.now(UTC).date().isoformat(),
        "habit": recipe.habit,
        "recipe": asdict(recipe),
        "optimizer": {
            "name": "AdamW",
            "betas": ADAM_BETAS,
            "weight_decay": WEIGHT_DECAY,
            "gradient_norm": GRADIENT_NORM,
            "warmup_steps": WARMUP_STEPS,
            "final_rate_share": FINAL_RATE_SHARE,
        },
        "plan_commitment": task.COMMITMENT,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_seen": tokens_seen,
        "measurement": {
            "how": f"{task.HELDOUT_PER_TIER} held-out problems per tier, drawn with seed {task.HELDOUT_SEED!r}; "
            "mean is Avg@k and any_right Pass@k, k = samples; errors are standard errors over problems",
            **measured.as_dict(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "sha256": {weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def keep_large_blocks_on_the_heap() -> None:
    """Tell glibc to keep freed memory, since returning it to the kernel and faulting it in at each step is slow."""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # M_TRIM_THRESHOLD etc. in malloc.h
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(mmap_threshold, 1 << 30)
    libc.mallopt(trim_threshold, (1 << 31) - 1)
    libc.mallopt(top_pad, 1 << 26)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the running-sum student and teacher from scratch.")
    parser.add_argument("--only", choices=RECIPES | SPECIALISTS, help="train just this model")
    parser.add_argument("--steps", type=float, default=1.0, help="share of each phase's steps; for a quick try")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the directories are written")
    arguments = parser.parse_args()
    keep_large_blocks_on_the_heap()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    console = Console()
    for name in [arguments.only] if arguments.only else RECIPES:
        recipe = (RECIPES | SPECIALISTS)[name]
        phases = (replace(each, steps=math.ceil(arguments.steps * each.steps)) for each in recipe.phases)
        recipe = replace(recipe, phases=tuple(phases))
        model, tokens_seen = train(name, recipe, console)
        write_checkpoint(name, recipe, model, tokens_seen, arguments.out / name)
        console.print(f"wrote {arguments.out / name} after {tokens_seen / 1e6:.1f} M tokens")


if __name__ == "__main__":
    main()
