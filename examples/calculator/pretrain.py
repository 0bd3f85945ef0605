"""Trains the calculator's student and teacher from scratch, by supervised learning on generated episodes.

    python examples/calculator/pretrain.py [--only student|teacher] [--out DIR]

`RECIPES` holds all settings. Training is counted in steps, never in seconds, so that a slow machine makes the same
model. What the tool answers has no labels. Writes a Hugging Face directory for each model, with a `manifest.json` that
says how it was made and measured.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import random
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import task
import tokenizers
import torch
import transformers
from measure import measure
from tokenizer import CONTEXT_TOKENS, build_tokenizer, save_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WARMUP_STEPS = 50
FINAL_RATE_SHARE = 0.05
WEIGHT_DECAY = 0.01
ADAM_BETAS = (0.9, 0.98)
IGNORED = -100  # the label that cross entropy skips
STEPS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Recipe:
    seed: int
    steps: int
    at_once: float  # share of episodes that answer without the tool
    layers: int = 2
    hidden: int = 64
    learning_rate: float = 3e-3
    batch_size: int = 32


RECIPES: dict[str, Recipe] = {
    "student": Recipe(seed=11, steps=500, at_once=0.65),
    "teacher": Recipe(seed=12, steps=1500, at_once=0.0),
}


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=3 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.hidden // 4,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.06,  # the usual 0.02 is meant for widths ten times as large
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


def draw_batch(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, excluded: Container[str], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (input ids, labels) of one tier, both (batch, longest), padded right. Only the model's turns have labels."""
    rows: list[list[tuple[int, int]]] = []  # of ids, each with its label
    problems = task.draw_problems(rng, excluded, [rng.choice(task.TIERS)])
    for problem in itertools.islice(problems, recipe.batch_size):
        read, row = f"<|user|>{problem.text}<|assistant|>", []
        for turn, answer in task.write_turns(problem, at_once=rng.random() < recipe.at_once):
            asked, written = tokenizer([read, turn + tokenizer.eos_token])["input_ids"]
            row += [(each, IGNORED) for each in asked] + [(each, each) for each in written]
            read = f"<|tool|>{answer}<|assistant|>"
        rows.append(row)
    longest = max(map(len, rows))
    padded = torch.tensor([row + [(tokenizer.pad_token_id, IGNORED)] * (longest - len(row)) for row in rows])
    return padded[..., 0], padded[..., 1]


def learning_rate(recipe: Recipe, step: int) -> float:
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return recipe.learning_rate * warmup * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


def train(name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    model = build_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY)
    excluded = {problem.text for problem in task.heldout_problems()}
    model.train()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        ids, labels = draw_batch(recipe, tokenizer, excluded, rng)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % STEPS_SHOWN == 0:
            print(f"{name}: step {step + 1} of {recipe.steps}, loss {loss.item():.3f}", flush=True)
    return model


def write_checkpoint(
    name: str, recipe: Recipe, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path
) -> None:
    """Write the model, its tokenizer and its manifest, with a measurement of this very model."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    weights = directory / "model.safetensors"
    heldout = task.heldout_problems()
    manifest = {
        "model": name,
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "with_tool": measure(model, tokenizer, heldout),
        "without_tool": measure(model, tokenizer, heldout, has_tool=False),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "sha256": {weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the calculator's student and teacher from scratch.")
    parser.add_argument("--only", choices=RECIPES, help="train just this model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the directories are written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    tokenizer = build_tokenizer()
    for name in [arguments.only] if arguments.only else RECIPES:
        model = train(name, RECIPES[name], tokenizer)
        write_checkpoint(name, RECIPES[name], model, tokenizer, arguments.out / name)


if __name__ == "__main__":
    main()
