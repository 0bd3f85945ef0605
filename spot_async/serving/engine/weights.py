"""The weights that the engine computes with: a model's own, which snapshots replace, and LoRA adapters beside them.

Published weights are checked, all of them, before any is copied into the serving model. A snapshot is a Hugging Face
directory: `model.safetensors`, or shards with `model.safetensors.index.json`. Tied tensors (one storage, several names)
may come under any of their names.

Rows of one batch may be of several adapters. Each adapter is applied to all rows, with zeros for those of the others,
so that a row's bits do not depend on which adapters run beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from spot_async.config import LoraConfig
from spot_async.config.training import TARGETS
from spot_async.errors import DataError, PermanentError, ServerRestartedError
from spot_async.models.adapter_files import DOWN, PEFT_PREFIX, UP, WEIGHTS_FILE, check_adapter, layers_of
from spot_async.models.small_files import read_json
from spot_async.models.weight_files import ADAPTER_CONFIG, names_in_model, weight_files, weight_headers
from spot_async.types import WeightVersion

# More than the runs need that share a server. Those of a run that was killed are never unloaded.
HELD_AT_ONCE = 16

# The layers whose outputs one product of the forward pass computes side by side, by a name of the product.
Products = Mapping[Hashable, Sequence[str]]


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
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read, it may be cut off: {error}") from error


class Pair(NamedTuple):
    """What is added to a product's output: inputs @ down @ up. The adapter's factor is in `up`. Both are float32."""

    down: torch.Tensor  # (in, r)
    up: torch.Tensor  # (r, out)


class Adapter:
    """An adapter in the engine's memory."""

    def __init__(self, version: WeightVersion, pairs: Mapping[Hashable, Pair]) -> None:
        self.version = version
        self.pairs = pairs


class AdaptedRows:
    """Which rows of one forward pass are of which adapter."""

    def __init__(self, parts: Sequence[tuple[Adapter, torch.Tensor | None]] = ()) -> None:
        """Each part is an adapter, and which rows are not its own, (rows, 1); None if all are."""
        self._parts = parts

    @classmethod
    def of(cls, adapters: Sequence[Adapter | None], repeats: int, device: torch.device) -> AdaptedRows:
        """`adapters` has one for each sequence, whose `repeats` rows follow each other; None is the model alone."""
        different = dict.fromkeys(adapters)
        parts: list[tuple[Adapter, torch.Tensor | None]] = []
        for adapter in filter(None, different):
            others = torch.tensor([each is not adapter for each in adapters], device=device)
            parts.append((adapter, None if len(different) == 1 else others.repeat_interleave(repeats)[:, None]))
        return cls(parts)

    def at(self, rows: torch.Tensor) -> AdaptedRows:
        """Return the same for some of the rows, by their numbers (R,)."""
        return AdaptedRows([(adapter, None if others is None else others[rows]) for adapter, others in self._parts])

    def add(self, product: Hashable, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add to a product's outputs (rows, out), in place, what each row's adapter makes of its inputs (rows, in)."""
        for adapter, others in self._parts:
            pair = adapter.pairs.get(product)
            if pair is None:
                continue
            inner = inputs.float() @ pair.down
            if others is not None:
                inner.masked_fill_(others, 0.0)  # not times 0: what overflows in other rows would be no number there
            if outputs.dtype is torch.float32:
                outputs.addmm_(inner, pair.up)
            else:
                outputs.add_(inner @ pair.up)


class Adapters:
    """The adapters that requests may name. `read` may be called from any thread."""

    def __init__(self, base: Path, products: Products, device: torch.device) -> None:
        """`base` is the model's directory, and `products` are those of its forward pass."""
        self._base = base
        self._products = products
        self._device = device
        self._has_base = True
        self._named: dict[str, Adapter] = {}  # that which was named last is the last

    def read(self, directory: Path, version: WeightVersion) -> Adapter:
        """Read an adapter's files. Raises `DataError` unless it is whole, and one for this model."""
        lora = _described(directory, self._base)
        layers = layers_of(self._base, lora)
        check_adapter(directory, layers, lora)
        for name in layers.keys() - {name for names in self._products.values() for name in names}:
            raise DataError(f"adapter {directory}: the engine takes none for {name}")
        tensors = load_file(directory / WEIGHTS_FILE, device=str(self._device))
        pairs: dict[Hashable, Pair] = {}
        for product, names in self._products.items():
            if layers.keys().isdisjoint(names):
                continue
            downs, ups = ([tensors[f"{PEFT_PREFIX}{name}.{part}.weight"] for name in names] for part in (DOWN, UP))
            up: torch.Tensor = torch.block_diag(*ups) * lora.scale  # type: ignore[no-untyped-call]
            pairs[product] = Pair(torch.cat(downs).t().contiguous(), up.t().contiguous())
        return Adapter(version, pairs)

    def load(self, name: str, adapter: Adapter) -> None:
        """Let requests name it, and forget that which was not named for longest, if there are many.

        Raises `PermanentError` if another has the name, since an adapter is never replaced, or if the model below is
        not that which the server started with.
        """
        if not self._has_base:
            raise PermanentError("its model was given other weights after its start: restart it, to load adapters")
        if name in self._named:
            raise PermanentError(f"has an adapter {name} already: give each a name of its own")
        self._named[name] = adapter
        if len(self._named) > HELD_AT_ONCE:
            del self._named[next(iter(self._named))]

    def unload(self, name: str) -> None:
        """Forget an adapter, if there is one of that name. Requests that have begun with it end with it."""
        self._named.pop(name, None)

    def base_replaced(self) -> None:
        """Forget all adapters, and load none from now on: they are of the model that the server started with."""
        self._named.clear()
        self._has_base = False

    def named(self, name: str | None) -> Adapter | None:
        """Return the adapter that a request names, if it names one. Raises `ServerRestartedError` if there is none."""
        if name is None:
            return None
        if name not in self._named:
            raise ServerRestartedError(f"has no adapter {name}: was it unloaded, or the server restarted?")
        self._named[name] = self._named.pop(name)
        return self._named[name]


def _described(directory: Path, base: Path) -> LoraConfig:
    """Return what an adapter's own configuration says that it is. Raises `DataError`."""
    try:
        config = read_json(directory / ADAPTER_CONFIG)
        modules = set(config["target_modules"])
        for targets in TARGETS:
            lora = LoraConfig.model_validate({"rank": config["r"], "alpha": config["lora_alpha"], "targets": targets})
            if modules == {name.rpartition(".")[2] for name in layers_of(base, lora)}:
                return lora
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"adapter {directory}: cannot be read ({error})") from error
    raise DataError(f"adapter {directory}: its target modules are {sorted(modules)}; served are {', '.join(TARGETS)}")
