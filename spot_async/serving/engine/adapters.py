"""Adapters beside the weights that the engine holds: reads and checks them, and adds what they add to a layer's output.

Rows of one batch may be of several adapters. Each adapter is applied to all rows, with zeros for those of the others,
so that a row's bits do not depend on which adapters run beside it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from spot_async.config import LoraConfig
from spot_async.config.training import TARGETS
from spot_async.errors import DataError, PermanentError, ServerRestartedError
from spot_async.models.adapter_files import DOWN, PEFT_PREFIX, UP, WEIGHTS_FILE, check_adapter, layers_of
from spot_async.models.small_files import read_json
from spot_async.models.weight_files import ADAPTER_CONFIG
from spot_async.types import WeightVersion

# More than the runs need that share a server. Those of a run that was killed are never unloaded.
HELD_AT_ONCE = 16

# The layers whose outputs one product of the forward pass computes side by side, by a name of the product.
Products = Mapping[Hashable, Sequence[str]]


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
