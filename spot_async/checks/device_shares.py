"""Shares out the memory of each GPU to the servers that this command starts there, and says who shares one.

`launch.memory_fraction` is a server's share of the whole device: its weights, its workspace, and keys and values. Left
alone, servers size that cache by free memory: vLLM while others may load, SGLang as a share of what is free then. So
each is told the size of its cache, and has the same when it is started again beside the others.

Which server is on which device is known of those that run here and name devices by number, as the trainer's ranks do.
Others are in no estimate, and size their caches by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from spot_async.base.processes.gpus import VISIBLE, gpu_memory, has_instances, named_gpus
from spot_async.config import BackendSettings, ClusterConfig, Config, ModelConfig, TrainingConfig, as_list
from spot_async.errors import ConfigError, DataError
from spot_async.models.footprint import GIB, WORKSPACE_GIB, ServerOnDevice, named, taken_together_gib
from spot_async.models.hub import local_path
from spot_async.models.model_size import ModelSize, read_size
from spot_async.models.small_files import CONFIG_FILE, read_json
from spot_async.models.weight_files import weight_files

SERVER_FRACTION = 0.9  # about the share of a device that servers take by default
TRAINER = "trainer"


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
    parts = {(each.role, each.name): each for each in servers_on_devices(served, device_gib(cluster, served))}
    found = dict(served)
    for role, model in served.items():
        launches = as_list(getattr(model.backend, "launch", None))
        servers = zip(model.backend.servers(), launches, strict=False)  # one at a url has no launch
        sized = [_with_cache(launch, parts.get((role, each.server_name(role)))) for each, launch in servers]
        if sized != launches:
            launch = sized if isinstance(getattr(model.backend, "launch", None), list) else sized[0]
            backend = model.backend.model_copy(update={"launch": launch})
            found[role] = model.model_copy(update={"backend": backend})
    return found


def _check_fractions(served: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError unless servers that share a device have a share each, which sum to at most 1.

    A backend's own settings check this for the servers of one role.
    """
    sharing: dict[int, list[tuple[str, str, float | None]]] = {}
    for role, name, launch in _numbered(served):
        for device in map(int, device_names(launch)):
            sharing.setdefault(device, []).append((role, name, launch.memory_fraction))
    for device, here in sharing.items():
        shares = [(1.0 if share is None else share, shares_gpu_time(served[role])) for role, _, share in here]
        total = sum(share for share, shares_time in shares if not shares_time)
        total += max((share for share, shares_time in shares if shares_time), default=0.0)
        if len(here) > 1 and total > 1:
            lacking = next((role for role, _, share in here if share is None), here[-1][0])
            raise ConfigError(
                f"{lacking}.backend.launch.memory_fraction: {' and '.join(name for _, name, _ in here)} share GPU "
                f"{device}: give each its own devices, or each a memory_fraction, with a sum of at most 1"
            )


def _with_cache(launch: Any, part: ServerOnDevice | None) -> Any:
    """Return a server's settings with the size of its cache, unless that is stated or cannot be known here."""
    if part is None or launch.memory_fraction is None or launch.cache_gib is not None:
        return launch
    if part.cache_gib <= 0:
        raise ConfigError(
            f"{part.role}.backend.launch.memory_fraction={part.fraction:g} is {part.gib:.1f} of {part.device_gib:.1f} "
            f"GiB, and the server's weights and workspace take {part.taken_gib:.1f}: give it more than "
            f"{part.taken_gib / part.device_gib:.2f}, or more devices (tensor_parallel_size)"
        )
    return launch.model_copy(update={"cache_gib": part.cache_gib})


def device_names(launch: Any) -> list[str]:
    """Return the devices that the settings of a server name which is started here; empty if they name none."""
    return [] if launch is None or launch.is_elsewhere else getattr(launch, "device_names", [])


def _is_numbered(launch: Any) -> bool:
    names = device_names(launch)
    return names != [] and all(map(str.isdecimal, names))


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
    for _, name, launch in _launched(served):
        if device_names(launch) and not _is_numbered(launch):
            yield (
                f"{name} is in no estimate, and sizes its cache by itself: the memory of {launch.devices} is not "
                f"known; number its devices within {VISIBLE}, and set cluster.device_gib"
            )


def servers_on_devices(served: Mapping[str, ModelConfig], total_gib: float) -> list[ServerOnDevice]:
    """Return each server's part of each numbered device. Models of unknown size are left out."""
    found = []
    for role, name, launch in _numbered(served):
        directory = Path(local_path(served[role].model))
        if (size := read_size(directory)) is None:
            continue
        weights_gib = weight_bytes(directory, size, launch.dtype) / launch.tensor_parallel_size / GIB
        taken, fraction = weights_gib + WORKSPACE_GIB, launch.memory_fraction or SERVER_FRACTION
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
                sleeps_while_training(served[role]),
                shares_gpu_time(served[role]),
            )
            for device in device_names(launch)
        ]
    return found


def _numbered(served: Mapping[str, ModelConfig]) -> Iterator[tuple[str, str, Any]]:
    """Yield role, name and launch settings of each server that names its devices by number."""
    return (each for each in _launched(served) if _is_numbered(each[2]))


def _launched(served: Mapping[str, ModelConfig]) -> Iterator[tuple[str, str, Any]]:
    for role, model in served.items():
        servers: Sequence[BackendSettings] = model.backend.servers()
        yield from ((role, each.server_name(role), getattr(each, "launch", None)) for each in servers)


def starting_order(served: Mapping[str, ModelConfig], ranks: int = 0) -> dict[str, frozenset[int]]:
    """Return the numbered devices of each server, and of the trainer's ranks, in the order in which they start.

    The trainer comes last, because a server looks at what is free, and the trainer takes what it needs. `ranks` are
    those on GPUs of this machine.
    """
    found = {name: frozenset(map(int, device_names(launch))) for _, name, launch in _numbered(served)}
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


def added_start_s(served: Mapping[str, ModelConfig]) -> float:
    """Return by how much a start may take longer than that of one server, since servers on a device take turns."""
    timeouts = {name: served[role].serving.start_timeout_s for role, name, _ in _numbered(served)}
    order = starting_order(served)
    devices = {*chain.from_iterable(order.values())}
    together = [sum(timeouts[name] for name, own in order.items() if device in own) for device in devices]
    return max(together, default=0.0) - max(timeouts.values(), default=0.0)


def ranks_on_gpus(training: TrainingConfig, nodes: int) -> int:
    """Return how many of the trainer's ranks are on GPUs of each of `nodes` machines."""
    return 0 if training.device == "cpu" else training.ranks // nodes


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


def shares_gpu_time(model: ModelConfig) -> bool:
    """Whether the model's server gives its memory to others of its kind while these answer."""
    return bool(getattr(model.backend, "sleep_while_others_answer", False))
