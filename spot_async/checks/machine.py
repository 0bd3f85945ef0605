"""Says what this machine lacks for a run: weights, GPUs, cores, and room for checkpoints and weights.

It reads files and the environment, and starts nothing. A dry run may be on another machine than the run, so it only
warns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spot_async.base.processes.gpus import (
    GpuSoftware,
    gpu_count,
    has_instances,
    instance_refusal,
    named_gpus,
    torch_has_gpus,
    visible_gpus,
)
from spot_async.base.processes.private_directory import remove_abandoned
from spot_async.base.processes.resources import available_bytes, free_bytes, is_in_memory, usable_cores
from spot_async.base.text import counted, shown_size
from spot_async.base.writers import refuse_foreign_writers
from spot_async.checks.device_shares import device_names
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config, ModelConfig, TrainingConfig
from spot_async.errors import ConfigError, DataError
from spot_async.models.weight_files import weight_files


@dataclass(frozen=True)
class Machine:
    """What this machine has."""

    gpus: int | None  # None: not known
    visible: int | None  # to this command
    torch_has_gpus: bool
    cores: int
    named: Sequence[str] | None = None  # what CUDA_VISIBLE_DEVICES leaves to this command; None: all

    @classmethod
    def found(cls, environ: Mapping[str, str]) -> Machine:
        """Look at the machine that this process runs on."""
        gpus = gpu_count()
        visible = None if gpus is None else visible_gpus(environ, gpus)
        return cls(gpus, visible, torch_has_gpus(), usable_cores(), named_gpus(environ))


def training_warnings(
    config: Config, served: Mapping[str, ModelConfig], machine: Machine, *, nodes: int = 1
) -> list[str]:
    """Return what is missing for a training run of these models, of which this is one of `nodes` machines."""
    given = {role: model for role, model in served.items() if role == "student" or model is not config.student}
    lines = [line for role, model in given.items() for line in without_devices(role, model, machine)]
    if not lines and (refusal := without_gpu(config.training, served, machine)) is not None:
        lines = [refusal]
    return [*lines, *_of_ranks(config.training, machine, nodes)]


def gpu_need(training: TrainingConfig, served: Mapping[str, ModelConfig]) -> str | None:
    """Return why the trainer may not compute on the CPU; None if it may.

    Nobody means to train for hours on a CPU beside servers on GPUs, or in a type that a CPU computes slowly.
    """
    if training.device != "auto":
        return None if training.device == "cpu" else "training.device=cuda"
    for role, model in served.items():
        for key, device in (named for each in model.backend.servers() if each.runs_here for named in _named_by(each)):
            return f"{role}.backend.{key} names GPU {device}"
    return "training.dtype=bfloat16" if training.dtype == "bfloat16" else None


def without_gpu(training: TrainingConfig, served: Mapping[str, ModelConfig], machine: Machine) -> str | None:
    """Return why the trainer must not begin on this machine, if it certainly finds none of the GPUs that it needs."""
    need = gpu_need(training, served)
    finds_none = machine.visible == 0 or not machine.torch_has_gpus
    if need is not None and finds_none:
        return GpuSoftware.found().refusal(need)
    on_instance = machine.named is not None and has_instances(machine.named) and training.device != "cpu"
    return instance_refusal(training.ranks) if on_instance and training.ranks > 1 else None


def trains_on_gpus(training: TrainingConfig, machine: Machine) -> bool:
    """Return whether ranks compute on GPUs of this machine, unless torch finds fault with them."""
    return machine.visible != 0 and machine.torch_has_gpus and training.device != "cpu"


def placement_words(training: TrainingConfig, served: Mapping[str, ModelConfig], machine: Machine, nodes: int) -> str:
    """Return which GPUs of this machine ranks and servers compute on, by their physical numbers."""
    physical = machine.named

    def shown(device: str) -> str:
        if physical is None or not device.isdecimal() or int(device) >= len(physical):
            return device
        return f"{device} ({physical[int(device)]})"

    on_gpus = trains_on_gpus(training, machine)
    ranks = ", ".join(shown(str(number)) for number in range(training.ranks // nodes))
    places = [f"ranks on GPU {ranks}" if on_gpus else "ranks on the CPU"]
    for role, model in served.items():
        for each in model.backend.servers():
            devices = ", ".join(shown(device) for _, device in _named_by(each))
            places += [f"{each.server_name(role)} on GPU {devices}"] if devices else []
    return "; ".join(places) + ("" if physical is None else "; in brackets CUDA_VISIBLE_DEVICES of this command")


def not_installed(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Yield which servers are to be started here, and are not installed."""
    for role, model in models.items():
        try:
            model.backend.check_installed(f"{role}.backend")
        except ConfigError as error:
            yield str(error)


