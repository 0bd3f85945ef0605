"""Computes what fits: bytes of a student's checkpoints and published weights, and what ranks and servers keep on GPUs.

It is pure arithmetic from sizes of models and settings of a run. It looks at no machine, and asks no disk how much is
free. The trainer's ranks are on devices 0, 1, ... Each holds the whole student, or its part if the student is sharded.
What the local engine or servers elsewhere take is not known here. docs/paper.md (The estimate) has the sources.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spot_async.config import Config, LoraConfig, SamplingConfig, TrainingConfig
from spot_async.errors import DataError
from spot_async.models.adapter_files import adapted_weights
from spot_async.models.model_size import ModelSize, Precision
from spot_async.models.weight_files import weight_shapes

GIB = float(1 << 30)
USABLE_SHARE = 0.95  # of a device; the rest is for gaps of the allocator, the driver, and what is not counted here
CARDS_GIB = (24.0, 48.0, 80.0, 141.0)  # of GPUs that people have
CONTEXT_GIB = 0.8  # of each process on a device: CUDA, libraries, NCCL
GRAPHS_GIB = 1.2  # of a server, also while it sleeps: CUDA graphs, which lie outside what it frees
ACTIVATIONS_GIB = 1.0  # of a server, besides weights and cache
ASLEEP_GIB = CONTEXT_GIB + GRAPHS_GIB
WORKSPACE_GIB = ASLEEP_GIB + ACTIVATIONS_GIB
BLOCKS_GIB = 1.0  # the trainer's blocks of logits: 256 MiB, a few copies at once
STATE_BYTES = {"weights": 4, "gradients": 4, "optimiser": 8}  # per parameter, in float32; AdamW has two moments
COPY_BYTES = 4  # likewise of each copy of what is trained, for a teacher that follows the student
ADAPTER_BYTES = 4  # of each of an adapter's numbers where it is published
GATHERED_LAYERS = 2  # a sharded trainer holds the layer that computes and the next one, which comes in meanwhile
WHOLE_KEPT = 2  # published directories that are whole, where most have an adapter alone


@dataclass(frozen=True)
class Parameters:
    """How many numbers a student has, and how many of them its adapters."""

    model: int
    adapter: int  # 0 without LoRA

    @classmethod
    def of(cls, student: Path, lora: LoraConfig | None) -> Parameters | None:
        """Count them by the headers of a student's weights; return None if these are no safetensors."""
        try:
            shapes = weight_shapes(student)
        except DataError:
            return None
        adapter = 0 if lora is None else lora.rank * sum(map(sum, adapted_weights(shapes, lora).values()))
        return cls(sum(map(math.prod, shapes.values())), adapter)

    def checkpoint_bytes(self, copies: int = 0) -> int:
        """Return what a checkpoint takes: weights and moments of what is trained, and `copies` of that."""
        of_each = STATE_BYTES["weights"] + STATE_BYTES["optimiser"] + COPY_BYTES * copies
        return of_each * (self.adapter or self.model)

    def published_bytes(self, training: TrainingConfig) -> int:
        """Return what a student takes that is published whole, with its adapter beside it."""
        return _width(training) * self.model + ADAPTER_BYTES * self.adapter

    def kept_bytes(self, config: Config, iterations: int) -> int:
        """Return the bytes of all published weights that are kept at once, with those that are being written."""
        kept = config.training.under_staleness(config.max_staleness).keep_weights
        whole = self.published_bytes(config.training)
        if merged_every(config) == 1:
            return whole * min(iterations, kept + 1)
        return whole * min(iterations, WHOLE_KEPT + 1) + ADAPTER_BYTES * self.adapter * min(iterations, kept)


