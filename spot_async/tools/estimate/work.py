"""Computes how many tokens a run samples, scores and trains, and how long that takes at assumed speeds. Pure.

Times are for planning. The speeds are those of a GPU's data sheet, times the share that programs usually reach. Work
that overlaps in a run is counted as if it did not.
"""

from __future__ import annotations

from dataclasses import dataclass

from spot_async.base.processes.gpus import Gpu
from spot_async.config import LoraConfig
from spot_async.models.model_size import ModelSize, forward_operations, training_operations

TRAINING_SHARE = 0.3  # of the operations per second, without fused kernels: what a run shows as `perf/mfu`
SCORING_SHARE = 0.4
DECODING_SHARE = 0.5  # of the bandwidth


@dataclass(frozen=True)
class Work:
    """The tokens of a whole run."""

    prompt: float  # read by the student's servers for rollouts
    rollout: float
    probe: float
    teacher_written: float
    scored: float  # by teacher and reference, prompts included
    trained: float  # forward and backward, prompts included


def run_work(
    *,
    prompt_tokens: float,
    prompts: int,
    response_tokens: float,
    samples: int,
    probes: int,
    scorers: int,
    student_writes: bool,
    teacher_problems: int,
) -> Work:
    """Return the tokens of a run.

    `prompt_tokens` are those of all `prompts` together. Each response has `probes`, which go on from anywhere in it and
    so take half of its length on average. The teacher writes one response to each of `teacher_problems`, and scores it
    once.
    """
    responses = prompts * samples
    sequences = samples * prompt_tokens + responses * response_tokens
    mean_prompt = prompt_tokens / max(1, prompts)
    scored = teacher_problems * (mean_prompt + response_tokens) if teacher_problems else sequences
    return Work(
        prompt=samples * prompt_tokens if student_writes else 0.0,
        rollout=responses * response_tokens if student_writes else 0.0,
        probe=responses * probes * response_tokens / 2,
        teacher_written=teacher_problems * response_tokens,
        scored=scorers * scored,
        trained=sequences,
    )


def decoding_s(
    tokens: float, size: ModelSize, *, at_once: float, context_tokens: float, servers: int, gpu: Gpu
) -> float:
    """Return the seconds to generate `tokens`.

    Each step reads the weights and every sequence's keys and values once, in 16 bits.
    """
    step_s = (2 * size.parameters + at_once * context_tokens * size.cache_bytes_per_token) / (
        DECODING_SHARE * gpu.bytes_per_s
    )
    return tokens / (at_once * servers) * step_s


def scoring_s(tokens: float, size: ModelSize, *, servers: int, gpu: Gpu) -> float:
    """Return the seconds to score `tokens`, at 2 operations per parameter and token."""
    return 2 * size.parameters * tokens / (SCORING_SHARE * gpu.operations_per_s * servers)


def training_s(
    sequences: float,
    size: ModelSize,
    *,
    prompt_tokens: float,
    response_tokens: float,
    ranks: int,
    lora: LoraConfig | None,
    recomputes_behavior: bool,
    recomputed_layers: int,
    gpu: Gpu,
) -> float:
    """Return the seconds to train on sequences of a prompt and a response of these mean lengths.

    The arithmetic is that of the metric `perf/mfu`, and that of layers that are computed again in the backward pass.
    """
    length, rows = round(prompt_tokens + response_tokens), round(response_tokens)
    needed = training_operations(size, [length], rows, lora=lora, recomputes_behavior=recomputes_behavior)
    again = recomputed_layers / size.layers * forward_operations(size, [length], 0, lora)
    return sequences * (needed + again) / (TRAINING_SHARE * gpu.operations_per_s * ranks)
