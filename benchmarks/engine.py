"""Measures tokens per CPU-second of the local engine and of transformers, on the shipped student and one thread.

    python benchmarks/engine.py

All ways sample the same prompts at temperature 1, up to 160 tokens. They take turns for a few rounds, so that a busy
machine slows all of them, and ratios are taken within a round. `at once` has all requests waiting from the start;
`arriving` submits eight before each step. The engine's log-probabilities are compared with a plain forward's.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import show, spread
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from spot_async.base.processes.resources import tune_malloc
from spot_async.serving.api import GenerateRequest
from spot_async.serving.engine.engine import Engine
from spot_async.serving.engine.fused import fused
from spot_async.serving.engine.model import load_model, quiet_transformers
from spot_async.serving.engine.requests import GenerateTask, new_task
from spot_async.serving.settings import EngineSettings
from spot_async.types import Generation, SamplingSettings

EXAMPLE = Path(__file__).parent.parent / "examples" / "running_sum"
MAX_TOKENS = 160
GENERATE_ROWS = 64
ARRIVING_PER_STEP = 8
SHORT_REPEATS = 16  # the longest response decides how long `generate` takes, so that single runs differ by a quarter
CHECKED = 64

Way = Callable[[], int]  # runs once, returns the tokens sampled


def load_prompts(tokenizer: Any, count: int) -> list[np.ndarray]:
    lines = (EXAMPLE / "data" / "train.jsonl").read_text().splitlines()[:count]
    chats = [[{"role": "user", "content": json.loads(line)["problem"]}] for line in lines]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return [np.array(row, np.int32) for row in ids]


def by_generate(module: Any, config: GenerationConfig, prompts: list[np.ndarray]) -> Way:
    def run() -> int:
        tokens = 0
        for start in range(0, len(prompts), GENERATE_ROWS):
            part = prompts[start : start + GENERATE_ROWS]
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(p)) + p.tolist() for p in part])  # 0 is padding
            replies = module.generate(input_ids=ids, attention_mask=(ids != 0).long(), generation_config=config)
            tokens += int((replies[:, width:] != 0).sum())
        return tokens

    return run


def by_generate_batch(module: Any, config: GenerationConfig, prompts: list[np.ndarray]) -> Way:
    batching = ContinuousBatchingConfig(max_batch_tokens=256, num_blocks=1024)  # given, or it measures for seconds
    inputs = [prompt.tolist() for prompt in prompts]

    def run() -> int:
        replies = module.generate_batch(inputs, generation_config=config, continuous_batching_config=batching)
        return sum(len(reply.generated_tokens) for reply in replies.values())

    return run


def by_engine(engine: Engine, prompts: list[np.ndarray], *, per_step: int) -> Way:
    return lambda: sum(len(reply.token_ids) for reply in replies_of(engine, prompts, per_step=per_step))


def replies_of(engine: Engine, prompts: list[np.ndarray], *, per_step: int) -> list[Generation]:
    tasks: list[GenerateTask] = []
    for number, prompt in enumerate(prompts):
        sampling = SamplingSettings(max_tokens=MAX_TOKENS, stop_token_ids=(1,), seed=number)
        task = new_task(GenerateRequest(prompt_ids=prompt, sampling=sampling, timeout_s=3600.0))
        assert isinstance(task, GenerateTask)
        engine.submit(task)
        tasks.append(task)
        if len(tasks) % per_step == 0:
            engine.step()
    while engine.busy:
        engine.step()
    return [task.future.result() for task in tasks]


@torch.no_grad()
def largest_gap(module: Any, engine: Engine, prompts: list[np.ndarray]) -> float:
    """Return the largest difference of a sampled token's log-probability from a plain forward's, in nats."""
    gaps = []
    for prompt, reply in zip(prompts, replies_of(engine, prompts, per_step=ARRIVING_PER_STEP), strict=True):
        logits = module(input_ids=torch.tensor(np.concatenate([prompt, reply.token_ids])[None])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1).numpy()
        gaps.append(np.abs(rows[np.arange(len(rows)), reply.token_ids] - reply.logprobs).max())
    return float(max(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per CPU-second of the local engine and of transformers.")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "student")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    tune_malloc()  # for all ways, since it helps transformers as much
    torch.set_num_threads(1)
    quiet_transformers()
    logging.disable(logging.ERROR)
    module = AutoModelForCausalLM.from_pretrained(arguments.model, trust_remote_code=False).eval()
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS, eos_token_id=1, pad_token_id=0
    )
    prompts = load_prompts(AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False), 256)
    settings = EngineSettings()
    general = Engine(load_model(arguments.model, settings), settings)
    fast = Engine(fused(load_model(arguments.model, settings)), settings)
    ways: dict[str, Way] = {
        "model.generate, 64 at once": by_generate(module, config, prompts[:64]),
        "model.generate, 256 in batches of 64": by_generate(module, config, prompts),
        "model.generate_batch, 256 at once": by_generate_batch(module, config, prompts),
        "engine, general path, 64 at once": by_engine(general, prompts[:64], per_step=64),
        "engine, fast path, 64 at once": by_engine(fast, prompts[:64], per_step=64),
        "engine, general path, 256 arriving": by_engine(general, prompts, per_step=ARRIVING_PER_STEP),
        "engine, fast path, 256 arriving": by_engine(fast, prompts, per_step=ARRIVING_PER_STEP),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(arguments.rounds + 1):
        for name, way in ways.items():
            started = time.process_time()
            tokens = sum(way() for _ in range(SHORT_REPEATS if name.endswith(", 64 at once") else 1))
            if round_number:  # the first round only warms up
                rates[name].append(tokens / (time.process_time() - started))

    def ratios(name: str, reference: str) -> str:
        return spread([own / other for own, other in zip(rates[name], rates[reference], strict=True)])

    rows = [
        [
            name,
            f"{max(rates[name]):,.0f}",
            f"{statistics.median(rates[name]):,.0f}",
            ratios(name, "model.generate, 64 at once" if "64 at once" in name else list(ways)[1]),
            ratios(name, "model.generate_batch, 256 at once"),
        ]
        for name in ways
    ]
    notes = [
        f"{name} path: log-probabilities at most {largest_gap(module, engine, prompts[:CHECKED]):.1e} nats "
        f"off a plain forward's ({CHECKED} responses)"
        for name, engine in (("general", general), ("fast", fast))
    ]
    columns = ["tokens per CPU-second", "best", "median", "x generate", "x generate_batch"]
    show(f"{arguments.model.name}, {settings.slots} slots, {arguments.rounds} rounds", columns, rows, notes)


if __name__ == "__main__":
    main()
