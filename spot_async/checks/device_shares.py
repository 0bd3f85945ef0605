"""Shares out the memory of each GPU to the servers that this command starts there, and says who shares one.

`launch.memory_fraction` is a server's share of the whole device: its weights, its workspace, and keys and values. The
servers themselves would measure what is left for the last: vLLM while others may load, SGLang as a share of what is
free just then. So each is told the size of its cache, and has the same when it is started again beside the others.

Which server is on which device is known of those that run here and name devices by number, as the trainer's ranks do.
Others are in no estimate, and size their caches by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from spot_async.base.processes.gpus import VISIBLE, gpu_memory, has_instances, named_gpus
from spot_async.config import BackendSettings, ClusterConfig, Config, ModelConfig, as_list
from spot_async.errors import ConfigError, DataError
from spot_async.models.hub import local_path
from spot_async.models.model_size import ModelSize, read_size
from spot_async.models.small_files import CONFIG_FILE, read_json
from spot_async.models.weight_files import weight_files

GIB = float(1 << 30)
SERVER_FRACTION = 0.9  # about the share of a device that servers take by default
CONTEXT_GIB = 0.8  # of each process on a device: CUDA, libraries, NCCL
GRAPHS_GIB = 1.2  # of a server, also while it sleeps: CUDA graphs, which lie outside what it frees
ACTIVATIONS_GIB = 1.0  # of a server, besides weights and cache
WORKSPACE_GIB = CONTEXT_GIB + GRAPHS_GIB + ACTIVATIONS_GIB
TRAINER = "trainer"


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
    in_shifts: bool = False  # whether it sleeps while others of its kind answer

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

    @property
    def asleep_gib(self) -> float:
        """What it takes while the trainer trains."""
        return CONTEXT_GIB + GRAPHS_GIB if self.sleeps else self.gib


def taken_together_gib(servers: Sequence[ServerOnDevice], *, training: bool = False) -> float:
    """Return what servers take of their device at once. Of those that answer in shifts one is awake."""
    taken = [(each.asleep_gib if training else each.gib, each.in_shifts) for each in servers]
    asleep_gib = CONTEXT_GIB + GRAPHS_GIB
    awake_gib = max((gib - asleep_gib for gib, in_shifts in taken if in_shifts), default=0.0)
    return sum(asleep_gib if in_shifts else gib for gib, in_shifts in taken) + awake_gib


def device_gib(cluster: ClusterConfig, served: Mapping[str, ModelConfig]) -> float:
    """Return the memory of a GPU of the servers: as configured, or less where the smallest of them has less.

    Without GPUs here it is that of the paper's recipes. Raises ConfigError if more is configured than GPUs have, or
    nothing for instances of MIG.
    """
    memory, devices = gpu_memory(), set(chain(*starting_order(served).values()))
    is_divided = has_instances(named_gpus(os.environ) or ()) or any(
        memory[each].is_divided for each in devices if each in memory
    )
    if devices and cluster.device_gib is None and is_divided:
        raise ConfigError(
            "cluster.device_gib: the GPU is divided by MIG, and nobody here knows the memory of an instance: set it to "
            "what `nvidia-smi -L` says, such as 10 for MIG 1g.10gb"
        )
    found = [memory[each].total_gib for each in devices if each in memory]
    if not found:
        return cluster.device_gib or ClusterConfig.DEVICE_GIB
    least = min(found)
    if cluster.device_gib is None:
        return least
    if cluster.device_gib > least + 1:  # 80 is said of cards that have 79.6
        raise ConfigError(
            f"cluster.device_gib={cluster.device_gib:g}: this machine's GPUs have {least:.1f} GiB: remove the key, or "
            "give no more than that"
        )
    return min(cluster.device_gib, least)


def shared_out(served: Mapping[str, ModelConfig], cluster: ClusterConfig) -> dict[str, ModelConfig]:
    """Return the models with the size of the cache of each server that has a share of a device (`launch.cache_gib`)."""
    _check_fractions(served)
    total = device_gib(cluster, served)
    return {role: _shared_out(role, model, total) for role, model in served.items()}


def _check_fractions(served: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError unless servers that share a device have a share each, which sum to at most 1.

    A backend's own settings check this for the servers of one role.
    """
    sharing: dict[str, list[tuple[str, str, float | None]]] = {}
    for role, model in served.items():
        for name, launch in _numbered(role, model):
            for device in launch.devices.split(","):
                sharing.setdefault(device.strip(), []).append((role, name, launch.memory_fraction))
    for device, here in sharing.items():
        shares = [(1.0 if share is None else share, answers_in_shifts(served[role])) for role, _, share in here]
        total = sum(share for share, in_shifts in shares if not in_shifts)
        total += max((share for share, in_shifts in shares if in_shifts), default=0.0)
        if len(here) > 1 and total > 1:
            lacking = next((role for role, _, share in here if share is None), here[-1][0])
            raise ConfigError(
                f"{lacking}.backend.launch.memory_fraction: {' and '.join(name for _, name, _ in here)} share GPU "
                f"{device}: give each its own devices, or each a memory_fraction, with a sum of at most 1"
            )


