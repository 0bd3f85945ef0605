"""Sends requests to a serving engine in this process, and computes the same by plain forwards in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from spot_async.serving.api import CandidateRequest, GenerateRequest, ScoreRequest
from spot_async.serving.engine.engine import Engine
from spot_async.serving.engine.requests import new_task
from spot_async.types import Generation, SamplingSettings

VOCAB = 61

Models = Callable[..., Path]  # the type of the fixture `random_architecture`
Engines = Callable[..., Engine]  # the type of the fixture `engine_for`


def prompts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def generate_request(prompt: np.ndarray, *, seed: int = 0, top_k: int = 0, **sampling: object) -> GenerateRequest:
    chosen = SamplingSettings(**{"max_tokens": 12, "stop_token_ids": (), "seed": seed, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(prompt_ids=prompt, sampling=chosen, top_k=top_k, timeout_s=60.0)


def score_request(prompt: np.ndarray, response: np.ndarray, **more: object) -> ScoreRequest:
    return ScoreRequest(**{"prompt_ids": prompt, "response_ids": response, "top_k": 5, "timeout_s": 60.0, **more})  # type: ignore[arg-type]


def candidate_request(prompt: np.ndarray, response: np.ndarray, **more: Any) -> CandidateRequest:
    return CandidateRequest(prompt_ids=prompt, response_ids=response, timeout_s=60.0, **more)


def submit(engine: Engine, request: GenerateRequest | ScoreRequest | CandidateRequest) -> Any:
    engine.limits.check(request)
    task = new_task(request)
    engine.submit(task)
    return task


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def run_all(engine: Engine, requests: list[GenerateRequest], *, steps_between: int = 0) -> list[Generation]:
    """Submit requests, with `steps_between` engine steps after each, and run to the end."""
    tasks = []
    for request in requests:
        tasks.append(submit(engine, request))
        for _ in range(steps_between):
            engine.step()
    finish(engine)
    return [task.future.result(timeout=0) for task in tasks]


def dense_logprobs(
    directory: Path,
    prompt: np.ndarray,
    response: np.ndarray,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> np.ndarray:
    """Return the log-probabilities (T, V), float64, that decide each response token, from one plain full forward.

    `dtype` is that of the forward.
    """
    config = transformers.AutoConfig.from_pretrained(directory)
    if config.model_type == "mixtral":
        dtype = torch.float32  # torch's expert kernel has no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    tokens = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    with torch.no_grad():
        logits = model(tokens).logits[0].double().numpy() / temperature
    rows = logits[len(prompt) - 1 : len(prompt) - 1 + len(response)]
    shifted = rows - rows.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
