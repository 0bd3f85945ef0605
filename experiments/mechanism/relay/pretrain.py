"""Trains the relay's teacher and student by supervised learning on generated solutions.

    python experiments/mechanism/relay/pretrain.py [--out DIR]

Both begin as one model that knows all facts and names methods evenly. The teacher then learns its prior over methods
from solutions with slips, so that it continues well from a student's error. The student reads random states in place of
the facts that it shall not know. The peer is the student with the teacher's prior: it keeps the student's probabilities
of states. The reader is a student that can also read the answer where its prompt has it. Phases are counted in steps,
never in seconds.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import task
import torch
import transformers
from tokenizer import CONTEXT_TOKENS, IDS, IGNORED, VOCABULARY_SIZE, build_tokenizer, encode, save_tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

WARMUP_STEPS = 50
FINAL_RATE_SHARE = 0.02
INITIALIZER_RANGE = 0.05
HIDDEN = 96
BATCH_SIZE = 128
LENGTH_WEIGHTS = (0.1, 0.25, 0.3, 0.35)  # of problems with 1, 2, 3 and 4 operations


@dataclass(frozen=True)
class Phase:
    seed: int
    steps: int
    learning_rate: float
    slips: float = 0.0  # chance that a state in the text is random; such states are not learned
    with_prior: bool = False  # names methods as the teacher does, or all alike
    knows_all: bool = True  # or the student's share of the facts
    holds_states: bool = False  # learns states from the probabilities that the model began with, not from the texts
    answers: float = 0.0  # share of batches whose prompts have the answer, in braces


SHARED = (Phase(0, 1000, 4e-3),)
TEACHER = (Phase(3, 160, 1.5e-3, slips=0.15, with_prior=True), Phase(4, 400, 3e-3, slips=0.25, with_prior=True))
STUDENT = (Phase(1, 200, 3e-3, knows_all=False),)
READER = (*STUDENT, Phase(6, 600, 3e-3, knows_all=False, answers=0.5))
PEER = (*STUDENT, Phase(5, 250, 3e-3, knows_all=False, with_prior=True, holds_states=True))


def build_model() -> Qwen3ForCausalLM:
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
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


def train(model: Qwen3ForCausalLM, relay: task.Relay, phase: Phase, say: Callable[[str], None]) -> None:
    torch.manual_seed(phase.seed)
    random = np.random.default_rng(phase.seed)
    prior = relay.prior if phase.with_prior else np.full_like(relay.prior, 1 / len(task.METHODS))
    is_known = np.ones_like(relay.is_known) if phase.knows_all else relay.is_known
    began = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.process_time()
    mean = None
    for step in range(phase.steps):
        rate = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * step / phase.steps))
        for group in optimizer.param_groups:
            group["lr"] = phase.learning_rate * rate * min(1.0, (step + 1) / WARMUP_STEPS)
        starts, operations = relay.problems(random, BATCH_SIZE, 1 + int(random.choice(4, p=LENGTH_WEIGHTS)))
        kept = np.array(
            [task.problem_text(int(s), o) not in relay.heldout for s, o in zip(starts, operations, strict=True)]
        )
        starts, operations = starts[kept], operations[kept]
        reads = phase.answers > 0 and random.random() < phase.answers
        written = task.write_solutions(
            relay, starts, operations, prior, random, is_known=is_known, slips=phase.slips, reads_answers=reads
        )
        ids, labels = (torch.from_numpy(each) for each in encode(starts, operations, written, with_answers=reads))
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        labels = labels[:, 1:]
        is_state = (labels >= IDS["0"]) & (labels < IDS["0"] + task.STATES)
        if not phase.holds_states:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        else:
            with torch.no_grad():
                held = began(input_ids=ids[:, :-1], use_cache=False).logits[is_state].softmax(-1)
            others = logits.flatten(0, 1), labels.masked_fill(is_state, IGNORED).flatten()
            loss = torch.nn.functional.cross_entropy(*others, ignore_index=IGNORED)
            loss = loss + torch.nn.functional.cross_entropy(logits[is_state], held)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            say(
                f"step {step + 1}: loss {mean:.4f}, {time.process_time() - started:.0f} CPU s, "
                f"facts {facts_right(model, relay)}"
            )


@torch.no_grad()
def facts_right(model: Qwen3ForCausalLM, relay: task.Relay, count: int = 300) -> list[float]:
    """Return the mean probability of the right state, by the share of the method's facts that the student knows."""
    random = np.random.default_rng(0)
    starts, operations = relay.problems(random, count, 3)
    even = np.full_like(relay.prior, 1 / len(task.METHODS))
    written = task.write_solutions(relay, starts, operations, even, random, is_known=np.ones_like(relay.is_known))
    ids, _ = encode(starts, operations, written)
    logits = model(input_ids=torch.from_numpy(ids[:, :-1]), use_cache=False).logits
    chances = logits.softmax(-1).gather(-1, torch.from_numpy(ids[:, 1:])[..., None])[..., 0].numpy()
    begin = 6 - 1  # <|user|>, a state, three operations, <|assistant|>: its first token is predicted in row 5
    share = relay.known_share[operations, written.methods]  # (n, 3)
    found = np.stack([chances[:, begin + 6 * j + 2 : begin + 6 * j + 5].mean(axis=1) for j in range(3)], axis=1)
    return [round(float(found[share == level].mean()), 3) for level in task.KNOWN_SHARES]


def keep_large_blocks_on_the_heap() -> None:
    """Tell glibc to keep freed memory, since returning it to the kernel and faulting it in at each step is slow."""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 1 << 30)
    libc.mallopt(-1, (1 << 31) - 1)
    libc.mallopt(-2, 1 << 26)


def write_checkpoint(role: str, phases: tuple[Phase, ...], model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write the model, its tokenizer, and a manifest that says how it was made and what it knows."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    manifest = {
        "model": f"{role} of the relay",
        "phases": [asdict(phase) for phase in phases],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "probability of the right state, by the share of a method's facts that the student knows": dict(
            zip(map(str, task.KNOWN_SHARES), facts_right(model, task.RELAY), strict=True)
        ),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
        "sha256": {"model.safetensors": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()},
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the relay's teacher and student.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the directories are written")
    arguments = parser.parse_args()
    keep_large_blocks_on_the_heap()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    torch.manual_seed(SHARED[0].seed)
    shared = build_model()
    for phase in SHARED:
        train(shared, task.RELAY, phase, lambda line: print("shared", line, flush=True))
    for role, phases in (("student", STUDENT), ("peer", PEER), ("teacher", TEACHER), ("reader", READER)):
        model = copy.deepcopy(shared)
        for phase in phases:
            train(model, task.RELAY, phase, lambda line, role=role: print(role, line, flush=True))
        write_checkpoint(role, SHARED + phases, model, arguments.out / role)


if __name__ == "__main__":
    main()
