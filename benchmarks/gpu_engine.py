"""Measures the local engine on a GPU at Qwen3's sizes: decoding beside `model.generate`, scoring, memory.

    python benchmarks/gpu_engine.py 0.6b 1.7b

Weights are random.

* Decoding has 64 slots, prompts of 200 tokens, responses of 256 and temperature 1. Its bound is reading all weights and
  all keys and values so far once a step, at the rate that a large copy reaches on this GPU in the same run.
* Scoring has 32 sequences of 2,048 response tokens, top-16 and exact entropy. Its bound is the arithmetic.
* The mismatch is between the log-probabilities that the engine served and the trainer's forward under autocast.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_training import GIB, matrix_rate
from qwen3_models import VOCABULARY, save_qwen3
from report import show
from transformers import AutoModelForCausalLM, GenerationConfig

from spot_async.models.model_size import ModelSize, read_size
from spot_async.serving.api import GenerateRequest, ScoreRequest
from spot_async.serving.engine.engine import Engine
from spot_async.serving.engine.fused import fused
from spot_async.serving.engine.model import load_model, quiet_transformers
from spot_async.serving.engine.requests import Task, new_task
from spot_async.serving.settings import EngineSettings
from spot_async.trainer.loading import new_student, read_parameters
from spot_async.types import Generation, SamplingSettings

SLOTS, PROMPT_TOKENS, RESPONSE_TOKENS = 64, 200, 256
SCORED_SEQUENCES, SCORED_TOKENS, TOP_K = 32, 2048, 16


def copy_rate() -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        target.copy_(source)
    torch.cuda.synchronize()
    return 5 * 2 * source.nbytes / (time.perf_counter() - started)


def timed(work: Any) -> tuple[Any, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - started


def answers(engine: Engine, requests: list[Any]) -> list[Any]:
    tasks: list[Task] = [new_task(request) for request in requests]
    for task in tasks:
        engine.submit(task)
    while engine.busy:
        engine.step()
    return [task.future.result() for task in tasks]


def generations(engine: Engine, prompts: list[np.ndarray], seed: int, max_tokens: int) -> list[Generation]:
    sampling = [
        SamplingSettings(max_tokens=max_tokens, stop_token_ids=(), seed=seed * SLOTS + row)
        for row in range(len(prompts))
    ]
    return answers(
        engine,
        [
            GenerateRequest(prompt_ids=prompt, sampling=each, timeout_s=3600.0)
            for prompt, each in zip(prompts, sampling, strict=True)
        ],
    )


def decode_bound_s(size: ModelSize, weight_bytes: int, rate: float) -> float:
    cached = SLOTS * (PROMPT_TOKENS + RESPONSE_TOKENS / 2) * size.cache_bytes_per_token * weight_bytes / 2
    return RESPONSE_TOKENS * (weight_bytes * size.parameters + cached) / rate


@torch.no_grad()
def mismatch(directory: Path, replies: list[Generation], prompts: list[np.ndarray]) -> tuple[float, float]:
    """Return the mean and largest difference in nats to the trainer's forward (float32 weights, bfloat16 autocast)."""
    student = new_student(str(directory))
    read_parameters(student, str(directory), torch.device("cuda"))
    student.cuda()
    gaps = []
    for prompt, reply in zip(prompts[:8], replies[:8], strict=True):
        ids = torch.tensor(np.concatenate([prompt, reply.token_ids])[None], device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits = student(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append(np.abs(logprobs.cpu().numpy() - reply.logprobs))
    every = np.concatenate(gaps)
    return float(every.mean()), float(every.max())


def by_generate(size: str, directory: Path, prompts: list[np.ndarray], bound_s: float) -> list[str]:
    """Measure transformers' own `generate`, and return its row."""
    module = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, trust_remote_code=False).cuda().eval()
    )
    config = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=RESPONSE_TOKENS, pad_token_id=0)
    config.min_new_tokens = RESPONSE_TOKENS
    ids = torch.tensor(np.array(prompts), device="cuda").long()

    def generate() -> None:
        module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)

    generate()
    torch.cuda.reset_peak_memory_stats()
    _, seconds = timed(generate)
    return _row(f"{size}, bfloat16, model.generate", SLOTS * RESPONSE_TOKENS, seconds, bound_s, peak_gib(), "")


