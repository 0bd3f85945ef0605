"""Reads published weights and checks all of them before any is copied into the serving model.

A snapshot is a Hugging Face directory: `model.safetensors`, or shards with `model.safetensors.index.json`.
Tied tensors (one storage, several names) may come under any of their names.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spot_async.errors import DataError
from spot_async.models.weight_files import names_in_model, weight_files, weight_headers


class Parameters:
    """A model's tensors by name. Names of the same storage are one tensor."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._names: dict[str, str] = {}  # every name -> the one under which its tensor is kept
        self._tensors: dict[str, torch.Tensor] = {}
        kept_under: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in state.items():
            key = (tensor.data_ptr(), tensor.shape)
            kept = kept_under.setdefault(key, name) if tensor.numel() else name
            self._names[name] = kept
            self._tensors.setdefault(kept, tensor)

    def read(self, directory: Path, digests: Mapping[str, str] | None = None) -> dict[str, torch.Tensor]:
        """Read every tensor of the snapshot in `directory`, check it against this model, and convert it to its type.

        Raises `DataError` for a missing, unknown, misshapen or non-finite tensor, for tied tensors that differ, for one
        whose SHA-256 is not that in `digests`, and for files that cannot be read.
        """
        found: dict[str, torch.Tensor] = {}
        for path in weight_files(directory):
            for name, tensor in _read_file(path):
                if digests and name in digests and digests[name] != _sha256(tensor):
                    raise DataError(f"{path}: tensor {name!r} is not the one that the run published")
                self._add(found, name, tensor, path)
        missing = self._tensors.keys() - found.keys()
        if missing:
            raise DataError(f"{directory}: tensor {min(missing)!r} is missing ({len(missing)} in all)")
        return found

    def match(self, directory: Path) -> bool:
        """Return whether the files name this model's tensors. Some architectures fuse tensors when they are loaded."""
        names = names_in_model(weight_headers(directory), self._names)
        return self._tensors.keys() <= {self._names.get(name) for name in names}

    def _add(self, found: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, path: Path) -> None:
        kept = self._names.get(name)
        if kept is None:
            raise DataError(f"{path}: tensor {name!r} is not one of the model's")
        own = self._tensors[kept]
        if tensor.shape != own.shape:
            raise DataError(
                f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}, the model's has {tuple(own.shape)}"
            )
        tensor = tensor.to(own.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{path}: tensor {name!r} holds values that are not finite")
        if kept in found and not torch.equal(found[kept], tensor):
            raise DataError(f"{path}: tensor {name!r} differs from {kept!r}, but the model ties them")
        found[kept] = tensor

    @torch.no_grad()
    def copy_in(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors from `read` into the model."""
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)


def _sha256(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, as the file has them."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _read_file(path: Path) -> list[tuple[str, torch.Tensor]]:
    with _open(path) as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - not a mapping


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read, it may be cut off: {error}") from error