def _shared_out(role: str, model: ModelConfig, total_gib: float) -> ModelConfig:
    launches = as_list(getattr(model.backend, "launch", None))
    if not any(_has_share(each) for each in launches) or (size := read_size(Path(local_path(model.model)))) is None:
        return model
    sized = []
    for each in launches:
        if _has_share(each):
            cache = each.memory_fraction * total_gib - taken_gib(Path(local_path(model.model)), size, each)
            if cache <= 0:
                raise ConfigError(_too_small(role, each, total_gib, cache))
            each = each.model_copy(update={"cache_gib": cache})
        sized.append(each)
    launch = sized if isinstance(getattr(model.backend, "launch", None), list) else sized[0]
    backend = model.backend.model_copy(update={"launch": launch})
    return model.model_copy(update={"backend": backend})


def _too_small(role: str, launch: Any, total_gib: float, cache_gib: float) -> str:
    share = launch.memory_fraction * total_gib
    return (
        f"{role}.backend.launch.memory_fraction={launch.memory_fraction:g} is {share:.1f} of {total_gib:.1f} GiB, and "
        f"the server's weights and workspace take {share - cache_gib:.1f}: give it more than "
        f"{(share - cache_gib) / total_gib:.2f}, or more devices (tensor_parallel_size)"
    )


def _has_share(launch: Any) -> bool:
    """Whether the size of the server's cache is to be computed."""
    return _is_numbered(launch) and launch.memory_fraction is not None and launch.cache_gib is None


def _is_numbered(launch: Any) -> bool:
    """Whether a server runs here and names its devices by number."""
    devices = getattr(launch, "devices", None)
    if devices is None or launch.is_elsewhere:
        return False
    return all(each.strip().isdecimal() for each in devices.split(","))


def taken_gib(directory: Path, size: ModelSize, launch: Any) -> float:
    """Return what a server takes of each of its devices besides its cache, in GiB."""
    parallel: int = launch.tensor_parallel_size
    return weight_bytes(directory, size, launch.dtype) / parallel / GIB + WORKSPACE_GIB


def weight_bytes(directory: Path, size: ModelSize, dtype: str = "auto") -> int:
    """Return the bytes of a served model's weights: those of its files if it is quantised, else by its type."""
    if "quantization_config" in read_json(directory / CONFIG_FILE):
        try:
            return sum(path.stat().st_size for path in weight_files(directory))
        except (DataError, OSError):
            pass  # the weights are not here
    return (4 if dtype in ("float32", "float") else 2) * size.parameters