def measure(size: str, directory: Path, bandwidth: float, operations: float) -> list[list[str]]:
    model_directory = save_qwen3(size, directory / size, "cuda")
    found = read_size(model_directory)
    assert found is not None
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32) for _ in range(SLOTS)]
    rows = [by_generate(size, model_directory, prompts, decode_bound_s(found, 2, bandwidth))]
    for dtype in ("bfloat16", "float32"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        settings = EngineSettings(device="cuda", dtype=dtype, slots=SLOTS, max_context_tokens=4096)
        loaded = load_model(model_directory, settings)
        fast = fused(loaded)
        engine = Engine(fast, settings)
        generations(engine, prompts, 1, 32)
        replies, seconds = timed(lambda engine=engine: generations(engine, prompts, 2, RESPONSE_TOKENS))
        peak = peak_gib()  # taken before the comparison, which loads the model once more
        tokens = sum(len(reply.token_ids) for reply in replies)
        mean, largest = mismatch(model_directory, replies, prompts)
        path = "fast path" if fast is not loaded else "general path"
        bound_s = decode_bound_s(found, 2 if dtype == "bfloat16" else 4, bandwidth)
        note = f"{mean:.1e}, at most {largest:.1e}"
        rows.append(_row(f"{size}, {dtype}, engine, {path}", tokens, seconds, bound_s, peak, note))
        torch.cuda.reset_peak_memory_stats()
        requests = [
            ScoreRequest(
                prompt_ids=prompts[row],
                response_ids=rng.integers(0, VOCABULARY, SCORED_TOKENS).astype(np.int32),
                top_k=TOP_K,
                temperature=1.0,
                timeout_s=3600.0,
            )
            for row in range(SCORED_SEQUENCES)
        ]
        answers(engine, requests[:4])
        _, seconds = timed(lambda engine=engine, requests=requests: answers(engine, requests))
        tokens = SCORED_SEQUENCES * (PROMPT_TOKENS + SCORED_TOKENS)
        bound_s = 2 * found.parameters * tokens / operations
        rows.append(_row(f"{size}, {dtype}, engine, scoring", tokens, seconds, bound_s, peak_gib(), ""))
        del engine, loaded, fast
    return rows


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / GIB


def _row(name: str, tokens: int, seconds: float, bound_s: float, peak: float, note: str) -> list[str]:
    return [name, f"{tokens / seconds:,.0f}", f"{seconds:.2f}", f"{seconds / bound_s:.1f}", f"{peak:.1f}", note]


def main() -> None:
    parser = argparse.ArgumentParser(description="The local engine on one GPU.")
    parser.add_argument("sizes", nargs="+")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "spot-gpu")
    arguments = parser.parse_args()
    quiet_transformers()
    bandwidth, operations = copy_rate(), matrix_rate(torch.device("cuda"))
    torch.cuda.empty_cache()
    rows = [row for size in arguments.sizes for row in measure(size, arguments.directory, bandwidth, operations)]
    device = torch.cuda.get_device_properties(0)
    notes = [
        f"{device.name}, {device.total_memory / GIB:.0f} GiB, torch {torch.__version__}; "
        f"copies {bandwidth / 1e12:.2f} TB/s, products {operations / 1e12:.0f} TFLOP/s"
    ]
    columns = ["what", "tokens/s", "seconds", "x bound", "peak GiB", "mismatch, nats"]
    show(f"vocabulary {VOCABULARY:,}, {SLOTS} slots", columns, rows, notes)


if __name__ == "__main__":
    main()
