"""What a run keeps on each GPU while it samples and while it trains. Estimates from sizes; nothing is measured here.

The trainer's ranks are on devices 0, 1, ...; each holds the whole student, or its part where the student is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spot_async.tools.estimate.model_size import ModelSize, Precision

GIB = float(1 << 30)
DEVICE_GIB = 80.0  # of the GPUs that the recipes are for
USABLE_GIB = 0.95 * DEVICE_GIB  # the allocator's gaps, the driver and what is not counted here have the rest
CONTEXT_GIB = 0.8  # of a process on a device: CUDA, libraries, NCCL
WORKSPACE_GIB = 2.0  # of a server beside weights and cache: activations, graphs
LOGITS_GIB = 1.0  # the trainer's blocks of logits: 256 MiB, a few copies at once
STATE_BYTES = {"weights": 4, "gradients": 4, "optimiser": 8}  # a parameter, in float32: AdamW has two moments
GATHERED_LAYERS = 2  # while a sharded trainer computes: this layer and the next one, which comes in meanwhile


@dataclass(frozen=True)
class TrainerMemory:
    """What one trainer rank needs, GiB."""

    weights: float
    gradients: float
    optimiser: float
    copies: float  # to compute with: all in bfloat16; or those gathered from other ranks, and gradients to sum
    activations: float  # of one forward pass

    @property
    def resting(self) -> float:
        return self.weights + self.gradients + self.optimiser + CONTEXT_GIB

    @property
    def training(self) -> float:
        return self.resting + self.copies + self.activations + LOGITS_GIB


def trainer_memory(
    student: ModelSize,
    *,
    micro_batch_tokens: int,
    longest_tokens: int,
    is_bfloat16: bool,
    shards: int | None = None,
    is_recomputed: bool = False,
) -> TrainerMemory:
    """`longest_tokens`: a sequence longer than a micro-batch is one by itself.

    `shards`: ranks that hold a part each; None where each holds the whole student.
    """
    tokens = max(micro_batch_tokens, longest_tokens)
    state = {name: size * student.parameters / (shards or 1) / GIB for name, size in STATE_BYTES.items()}
    width = 2 if is_bfloat16 else 4
    if shards is not None:
        # Whole gradients, of the outer parameters and of a layer, and the float32 copies that are summed over ranks.
        gathered = student.outer_parameters + GATHERED_LAYERS * student.layer_parameters
        copies = width * gathered + (width + 4) * (student.outer_parameters + student.layer_parameters)
    else:
        copies = width * student.parameters if is_bfloat16 else 0
    precision: Precision = "float32" if not is_bfloat16 else "autocast" if shards is None else "bfloat16"
    per_token = student.activation_bytes_per_token(precision, is_recomputed=is_recomputed)
    return TrainerMemory(**state, copies=copies / GIB, activations=tokens * per_token / GIB)


@dataclass(frozen=True)
class ServerOnDevice:
    """A server's part of one device."""

    role: str
    device: int
    gib: float  # that it takes: its share of the device
    cache_gib: float  # of that, for keys and values
    sleeps: bool  # while the trainer trains


def server_on(
    role: str, device: int, size: ModelSize, *, memory_fraction: float, parallel: int, sleeps: bool
) -> ServerOnDevice:
    """`parallel` devices share the model, in 16 bits."""
    taken = memory_fraction * DEVICE_GIB
    return ServerOnDevice(role, device, taken, taken - 2 * size.parameters / parallel / GIB - WORKSPACE_GIB, sleeps)


@dataclass(frozen=True)
class DeviceMemory:
    """What one device holds, GiB."""

    device: int
    sampling: float
    training: float

    @property
    def fits(self) -> bool:
        return max(self.sampling, self.training) <= USABLE_GIB


def per_device(servers: Sequence[ServerOnDevice], trainer: TrainerMemory, ranks: int) -> list[DeviceMemory]:
    """What every device holds that a server or a rank is on."""
    found = []
    for device in sorted({each.device for each in servers} | set(range(ranks))):
        here = [each for each in servers if each.device == device]
        has_rank = device < ranks
        found.append(
            DeviceMemory(
                device,
                sampling=sum(each.gib for each in here) + has_rank * trainer.resting,
                training=sum(CONTEXT_GIB if each.sleeps else each.gib for each in here) + has_rank * trainer.training,
            )
        )
    return found
