"""Estimates what a run keeps on each GPU while it samples and while it trains. It measures nothing.

The trainer's ranks are on devices 0, 1, ... Each holds the whole student, or its part if the student is sharded. What
the local engine or servers elsewhere take is not known here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spot_async.checks.device_shares import (
    CONTEXT_GIB,
    GIB,
    ServerOnDevice,
    device_gib,
    named,
    servers_on_devices,
    starting_order,
    taken_together_gib,
    taking_turns,
)
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config, TrainingConfig
from spot_async.config.training import TARGETS
from spot_async.models.model_size import ModelSize, Precision, read_size

USABLE_SHARE = 0.95  # the rest is for gaps of the allocator, the driver, and what is not counted here
BLOCKS_GIB = 1.0  # the trainer's blocks of logits: 256 MiB, a few copies at once
STATE_BYTES = {"weights": 4, "gradients": 4, "optimiser": 8}  # per parameter, in float32; AdamW has two moments
GATHERED_LAYERS = 2  # a sharded trainer holds the layer that computes and the next one, which comes in meanwhile
CARDS_GIB = (24.0, 48.0, 80.0, 141.0)  # of GPUs that people have


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
    width = 2 if is_bfloat16 else 4
    trained, frozen, trained_of_layer = student.parameters, 0, student.layer_parameters
    if lora is not None:
        trained_of_layer = student.adapter_parameters(lora.rank, TARGETS[lora.targets])
        trained, frozen = student.layers * trained_of_layer, student.parameters
    sizes = {**STATE_BYTES, "optimiser": STATE_BYTES["optimiser"] + 4 * copies}
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
                sampling=taken_together_gib(here) + has_rank * trainer.resting,
                training=taken_together_gib(here, training=True) + has_rank * trainer.training,
                size=device_gib,
            )
        )
    return found


@dataclass(frozen=True)
class MachineMemory:
    """What servers and trainer keep on the devices of one machine."""

    training: TrainingConfig  # with the ranks of this machine
    devices: list[DeviceMemory]
    servers: list[ServerOnDevice]
    order: list[str]  # of starting, a line for each device that is shared
    longest_tokens: int  # of a prompt with its response
    longest_response_tokens: dict[float, int]  # that fits, by the memory of a device in GiB; 0: none


def machine_memory(config: Config, plan: TrainPlan, *, nodes: int = 1) -> MachineMemory | None:
    """Return what one of `nodes` machines keeps; None if the run starts no server on a numbered GPU.

    None too for a student whose architecture is unknown.
    """
    student = read_size(plan.student.directory)
    total_gib = device_gib(config.cluster, plan.served)
    servers = servers_on_devices(plan.served, total_gib)
    if student is None or not servers:
        return None
    # What is on this one of the nodes, each of which has a whole student.
    training = config.training.model_copy(update={"ranks": config.training.ranks // nodes})
    ranks = 0 if training.device == "cpu" else training.ranks
    longest_tokens = config.sampling.max_prompt_tokens + config.sampling.max_response_tokens
    trainer = trainer_memory(student, training, longest_tokens=longest_tokens, copies=config.copies)
    return MachineMemory(
        training=training,
        devices=per_device(servers, trainer, ranks, total_gib),
        servers=servers,
        order=taking_turns(starting_order(plan.served, ranks)),
        longest_tokens=longest_tokens,
        longest_response_tokens={
            card: longest_response(
                student,
                training,
                [replace(each, device_gib=card) for each in servers],
                ranks=ranks,
                prompt_tokens=config.sampling.max_prompt_tokens,
                context_tokens=plan.student.max_context_tokens,
                copies=config.copies,
            )
            for card in sorted({*CARDS_GIB, total_gib})
        },
    )


def longest_response(
    student: ModelSize,
    training: TrainingConfig,
    servers: Sequence[ServerOnDevice],
    *,
    ranks: int,
    prompt_tokens: int,
    context_tokens: int,
    copies: int = 0,
) -> int:
    """Return the tokens of the longest response that each server's cache holds, and that fits when it is trained on.

    `ranks` of the trainer share devices with the servers. `prompt_tokens` come before the response, and both are at
    most `context_tokens`. 0 if not even one token fits.
    """
    card = servers[0].device_gib

    def fits(response: int) -> bool:
        longest = prompt_tokens + response
        rank = trainer_memory(student, training, longest_tokens=longest, copies=copies)
        return all(each.cache_tokens >= longest for each in servers) and all(
            each.training <= each.usable for each in per_device(servers, rank, ranks, card)
        )

    most = max(0, context_tokens - prompt_tokens)
    return bisect_left(range(1, most + 1), True, key=lambda response: not fits(response))


def misfits(memory: MachineMemory) -> list[str]:
    """Return a line for each kind of server or device that has too little; devices with the same need share a line."""
    alike: dict[str, list[int]] = {}
    for each in memory.devices:
        if not each.fits:
            needed = f"{max(each.sampling, each.training):.0f} GiB, and {each.usable:.0f} are safe"
            alike.setdefault(f"{needed}: {', or '.join(_remedies(each, memory.training))}", []).append(each.device)
    cramped: dict[str, list[int]] = {}
    for server in memory.servers:
        if server.cache_gib <= 0:
            words = (
                f"{server.gib:.1f} GiB, and its weights and workspace take {server.gib - server.cache_gib:.1f}: raise "
                "its memory_fraction"
            )
            cramped.setdefault(f"{server.role}'s server has {words}", []).append(server.device)
        elif server.cache_tokens < memory.longest_tokens:
            words = (
                f"a cache of {server.cache_tokens:.0f} tokens, and a prompt with its response may have "
                f"{memory.longest_tokens}: raise its memory_fraction, or lower sampling.max_response_tokens"
            )
            cramped.setdefault(f"{server.role}'s server has {words}", []).append(server.device)
    return [f"on {named(devices)} the {line}" for line, devices in cramped.items()] + [
        f"{named(devices)} would {'each ' if len(devices) > 1 else ''}need {line}" for line, devices in alike.items()
    ]


def _remedies(device: DeviceMemory, training: TrainingConfig) -> Iterator[str]:
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
