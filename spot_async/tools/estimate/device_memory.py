"""Estimates what a run keeps on each GPU while it samples and while it trains. It measures nothing.

The trainer's ranks are on devices 0, 1, ... Each holds the whole student, or its part if the student is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spot_async.checks.device_shares import CONTEXT_GIB, GIB, ServerOnDevice
from spot_async.config import LoraConfig
from spot_async.config.training import TARGETS
from spot_async.models.model_size import ModelSize, Precision

USABLE_SHARE = 0.95  # the rest is for gaps of the allocator, the driver, and what is not counted here
BLOCKS_GIB = 1.0  # the trainer's blocks of logits: 256 MiB, a few copies at once
STATE_BYTES = {"weights": 4, "gradients": 4, "optimiser": 8}  # per parameter, in float32; AdamW has two moments
Offload = Literal["none", "optimizer", "all"]  # as `training.offload`
GATHERED_LAYERS = 2  # a sharded trainer holds the layer that computes and the next one, which comes in meanwhile


@dataclass(frozen=True)
class TrainerMemory:
    """What one trainer rank needs, in GiB."""

    weights: float
    gradients: float
    optimiser: float
    # What it computes with: all weights in bfloat16 or, if sharded, gathered layers and gradients to sum.
    copies: float
    activations: float  # of one forward pass
    # Blocks of them, and the output layer's gradient, which is summed over blocks in float32. If sharded, that is over
    # before the outer parameters' gradients are summed over ranks, which `copies` counts.
    logits: float
    on_cpu: float = 0.0  # what rests in the CPU's memory instead

    @property
    def resting(self) -> float:
        return self.weights + self.gradients + self.optimiser + CONTEXT_GIB

    @property
    def training(self) -> float:
        return self.resting + self.copies + self.activations + self.logits


def trainer_memory(
    student: ModelSize,
    *,
    micro_batch_tokens: int,
    longest_tokens: int,
    is_bfloat16: bool,
    shards: int | None = None,
    recomputed_layers: int = 0,
    is_packed: bool = False,
    lora: LoraConfig | None = None,
    offload: Offload = "none",
) -> TrainerMemory:
    """Return what one trainer rank needs. With `lora` activations are counted as without, which is a little too much.

    `longest_tokens` matters since a sequence longer than `micro_batch_tokens` is a micro-batch by itself. `shards` is
    how many ranks hold a part each; None if each holds the whole student. What `offload` moves takes nothing of the
    device: moments that come for the step come one parameter's at a time, when there are no activations.
    """
    tokens = max(micro_batch_tokens, longest_tokens)
    width = 2 if is_bfloat16 else 4
    trained, frozen, trained_of_layer = student.parameters, 0, student.layer_parameters
    if lora is not None:
        trained_of_layer = student.adapter_parameters(lora.rank, TARGETS[lora.targets])
        trained, frozen = student.layers * trained_of_layer, student.parameters
    state = {name: size * trained / (shards or 1) / GIB for name, size in STATE_BYTES.items()}
    state["weights"] += width * frozen / (shards or 1) / GIB
    trained_outside = 0 if lora is not None else student.outer_parameters
    if shards is not None:
        # Gradients are whole before they are summed over ranks: those of the outer parameters and of a layer, with
        # float32 copies.
        gathered = student.outer_parameters + GATHERED_LAYERS * student.layer_parameters
        copies = width * gathered + (width + 4) * (trained_outside + trained_of_layer)
    else:
        copies = width * trained if is_bfloat16 else 0
    precision: Precision = "float32" if not is_bfloat16 else "autocast" if shards is None else "bfloat16"
    per_token = student.activation_bytes_per_token(precision, recomputed_layers=recomputed_layers, is_packed=is_packed)
    moved = [name for name in state if offload == "all" or (offload == "optimizer" and name == "optimiser")]
    on_cpu = sum(state.pop(name) for name in moved)
    return TrainerMemory(
        **state,
        **dict.fromkeys(moved, 0.0),
        copies=copies / GIB,
        activations=tokens * per_token / GIB,
        logits=BLOCKS_GIB + (4 * student.vocabulary * student.hidden / GIB if lora is None and shards is None else 0.0),
        on_cpu=on_cpu,
    )


@dataclass(frozen=True)
class DeviceMemory:
    """What one device holds, in GiB."""

    device: int
    sampling: float
    training: float
    size: float

    @property
    def usable(self) -> float:
        return USABLE_SHARE * self.size

    @property
    def fits(self) -> bool:
        return max(self.sampling, self.training) <= self.usable


def per_device(
    servers: Sequence[ServerOnDevice], trainer: TrainerMemory, ranks: int, device_gib: float
) -> list[DeviceMemory]:
    """Return what each device holds, for all devices with a server or a rank."""
    found = []
    for device in sorted({each.device for each in servers} | set(range(ranks))):
        here = [each for each in servers if each.device == device]
        has_rank = device < ranks
        found.append(
            DeviceMemory(
                device,
                sampling=sum(each.gib for each in here) + has_rank * trainer.resting,
                training=sum(each.asleep_gib for each in here) + has_rank * trainer.training,
                size=device_gib,
            )
        )
    return found
