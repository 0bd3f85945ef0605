"""Saves and loads all that the next step depends on: what is trained, AdamW's moments and steps, torch's random state.

Every rank of the first node writes one safetensors file, since each node holds the whole state. What all ranks hold is
in rank 0's. Files have the form of torch's distributed checkpoints, so torch's own reader gives every rank its part, on
any number of ranks and however the student is spread.

torch's own writer is not used. Its ranks agree on file names by pickled messages. Without those, all of them write the
same file name, and a rank's part is refused because it is not the whole.

Which checkpoint is valid is not decided here, nor are batches: those follow from the step and the run's seed.

A thread of each rank saves, while the student trains on. Training has to wait for it only before it changes what is
being written. On a CPU the thread reads the parameters and moments themselves, so that no memory is needed: the next
step computes its gradients meanwhile. The same holds for what is offloaded to the CPU. From a GPU they are copied to
the host first, and the next steps may be made.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from spot_async.base.files import flush_to_disk
from spot_async.base.text import first_line
from spot_async.errors import TrainerError
from spot_async.trainer.optimizer import state_of
from spot_async.trainer.parallel import Strategy, idle_group, local, offsets, wait_for_all

STEP = "trained_steps"
REASON_BYTES = 1 << 10  # of what a rank tells the others: it is one line
RANDOM_STATE = "random_state"
# What torch's reader looks for in a file's header.
PLACES, PLACE = "DCP_SHARDING_INFO", "saved_offsets"
HeldTensor = tuple[Tensor, list[int]]  # a rank's part of a tensor, on the CPU, and where in the whole one it begins
# What ranks write. A copy beside it is somebody's.
OWN = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")
# Called on the thread of each rank: the seconds it took, and why it failed, or "".
Done = Callable[[float, str], None]


class _OwnFiles(FileSystem):
    """Shows torch's reader only what ranks wrote."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [each for each in super().ls(path) if OWN.fullmatch(Path(each).name)]