def merged_every(config: Config) -> int:
    """Return after how many iterations the whole student is published, besides those of a checkpoint (0: never).

    Servers that take adapters do not need it. Evaluations do, since they keep the best student. Without checkpoints it
    is written each time, or a kill would lose it.
    """
    if not config.all_take_adapters or config.training.checkpoint_every == 0:
        return 1
    return config.evaluation.eval_every if config.evaluation is not None else 0


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
    student: ModelSize, training: TrainingConfig, *, longest_tokens: int, copies: int = 0
) -> TrainerMemory:
    """Return what one of the trainer's ranks needs. With LoRA activations are counted as without: a little too much.

    `copies` of what is trained lie beside the moments, for teachers that follow the student.
    `longest_tokens` matters since a sequence longer than a micro-batch is one by itself. What `training.offload` moves
    takes nothing of the device: moments that come for the step come one parameter's at a time, when there are no
    activations.
    """
    is_packed = training.packing is not False  # the architectures that are known can be
    is_bfloat16, lora = training.dtype == "bfloat16", training.lora
    shards = training.ranks if training.sharding == "fsdp2" else None  # None: each rank holds the whole student
    tokens = max(training.tokens_per_pass(is_packed=is_packed), longest_tokens)
    width = _width(training)
    trained, frozen, trained_of_layer = student.parameters, 0, student.layer_parameters
    if lora is not None:
        trained_of_layer = student.adapter_parameters(lora)
        trained, frozen = student.layers * trained_of_layer, student.parameters
    sizes = {**STATE_BYTES, "optimiser": STATE_BYTES["optimiser"] + COPY_BYTES * copies}
    state = {name: size * trained / (shards or 1) / GIB for name, size in sizes.items()}
    state["weights"] += width * frozen / (shards or 1) / GIB
    trained_outside = 0 if lora is not None else student.outer_parameters
    if shards is not None:
        # Gradients are whole before they are summed over ranks: those of the outer parameters and of a layer, with
        # float32 copies.
        gathered = student.outer_parameters + GATHERED_LAYERS * student.layer_parameters
        computed_with = width * gathered + (width + 4) * (trained_outside + trained_of_layer)
    else:
        computed_with = width * trained if is_bfloat16 else 0
    precision: Precision = "float32" if not is_bfloat16 else "autocast" if shards is None else "bfloat16"
    per_token = student.activation_bytes_per_token(
        precision, recomputed_layers=training.recomputed_layers(student.layers), is_packed=is_packed
    )
    moved = {"none": [], "optimizer": ["optimiser"], "all": list(state)}[training.offload]
    on_cpu = sum(state.pop(name) for name in moved)
    return TrainerMemory(
        **state,
        **dict.fromkeys(moved, 0.0),
        copies=computed_with / GIB,
        activations=tokens * per_token / GIB,
        logits=BLOCKS_GIB + (4 * student.vocabulary * student.hidden / GIB if lora is None and shards is None else 0.0),
        on_cpu=on_cpu,
    )


def _width(training: TrainingConfig) -> int:
    """Return the bytes of a number that is computed with and published."""
    return 2 if training.dtype == "bfloat16" else 4


@dataclass(frozen=True)
class ServerOnDevice:
    """A server's part of one device."""

    role: str
    name: str
    device: int
    device_gib: float
    fraction: float  # of the device: what it takes in all
    taken_gib: float  # what it takes besides its cache: weights and workspace
    token_bytes: float  # what its cache takes for one token
    sleeps: bool  # whether it sleeps while the trainer trains
    shares_time: bool = False  # whether it sleeps while others of its kind answer

    @property
    def gib(self) -> float:
        return self.fraction * self.device_gib

    @property
    def cache_gib(self) -> float:
        return self.gib - self.taken_gib

    @property
    def cache_tokens(self) -> float:
        """How many tokens' keys and values it holds at once."""
        return max(0.0, self.cache_gib * GIB / self.token_bytes)


def taken_together_gib(servers: Sequence[ServerOnDevice], *, training: bool = False) -> float:
    """Return what servers take of their device at once. Of those that share its time one is awake."""
    taken = [(ASLEEP_GIB if training and each.sleeps else each.gib, each.shares_time) for each in servers]
    awake_gib = max((gib - ASLEEP_GIB for gib, shares_time in taken if shares_time), default=0.0)
    return sum(ASLEEP_GIB if shares_time else gib for gib, shares_time in taken) + awake_gib


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


