"""How many tokens a run samples, scores and trains, and how long that takes at assumed speeds. Pure.

Times are for planning: the speeds are a GPU's data sheet times what programs usually reach of it, and a batch's last
response is waited for. What overlaps is counted one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from spot_async.tools.estimate.model_size import ModelSize

# NVIDIA A800 and A100, 80 GB (data sheet): dense bfloat16 operations and memory bytes per second.
OPERATIONS_PER_S = 312e12
BYTES_PER_S = 2.0e12
TRAINING_SHARE = 0.3  # of the operations, with padding and without fused kernels
SCORING_SHARE = 0.4
DECODING_SHARE = 0.5  # of the bandwidth


@dataclass(frozen=True)
class Work:
    """Over a whole run, tokens."""

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
    """`probes` a response go on from anywhere in it, half of its length on average; `prompt_tokens` of all prompts.

    `teacher_problems` are those that the teacher writes a response to: once each, and then scores once each.
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


def decoding_s(tokens: float, size: ModelSize, *, at_once: float, context_tokens: float, servers: int) -> float:
    """Each step reads the weights once, and every sequence's keys and values, in 16 bits."""
    step_s = (2 * size.parameters + at_once * context_tokens * size.cache_bytes_per_token) / (
        DECODING_SHARE * BYTES_PER_S
    )
    return tokens / (at_once * servers) * step_s


def scoring_s(tokens: float, size: ModelSize, *, servers: int) -> float:
    """2 operations a parameter and token."""
    return 2 * size.parameters * tokens / (SCORING_SHARE * OPERATIONS_PER_S * servers)


def training_s(
    tokens: float, size: ModelSize, *, ranks: int, recomputes_behavior: bool, recomputes_layers: bool
) -> float:
    """6 operations a parameter and token, 2 more for the behaviour policy's forward pass, 2 more for layers' again."""
    operations = 6 + 2 * recomputes_behavior + 2 * recomputes_layers
    return operations * size.parameters * tokens / (TRAINING_SHARE * OPERATIONS_PER_S * ranks)
