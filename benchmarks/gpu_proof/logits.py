"""E5: how exact the trainer's log-probabilities are on the device, and what blocks of logits take."""

from __future__ import annotations

import time

import torch
from gpu_training import GIB, empty_cache, settings_of, synchronize, trainer_of, trajectories
from qwen3_models import SHAPES, vocabulary_of
from torch import Tensor

from gpu_proof.place import Place, Rows
from spot_async.trainer.batching import collate
from spot_async.trainer.model import Block, selected_logprobs

EXACT_ROWS = 128  # whose logits exist in float64
SIZES = (1 << 26, 1 << 27, 1 << 28)  # logits of a block
PACKED = 6  # trajectories


def exactness(place: Place) -> Rows:
    """Log-probabilities and gradients of the trainer's own function, and of a head in 16 bits, beside float64."""
    hidden, weight, ids = _problem(place, EXACT_ROWS)
    exact = _by_autograd(hidden.double(), weight.double(), ids)
    ways = {
        "the trainer's, weights in bfloat16": (selected, weight, False),
        "the trainer's, weights in float32 under autocast": (selected, weight.float(), True),
        "logits rounded to bfloat16": (_by_autograd, weight, False),
    }
    for what, (way, factor, is_cast) in ways.items():
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=is_cast):
            logprobs, *gradients = way(hidden, factor, ids)
        gap = (logprobs.double() - exact[0]).abs()
        errors = [_relative(each, right) for each, right in zip(gradients, exact[1:], strict=True)]
        yield {
            "what": what,
            "nats_mean": float(gap.mean()),
            "nats_at_most": float(gap.max()),
            "gradient_error": max(errors),
        }


def blocks(place: Place) -> Rows:
    """Seconds and memory of one forward and backward pass over a micro-batch's rows."""
    hidden, weight, ids = _problem(place, 64 if place.is_tiny else 8192)
    device = hidden.device
    for logits in SIZES:
        # Tiny shapes have so few logits that each size gets its number of blocks from the largest.
        rows = len(hidden) * logits // SIZES[-1] if place.is_tiny else logits // len(weight)
        selected(hidden, weight, ids, rows)
        empty_cache(device)
        synchronize(device)
        before = _held(device)
        started = time.perf_counter()
        selected(hidden, weight, ids, rows)
        synchronize(device)
        yield {
            "what": f"1<<{logits.bit_length() - 1} logits",
            "rows_of_block": rows,
            "seconds": time.perf_counter() - started,
            "peak_gib": _peak(device) - before,
        }


@torch.no_grad()
def packings(place: Place) -> Rows:
    """Differences between log-probabilities of the same trajectories: each alone, in other rows, and padded."""
    size = place.size("0.6b")
    keys = {**place.keys, "packing": True, "behavior": "served"}
    samples = trajectories(0, size, PACKED)
    with trainer_of(settings_of(size, keys, place.with_models(), PACKED)) as trainer:
        device = next(trainer.model.parameters()).device

        def logprobs(of: tuple[int, ...], *, is_packed: bool) -> dict[int, Tensor]:
            chosen = [samples[each] for each in of]
            batch = collate(chosen, is_packed=is_packed).to(device)
            sampled, *_ = trainer.losses.response_logprobs(batch.without_soft_targets())
            found = batch.in_places(sampled)
            return {each: found[row, : len(samples[each].response_ids)] for row, each in enumerate(of)}

        whole = logprobs(tuple(range(PACKED)), is_packed=True)
        alone = {each: logprobs((each,), is_packed=True)[each] for each in range(PACKED)}
        padded = {k: v for of in ((0, 1), (2, 3), (4, 5)) for k, v in logprobs(of, is_packed=False).items()}
        again = logprobs(tuple(range(PACKED)), is_packed=True)
    for what, other in (("each alone", alone), ("padded, two a pass", padded), ("the same once more", again)):
        gaps = torch.cat([(whole[each] - other[each]).abs().double() for each in range(PACKED)])
        yield {
            "what": f"all in one row beside {what}",
            "nats_mean": float(gaps.mean()),
            "nats_999": float(gaps.quantile(0.999)),
            "nats_largest": float(gaps.max()),
            "tokens": len(gaps),
        }


def selected(hidden: Tensor, weight: Tensor, ids: Tensor, rows: int = EXACT_ROWS) -> tuple[Tensor, ...]:
    """Return log-probabilities by the trainer's function, in blocks of so many rows, and their sum's gradients."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    starts = range(0, len(hidden), rows)
    own = [
        Block(
            at,
            min(at + rows, len(hidden)),
            torch.arange(min(rows, len(hidden) - at), device=ids.device),
            ids[at : at + rows],
        )
        for at in starts
    ]
    found = torch.cat([each for each, *_ in selected_logprobs(hidden, weight, None, own, 1.0)])
    return (found.detach(), *torch.autograd.grad(found.sum(), [hidden, weight]))


def _by_autograd(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """The same, with logits in the factors' own type."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    found = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return (found.detach(), *torch.autograd.grad(found.sum(), [hidden, weight]))


def _problem(place: Place, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states and an output layer in bfloat16, whose logits spread as a model's do, and tokens."""
    size = place.size("0.6b")
    width, vocabulary = SHAPES[size][0], vocabulary_of(size)
    generator = torch.Generator(place.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=place.device)

    weight = normal(vocabulary, width) * (3.0 / width**0.5)
    ids = torch.randint(0, vocabulary, (rows,), generator=generator, device=place.device)
    # Towards its own token: logits of 16 and more, where bfloat16 is coarse.
    hidden = normal(rows, width) + 2.0 * weight[ids]
    return hidden.bfloat16(), weight.bfloat16(), ids


def _relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).norm() / right.norm())


def _held(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / GIB


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