def held_tensors(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> dict[str, HeldTensor]:
    """Return what this rank writes of the state after `step` steps, by name.

    Tensors on the CPU are the live ones, and must not change before they are written. Those of a GPU are copied.
    """
    if not strategy.is_on_first_node:
        return {}
    state = {**_state(model, optimizer), STEP: torch.tensor(step)}
    if strategy.rank > 0:
        state = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
    # A rank may have no part of a small tensor.
    state = {**{name: each for name, each in state.items() if local(each).numel()}, **_random_state(strategy)}
    return {name: (local(each).contiguous().cpu(), offsets(each)) for name, each in state.items()}


def write_checkpoint(
    directory: Path, tensors: Mapping[str, HeldTensor], strategy: Strategy, agree: Callable[[str], str]
) -> None:
    """Write what each rank gives into a directory, which is made if it is missing. All ranks must call it.

    `agree` returns one of the ranks' reasons to all of them, or "" if there is none. When this returns, all ranks'
    files are on disk. Raises `TrainerError`, the same on all ranks, when one could not write. Nothing of this
    checkpoint is then left, and others are untouched.
    """
    _stop_if_failed(agree(_prepare(directory) if strategy.rank == 0 else ""), directory)
    path = directory / f"rank-{strategy.rank + 1:05d}-of-{strategy.ranks_of_node:05d}.safetensors"
    reason = ""
    try:
        if tensors:
            _write(path, tensors)
    except (OSError, SafetensorError) as error:
        reason = _reason(error)
    try:
        _stop_if_failed(agree(reason), directory)
    except TrainerError:
        path.unlink(missing_ok=True)
        raise


def load_checkpoint(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> None:
    """Load what `write_checkpoint` wrote after `step` steps into a model and its optimiser, in place.

    The first node's ranks read it, and the others get it from them. Raises `TrainerError` when files are missing or
    damaged, or are those of another model or another step.
    """
    state = _state(model, optimizer)
    if strategy.is_on_first_node:
        _read(directory, step, state, strategy)
    strategy.copy_from_first_node(state.values())


def _read(directory: Path, step: int, state: Mapping[str, Tensor], strategy: Strategy) -> None:
    """Load this rank's parts of a checkpoint into `state`, and torch's random state."""
    wanted = {**state, STEP: torch.zeros((), dtype=torch.int64)}
    randomness = _random_state(strategy)
    try:
        reader = HuggingFaceStorageReader(str(directory))
        reader.fs = _OwnFiles()
        found = cast(dict[str, TensorStorageMetadata], reader.read_metadata().state_dict_metadata)
        wanted |= {name: state for name, state in randomness.items() if name in found}
        _check(found, wanted)
        with warnings.catch_warnings(action="ignore"):  # that torch takes this for a single process
            load(cast(dict[str, Any], wanted), storage_reader=reader, no_dist=True)
        if wanted[STEP] != step:
            raise TrainerError(f"it is of step {int(wanted[STEP])}, not {step}")
    except (OSError, SafetensorError, ValueError, KeyError, TrainerError) as error:
        raise TrainerError(f"cannot load checkpoint {directory}: {_reason(error)}") from error
    torch.set_rng_state(randomness[f"{RANDOM_STATE}.cpu.{strategy.rank}"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(randomness[f"{RANDOM_STATE}.cuda.{strategy.rank}"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters that are trained and the optimiser's state by name; tied parameters once.

    A parameter that has had no step gets the state with which AdamW would begin, so that names depend only on the
    model.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        found[f"parameter.{name}"] = parameter.detach()
        found |= {f"{kind}.{name}": tensor for kind, tensor in state_of(optimizer, parameter).items()}
    return found


def _random_state(strategy: Strategy) -> dict[str, Tensor]:
    """Return the state of torch's generators on this rank, by name. Another number of ranks leaves some unread."""
    states = {f"{RANDOM_STATE}.cpu.{strategy.rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RANDOM_STATE}.cuda.{strategy.rank}"] = torch.cuda.get_rng_state()
    return states


def _prepare(directory: Path) -> str:
    """Make an empty directory for a checkpoint; return why that failed, or ""."""
    try:
        new = [each for each in (directory, *directory.parents) if not each.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for each in new:
            flush_to_disk(each.parent)
        for path in directory.iterdir():
            if OWN.fullmatch(path.name):  # of an attempt that was cut off
                path.unlink()
    except OSError as error:
        return _reason(error)
    return ""


def _write(path: Path, tensors: Mapping[str, HeldTensor]) -> None:
    places = {name: {PLACE: begins} for name, (_, begins) in tensors.items()}
    save_file({name: part for name, (part, _) in tensors.items()}, path, metadata={PLACES: json.dumps(places)})
    flush_to_disk(path)
    flush_to_disk(path.parent)


def _check(found: dict[str, TensorStorageMetadata], wanted: dict[str, Tensor]) -> None:
    """Raise `TrainerError` for a tensor that is missing, unknown, incomplete, or of another shape or type."""
    for name, tensor in wanted.items():
        if name not in found:
            raise TrainerError(f"tensor {name} is missing")
        shape, dtype = tuple(found[name].size), found[name].properties.dtype
        if shape != tuple(tensor.shape):
            raise TrainerError(f"tensor {name} has shape {shape}, the student's has {tuple(tensor.shape)}")
        if dtype != tensor.dtype:
            raise TrainerError(f"tensor {name} is {dtype}, the student's is {tensor.dtype}")
        # torch's reader would leave a hole as it is. Parts do not overlap, so their sizes tell.
        if sum(math.prod(part.sizes) for part in found[name].chunks) != tensor.numel():
            raise TrainerError(f"a part of tensor {name} is missing")
    for name in found.keys() - wanted.keys():
        if not name.startswith(f"{RANDOM_STATE}."):
            raise TrainerError(f"tensor {name} is none of the student's")


def _stop_if_failed(reason: str, directory: Path) -> None:
    if reason:
        raise TrainerError(f"cannot save a checkpoint to {directory}: {reason}; older ones are untouched")


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


class CheckpointSaver:
    """Saves one checkpoint at a time. All ranks call it alike."""

    def __init__(self, strategy: Strategy, device: torch.device, *, is_offloaded: bool = False) -> None:
        """`is_offloaded` says that something of the state rests on the CPU, whatever the device."""
        self._strategy = strategy
        self._reads_live_tensors = device.type == "cpu" or is_offloaded
        # The threads' collectives must not mix with those of training, and wait for the disk.
        self._group = idle_group()
        self._thread: threading.Thread | None = None

    def begin(self, directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, done: Done) -> None:
        """Begin to save the state after `step` steps, once the checkpoint before is saved."""
        self.wait()
        tensors = held_tensors(step, model, optimizer, self._strategy)

        def save() -> None:
            started = time.perf_counter()
            reason = ""
            try:
                write_checkpoint(directory, tensors, self._strategy, self._agree)
            except TrainerError as error:
                reason = str(error)
            done(time.perf_counter() - started, reason)

        self._thread = threading.Thread(target=save, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Wait until the last checkpoint is saved, or could not be; return for how many seconds."""
        if self._thread is None:
            return 0.0
        started = time.perf_counter()
        self._thread.join()
        self._thread = None
        wait_for_all(self._group)  # a disk may take longer than a rank may wait while training
        return time.perf_counter() - started

    def wait_before_step(self) -> float:
        """Wait until parameters and moments may be changed; return for how many seconds."""
        return self.wait() if self._reads_live_tensors else 0.0

    def _agree(self, reason: str) -> str:
        """Return the reason of a rank that failed, the same on all ranks; "" if none did."""
        if self._group is None:
            return reason
        told = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        heard = [torch.empty(REASON_BYTES, dtype=torch.uint8) for _ in range(self._strategy.ranks)]
        dist.all_gather(heard, torch.frombuffer(bytearray(told), dtype=torch.uint8), group=self._group)
        reasons = (each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in heard)
        return next(filter(None, reasons), "")