def per_device(servers: Sequence[ServerOnDevice], trainer: TrainerMemory, ranks: int) -> list[DeviceMemory]:
    """Return what each device holds, for all devices with a server or a rank."""
    found = []
    for device in sorted({each.device for each in servers} | set(range(ranks))):
        here = [each for each in servers if each.device == device]
        has_rank = device < ranks
        found.append(
            DeviceMemory(
                device,
                sampling=taken_together_gib(here) + has_rank * trainer.resting,
                training=taken_together_gib(here, training=True) + has_rank * trainer.training,
                size=servers[0].device_gib,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """What servers and trainer keep on the devices of one machine."""

    student: ModelSize
    training: TrainingConfig  # with the ranks of this machine
    sampling: SamplingConfig
    context_tokens: int  # that the student takes at most
    servers: Sequence[ServerOnDevice]  # empty if the run starts none on a numbered GPU
    ranks: int  # that are on GPUs
    order: Sequence[str] = ()  # of starting, a line for each device that is shared
    copies: int = 0  # of what is trained, for teachers that follow the student

    def rank(self, longest_tokens: int | None = None) -> TrainerMemory:
        """Return what one of the ranks needs for sequences of so many tokens, by default the longest there may be."""
        longest = longest_tokens or self.sampling.longest_sequence
        return trainer_memory(self.student, self.training, longest_tokens=longest, copies=self.copies)

    @property
    def devices(self) -> list[DeviceMemory]:
        return per_device(self.servers, self.rank(), self.ranks) if self.servers else []

    @property
    def longest_responses(self) -> dict[float, int]:
        """The longest response that fits, by the memory of a device in GiB: of cards that people have, and of these."""
        return {card: self.longest_response(card) for card in sorted({*CARDS_GIB, self.servers[0].device_gib})}

    def longest_response(self, card_gib: float) -> int:
        """Return the tokens of the longest response that each server's cache holds, and that fits to be trained on.

        It and a prompt are at most what the student takes. 0 if not even one token fits.
        """
        prompt_tokens = self.sampling.max_prompt_tokens
        servers = [replace(each, device_gib=card_gib) for each in self.servers]

        def is_too_long(response: int) -> bool:
            longest = prompt_tokens + response
            devices = per_device(servers, self.rank(longest), self.ranks)
            return any(each.cache_tokens < longest for each in servers) or any(
                each.training > each.usable for each in devices
            )

        most = max(0, self.context_tokens - prompt_tokens)
        return bisect_left(range(1, most + 1), True, key=is_too_long)

    def misfits(self) -> list[str]:
        """Return a line for each kind of server or device that has too little; those alike share one."""
        cramped: dict[str, list[int]] = {}
        for server in self.servers:
            if (words := self._lack_of_cache(server)) is not None:
                cramped.setdefault(f"{server.role}'s server has {words}", []).append(server.device)
        alike: dict[str, list[int]] = {}
        for each in self.devices:
            if not each.fits:
                needed = f"{max(each.sampling, each.training):.0f} GiB, and {each.usable:.0f} are safe"
                alike.setdefault(f"{needed}: {', or '.join(self._remedies(each))}", []).append(each.device)
        return [f"on {named(devices)} the {line}" for line, devices in cramped.items()] + [
            f"{named(devices)} would {'each ' if len(devices) > 1 else ''}need {line}"
            for line, devices in alike.items()
        ]

    def _lack_of_cache(self, server: ServerOnDevice) -> str | None:
        if server.cache_gib <= 0:
            return (
                f"{server.gib:.1f} GiB, and its weights and workspace take {server.gib - server.cache_gib:.1f}: raise "
                "its memory_fraction"
            )
        if server.cache_tokens < self.sampling.longest_sequence:
            return (
                f"a cache of {server.cache_tokens:.0f} tokens, and a prompt with its response may have "
                f"{self.sampling.longest_sequence}: raise its memory_fraction, or lower sampling.max_response_tokens"
            )
        return None

    def _remedies(self, device: DeviceMemory) -> Iterator[str]:
        training = self.training
        if device.device < training.ranks:  # a trainer's rank is on it
            if training.sharding == "none" and training.ranks > 1:
                yield "set training.sharding=fsdp2"
            if training.offload == "none":
                yield "set training.offload=optimizer"
            if device.training > device.usable and training.recompute_layers is not True:
                yield "set training.recompute_layers=true"
            if device.training > device.usable:
                yield "lower training.micro_batch_tokens"
        yield "lower a memory_fraction"


def named(devices: Sequence[int]) -> str:
    return f"{'devices' if len(devices) > 1 else 'device'} {', '.join(map(str, devices))}"