def without_weights(models: Mapping[str, ModelConfig], *, trained: str | None = None) -> Iterator[str]:
    """Yield which models have no weights here, of those that are served here or `trained`.

    Models of the hub are downloaded first, and so are not looked at.
    """
    seen = set()
    for role, model in models.items():
        directory = Path(model.model)
        is_loaded = role == trained or any(each.runs_here for each in model.backend.servers())
        if not is_loaded or directory in seen or not directory.is_dir():
            continue
        seen.add(directory)
        try:
            missing = [path.name for path in weight_files(directory) if not path.is_file()]
        except DataError as error:
            yield f"{role}.model: {error}: put its weights there, as safetensors"
            continue
        if missing:
            yield f"{role}.model: {directory} lacks {', '.join(missing)}, which its index names: copy the files there"


def without_devices(role: str, model: ModelConfig, machine: Machine) -> Iterator[str]:
    """Yield which devices the model's servers on this machine name that it does not have."""
    section, gpus = f"{role}.backend", machine.gpus
    if gpus is None:
        return
    has = f"this machine has {counted(gpus, 'GPU')}" if gpus else "this machine has no GPU"
    named = dict.fromkeys(found for each in model.backend.servers() if each.runs_here for found in _named_by(each))
    for key, number in named:
        if number.isdecimal() and int(number) >= gpus:
            yield f"{section}.{key} names GPU {number}, but {has}" + (f", 0 to {gpus - 1}" if gpus else "")
    weights = getattr(model.backend, "weights", None)
    if not gpus and role == "student" and weights is not None and getattr(weights, "by_nccl", False):
        yield f"{section}.weights.device={weights.device} is a GPU, but {has}: set it to cpu, or transport to disk"


def _named_by(settings: object) -> Iterator[tuple[str, str]]:
    """Yield the key and the GPU, a number or a name such as `GPU-8f3c`, of each that a server's settings name."""
    yield from (("launch.devices", each) for each in device_names(getattr(settings, "launch", None)) if each)
    kind, _, number = str(getattr(settings, "device", "")).partition(":")
    if kind == "cuda":
        yield "device", number if number.isdecimal() else "0"


def _of_ranks(training: TrainingConfig, machine: Machine, nodes: int) -> Iterator[str]:
    """Yield what the trainer's ranks on this machine have too little of."""
    ranks, visible = training.ranks // nodes, 0 if training.device == "cpu" else machine.visible
    here = f"training.ranks={training.ranks}" + (f" on {nodes} nodes" if nodes > 1 else "")
    if visible and not machine.torch_has_gpus:
        yield (
            f"this machine has {counted(visible, 'GPU')}, but the torch installed here was built without CUDA: the "
            "trainer computes on the CPU"
        )
    if visible and machine.torch_has_gpus:
        if ranks > visible:
            yield f"{here} needs as many GPUs, but only {visible} of this machine are visible"
        if training.offload == "all" and training.threads == 1 and (share := machine.cores // ranks) > 1:
            yield (
                f"training.offload=all steps AdamW on the CPU, with training.threads=1: set training.threads={share}, "
                f"the cores of this machine for each of {counted(ranks, 'rank')}"
            )
    elif visible == 0 and (threads := ranks * training.threads) > machine.cores:
        yield (
            f"{here} with training.threads={training.threads}: the trainer's {counted(threads, 'thread')} share "
            f"{counted(machine.cores, 'core')} of this machine, which is slower than fewer"
        )
    if training.sharding == "fsdp2" and training.ranks == 1 and training.offload != "all":
        yield "training.sharding=fsdp2 shards nothing over one rank: raise training.ranks, or set it to none"


def check_room(path: Path, config: Config, plan: TrainPlan) -> None:
    """Raise ConfigError if a run in directory `path` could not publish its weights, or save its first checkpoint.

    Raises DataError if others could change what it publishes.
    """
    training, parameters = config.training, plan.parameters
    if parameters is not None and training.checkpoint_every:
        words = shortage(path, parameters.checkpoint_bytes(config.copies))
        if words is not None:
            raise ConfigError(
                f"run.directory: {words}: make room, give a directory on another disk, or set "
                "training.checkpoint_every=0, without which a run that is killed cannot continue"
            )
    if training.weights_directory is None:
        return
    directory = Path(training.weights_directory)
    if not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise ConfigError(f"training.weights_directory={directory}: is no directory in which this user can write")
    refuse_foreign_writers([directory / "spot-weights"])  # of the directories on the way: servers would find out later
    remove_abandoned(directory)
    needed = 0 if parameters is None else parameters.kept_bytes(config, plan.schedule.iterations)
    free, where = free_bytes(directory), training.weights_directory
    if is_in_memory(directory) and (left := available_bytes()) < free:
        free, where = left, "this machine's memory"
    if needed > free:
        raise ConfigError(
            f"training.weights_directory={training.weights_directory}: published weights take {shown_size(needed)} "
            f"there, and {where} has {shown_size(free)} left: make room, lower training.keep_weights, or set it to "
            "null, for a disk"
        )


def shortage(path: Path, needed_bytes: int) -> str | None:
    """Return in words that a checkpoint does not fit on the disk of a path, which may be new; None if it does."""
    if (free := free_bytes(path)) >= needed_bytes:
        return None
    return f"a checkpoint takes {shown_size(needed_bytes)}, and the disk of {path} has {shown_size(free)} left"
