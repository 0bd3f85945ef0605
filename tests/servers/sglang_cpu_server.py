"""Starts SGLang's server, as published for GPUs, on a machine without one. Arguments are the server's own.

Some things that are missing there get stand-ins; nothing that is installed is changed. Run by the interpreter of
SGLang's environment. The server's other processes are forked, so all of them have the stand-ins.
"""

from __future__ import annotations

import importlib.machinery
import multiprocessing
import os
import sys
import types
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch


def declare_torchvision_operators() -> torch.library.Library:
    """torchvision's operators are built for CUDA and cannot be loaded; it looks for these two when it is imported."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class MissingKernels(types.ModuleType):
    """`sgl_kernel`, which is published for GPUs only. Its names are imported, and on a CPU one of them is called."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

        return missing


def install_kernels() -> torch.library.Library:
    module = MissingKernels("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    sys.modules["sgl_kernel"] = module
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", hash_of, "CPU")
    return library


def hash_of(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits) of seed, position and column: (rows,), (rows,), (columns,) to (rows, columns).

    It draws the noise of seeded sampling; any good hash would do, this is the one that the kernel computes.
    """
    mask = 0xFFFFFFFF

    def multiplied(values: torch.Tensor, factor: int) -> torch.Tensor:
        low, high = (values & 0xFFFF) * factor, ((values >> 16) * factor) & 0xFFFF
        return (low + (high << 16)) & mask  # no product leaves 64 bits

    def rotated(values: torch.Tensor, bits: int) -> torch.Tensor:
        return ((values << bits) | (values >> (32 - bits))) & mask

    def mixed(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        block = multiplied(rotated(multiplied(block, 0xCC9E2D51), 15), 0x1B873593)
        return (multiplied(rotated(state ^ block, 13), 5) + 0xE6546B64) & mask

    seeds, positions, columns = (each.to(torch.int64) for each in (seeds, positions, columns))
    state = torch.zeros_like(seeds)
    for block in (seeds & mask, (seeds >> 32) & mask, positions & mask):
        state = mixed(state, block)
    state = mixed(state[:, None].expand(-1, columns.numel()), (columns & mask)[None, :].expand(seeds.numel(), -1))
    state = state ^ 16  # bytes that were hashed
    state = multiplied(state ^ (state >> 16), 0x85EBCA6B)
    state = multiplied(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def allow_deterministic_inference() -> None:
    """Seeds act under --enable-deterministic-inference only, which wants attention and matrix kernels of GPUs."""
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None


def forget_pinned_memory() -> None:
    """SGLang's adapters are held in pinned memory, which only machines with an accelerator have."""
    for name in ("empty", "zeros", "ones", "arange", "tensor", "full"):
        make = getattr(torch, name)

        def unpinned(*values: Any, _make: Any = make, pin_memory: bool = False, **keys: Any) -> Any:
            return _make(*values, **keys)

        setattr(torch, name, unpinned)
    torch.Tensor.pin_memory = lambda self, *_, **__: self


stand_ins = [declare_torchvision_operators(), install_kernels()]
if "--enable-lora" in sys.argv:
    forget_pinned_memory()
if "--enable-deterministic-inference" in sys.argv:
    allow_deterministic_inference()


def fork_in_place_of_spawning() -> None:
    """A spawned process imports all of SGLang again, which is most of what it costs to start one of a tiny model."""
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's asks for "spawn"


if __name__ == "__main__":
    fork_in_place_of_spawning()

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
