"""E1, E2, E3 and E6's LoRA: updates of the trainer, their speed and memory, and what stays on the device after them."""

from __future__ import annotations

from typing import Any

import torch
from gpu_training import GIB, empty_cache, settings_of, train_once, trainer_of, trajectories

from gpu_proof.place import Place, Rows
from spot_async.trainer.messages import Batch

FEW = 8  # trajectories, where only memory or seconds of something else count


def update(place: Place, size: str, keys: dict[str, Any]) -> Rows:
    """Two updates; the second one's figures."""
    found = train_once(place.size(size), {**place.keys, **keys}, place.with_models())
    what = ", ".join([size, *(f"{key}={each}" for key, each in keys.items())])
    peak, estimate = found["peak_gib"], found["estimate_gib"]
    yield {
        "what": what,
        "tokens_per_s": found["tokens_per_s"],
        "mfu": found["mfu"],
        "peak_gib": peak,
        "estimate_gib": estimate,
        "peak_of_estimate": peak / estimate if peak is not None and estimate else None,
        **{key: found[key] for key in ("update_s", "publish_s", "loaded_s", "loss", "grad_norm", "attention")},
        "times_bound": found["update_s"] / found["bound_s"],
    }


def after_cache(place: Place, gives_back: bool) -> Rows:
    """What the device holds after each of two updates, once torch was told to give back its cache.

    A run that shares its devices drops gradients before. Without that they stay until the next update.
    """
    size = place.size("0.6b")
    settings = settings_of(size, place.keys, place.with_models(), FEW, shares_devices=gives_back)
    with trainer_of(settings) as trainer:
        for iteration in range(2):
            trainer.train(Batch(iteration, trajectories(iteration, size, FEW)))
            device = next(trainer.model.parameters()).device
            if not gives_back:
                empty_cache(device)
            allocated, reserved = held_gib(device)
            yield {
                "what": f"gradients {'given back' if gives_back else 'kept'}, update {iteration + 1}",
                "allocated_gib": allocated,
                "reserved_gib": reserved,
                "kept_gib": reserved - allocated,
            }


def held_gib(device: torch.device) -> tuple[float, float]:
    """Return what tensors take of a device, and what torch holds of it; zeros for a CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.memory_allocated(device) / GIB, torch.cuda.memory_reserved(device) / GIB
