"""Computes how many tokens a run samples, scores and trains, and how long that takes at assumed speeds. Pure.

Times are for planning. The speeds are those of a GPU's data sheet, times the share that programs usually reach. Work
that overlaps in a run is counted as if it did not.
"""

from __future__ import annotations

from dataclasses import dataclass

from spot_async.base.processes.gpus import Gpu
from spot_async.models.model_size import ModelSize

TRAINING_SHARE = 0.3  # of the operations per second, with padding and without fused kernels
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
    tokens: float, size: ModelSize, *, ranks: int, recomputes_behavior: bool, recomputed_layers: int, gpu: Gpu
) -> float:
    """Return the seconds to train on `tokens`, at 6 operations per parameter and token.

    Recomputing the behaviour policy takes 2 more, and recomputing all layers in the backward pass another 2.
    """
    operations = 6 + 2 * recomputes_behavior + 2 * recomputed_layers / size.layers
    return operations * size.parameters * tokens / (TRAINING_SHARE * gpu.operations_per_s * ranks)