def on_named_devices(served: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Yield a line for each server that names devices, such as an instance of MIG, and so is in no estimate."""
    for role, model in served.items():
        for each in model.backend.servers():
            launch = getattr(each, "launch", None)
            devices = None if launch is None or launch.is_elsewhere else getattr(launch, "devices", None)
            if devices is not None and not _is_numbered(launch):
                yield (
                    f"{each.server_name(role)} is in no estimate, and sizes its cache by itself: the memory of "
                    f"{devices} is not known; number its devices within {VISIBLE}, and set cluster.device_gib"
                )


def servers_on_devices(served: Mapping[str, ModelConfig], total_gib: float) -> list[ServerOnDevice]:
    """Return each server's part of each numbered device. Models of unknown size are left out."""
    found = []
    for role, model in served.items():
        directory = Path(local_path(model.model))
        size = read_size(directory)
        for name, launch in _numbered(role, model):
            if size is None:
                continue
            taken, fraction = taken_gib(directory, size, launch), launch.memory_fraction or SERVER_FRACTION
            if launch.cache_gib is not None:
                fraction = (taken + launch.cache_gib) / total_gib
            found += [
                ServerOnDevice(
                    role,
                    name,
                    int(device),
                    total_gib,
                    fraction,
                    taken,
                    size.cache_bytes_on(launch.tensor_parallel_size),
                    sleeps_while_training(model),
                    answers_in_shifts(model),
                )
                for device in launch.devices.split(",")
            ]
    return found


def _numbered(role: str, model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield the name and launch settings of each server that names its devices by number."""
    servers: Sequence[BackendSettings] = model.backend.servers()
    for each in servers:
        if _is_numbered(launch := getattr(each, "launch", None)):
            yield each.server_name(role), launch


def starting_order(served: Mapping[str, ModelConfig], ranks: int = 0) -> dict[str, frozenset[int]]:
    """Return the numbered devices of each server, and of the trainer's ranks, in the order in which they start.

    The trainer comes last, because a server looks at what is free, and the trainer takes what it needs. `ranks` are
    those on GPUs of this machine.
    """
    found = {
        name: frozenset(map(int, launch.devices.split(",")))
        for role, model in served.items()
        for name, launch in _numbered(role, model)
    }
    if ranks:
        found[TRAINER] = frozenset(range(ranks))
    return found


def taking_turns(order: Mapping[str, frozenset[int]]) -> list[str]:
    """Return a line for each group of devices that several share. `order` is of `starting_order`."""
    found: dict[tuple[str, ...], list[int]] = {}
    for device in sorted({*chain.from_iterable(order.values())}):
        here = tuple(name for name, own in order.items() if device in own)
        if len(here) > 1:
            found.setdefault(here, []).append(device)
    return [f"start one after another on {named(devices)}: {', '.join(names)}" for names, devices in found.items()]


def named(devices: Sequence[int]) -> str:
    return f"{'devices' if len(devices) > 1 else 'device'} {', '.join(map(str, devices))}"


def added_start_s(served: Mapping[str, ModelConfig]) -> float:
    """Return by how much a start may take longer than that of one server, since servers on a device take turns."""
    timeouts = {
        name: launch.start_timeout_s for role, model in served.items() for name, launch in _numbered(role, model)
    }
    order = starting_order(served)
    devices = {*chain.from_iterable(order.values())}
    together = [sum(timeouts[name] for name, own in order.items() if device in own) for device in devices]
    return max(together, default=0.0) - max(timeouts.values(), default=0.0)


def ranks_on_gpus(config: Config) -> int:
    """Return how many of the trainer's ranks are on GPUs of each machine."""
    training = config.training
    return 0 if training.device == "cpu" else training.ranks // (config.cluster.nodes or 1)


def check_room(servers: Sequence[ServerOnDevice]) -> None:
    """Raise ConfigError if servers take more of a device than other programs leave them."""
    memory = gpu_memory()
    for device in sorted({each.device for each in servers}):
        here = [each for each in servers if each.device == device]
        needed = taken_together_gib(here)
        if device in memory and needed > memory[device].free_gib:
            raise ConfigError(
                f"{here[0].role}.backend.launch.memory_fraction: {', '.join(each.name for each in here)} take "
                f"{needed:.1f} GiB of GPU {device}, and {memory[device].free_gib:.1f} of its "
                f"{memory[device].total_gib:.1f} GiB are free: end what else uses it, or lower memory_fraction"
            )


def sleeps_while_training(model: ModelConfig) -> bool:
    """Whether the model's server gives its memory to the trainer while that trains. Only some backends have the key."""
    return bool(getattr(model.backend, "sleep_while_training", False))


def shares_with_trainer(config: Config) -> bool:
    """Whether any server sleeps while the trainer trains."""
    return any(map(sleeps_while_training, config.models.values()))


def answers_in_shifts(model: ModelConfig) -> bool:
    """Whether the model's server gives its memory to others of its kind while these answer."""
    return bool(getattr(model.backend, "sleep_while_others_answer", False))
