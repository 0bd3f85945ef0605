"""Gathers a student's weights one after another, and writes each while the next comes.

So no rank ever holds the whole student. What is written is what transformers' `save_pretrained` would write.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from spot_async.models.adapter_files import DOWN, UP
from spot_async.models.weight_files import INDEX_FILE, TORCH_TYPES, Shapes, names_in_model, weight_headers
from spot_async.trainer.loading import has_just
from spot_async.trainer.lora import adapted_layers, own_weights
from spot_async.trainer.parallel import whole

MAX_FILE_SIZE = "50GB"  # as transformers' `save_pretrained`
BUFFERS = 3  # one is filled, one is written, one is in between
BUFFER_BYTES = 1 << 25
NAMES = {getattr(torch, name): given for given, name in TORCH_TYPES.items()}  # of types, as safetensors has them


def published_types(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the types in which a model's weights are published, by name: `dtype`, but for those that keep their own.

    A buffer has the type that the files in `directory` give it. A weight stays in float32 if they hold it so among
    weights of fewer bits, or if transformers never lets it have fewer: routers' biases, state matrices.
    """
    headers, live = weight_headers(directory), model.state_dict(keep_vars=True)
    given: dict[Tensor, set[str]] = {}  # of one weight, files may have several parts, or both of its tied names
    for name, file_name in _file_names(model, headers, live):
        given.setdefault(live[name], set()).add(headers[file_name].dtype)
    sizes: Counter[str] = Counter()
    for header in headers.values():
        sizes[header.dtype] += header.size_bytes
    are_fewer_bits = sizes.most_common(1)[0][0] != "F32"
    kept = [re.compile(each) for each in model._keep_in_fp32_modules_strict or ()]
    buffers = set(model.buffers())

    def type_of(name: str, weight: Tensor) -> torch.dtype:
        found = given.get(weight, set())
        if weight in buffers:
            return cast(torch.dtype, getattr(torch, TORCH_TYPES[max(found)])) if found else weight.dtype
        is_kept = (are_fewer_bits and found == {"F32"}) or any(each.search(name) for each in kept)
        return torch.float32 if is_kept else dtype

    return {name: type_of(name, weight) for name, weight in own_weights(model).items()}


def _file_names(model: PreTrainedModel, found: Collection[str], own: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield a model's names of tensors with those in its files, which transformers may change as it reads them."""
    changes = get_model_conversion_mapping(model)
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    for name, file_name in names_in_model(found, own).items():
        if name not in own:
            name, _ = rename_source_key(file_name, renamings, converters, model.base_model_prefix, own)
        if name in own:
            yield name, file_name


@dataclass(eq=False)
class WeightStream:
    """A student's weights as they are published: merged with its adapters, each of its type.

    All ranks make one, and one of them writes. As a context manager it gathers in the end what was not written, since
    other ranks wait for this one, whether it could write or not.
    """

    model: PreTrainedModel
    adapters: dict[str, Tensor]  # whole
    base: Path  # the directory that the student was read from
    types: Mapping[str, torch.dtype]  # `published_types`
    written: Callable[[Tensor], Tensor] = lambda live: live  # returns what is written in place of a live tensor

    def __post_init__(self) -> None:
        shapes = {name: tuple(each.shape) for name, each in own_weights(self.model).items()}
        # Transformers changes some mixtures' weights when it reads them, and changes them back when it writes.
        self._files, self._index = self._layout(shapes) if has_just(self.base, self.model) else ({}, None)
        self._names = [name for each in self._files.values() for name in each] or list(shapes)
        self._tensors = self._gathered()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *error: object) -> None:
        deque(self._tensors, maxlen=0)

    def write(self, directory: Path) -> None:
        """Write all weights into a directory."""
        if not self._files:
            self._write_whole(directory)
        tensors = self._merged()
        for file, shapes in self._files.items():
            self._write_file(directory / file, shapes, tensors)
        if self._index is not None:
            (directory / INDEX_FILE).write_text(json.dumps(self._index, indent=2, sort_keys=True) + "\n")

    def _gathered(self) -> Iterator[Tensor]:
        """Gather weights. None is held on to while the next one is gathered."""
        live = own_weights(self.model)
        for name in self._names:
            yield whole(self.written(live[name]))

    def _merged(self) -> Iterator[Tensor]:
        """Yield whole weights, each with its adapter, which is added in float32."""
        layers = {f"{name}.weight": (name, layer.scale) for name, layer in adapted_layers(self.model)}
        for name in self._names:
            tensor = next(self._tensors)
            if name in layers:
                layer, scale = layers[name]
                tensor = tensor.float() + scale * (self.adapters[f"{layer}.{UP}"] @ self.adapters[f"{layer}.{DOWN}"])
            yield tensor
            del tensor  # before the next is gathered

    def _layout(self, shapes: Shapes) -> tuple[dict[str, Shapes], dict[str, object] | None]:
        """Return which file has which weights in which order, and the index if there are several files."""
        names = sorted(shapes, key=_layer_by_layer)
        split = split_torch_state_dict_into_shards(
            {name: torch.empty(shapes[name], dtype=self.types[name], device="meta") for name in names},
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_FILE_SIZE,
        )
        files = {}
        for file, own in split.filename_to_tensors.items():
            own.sort(key=lambda name: (-self.types[name].itemsize, name))  # each begins at a multiple of its size
            files[file] = {name: shapes[name] for name in own}
        if not split.is_sharded:
            return files, None
        sizes = {"total_parameters": self.model.num_parameters(), **split.metadata}
        return files, {"metadata": sizes, "weight_map": split.tensor_to_filename}

    def _write_file(self, path: Path, shapes: Shapes, tensors: Iterator[Tensor]) -> None:
        """Write one safetensors file, whose header comes before its tensors."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + torch.Size(shape).numel() * self.types[name].itemsize
            header[name] = {"dtype": NAMES[self.types[name]], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            write_tensors(file, tensors, [self.types[name] for name in shapes])

    def _write_whole(self, directory: Path) -> None:
        """Let transformers write all weights at once, tied ones as one tensor under each of their names."""
        merged = zip(self._names, self._merged(), strict=True)
        state = {name: each.to("cpu", self.types[name]) for name, each in merged}
        names = {each: name for name, each in own_weights(self.model).items()}
        live = self.model.state_dict(keep_vars=True)
        self.model.save_pretrained(
            directory, state_dict={name: state[names[each]] for name, each in live.items() if each in names}
        )


def write_tensors(file: BinaryIO, tensors: Iterator[Tensor], types: Iterable[torch.dtype]) -> None:
    """Write the next tensors' numbers as these types, in pieces: each is written while the next comes to the CPU.

    A GPU casts them and copies them into pinned memory, on the current stream.
    """
    buffers: deque[Tensor] = deque()  # the oldest first, as in `pending`
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "writing") as writer:
        for dtype in types:
            tensor = next(tensors)
            for piece in torch.split(tensor.flatten(), BUFFER_BYTES // dtype.itemsize):
                if len(pending) == BUFFERS:
                    pending.popleft().result()
                    buffers.rotate(-1)
                else:
                    buffers.append(torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=piece.is_cuda))
                part = buffers[-1].view(dtype)[: len(piece)]
                part.copy_(piece, non_blocking=True)
                copied = torch.cuda.current_stream().record_event() if piece.is_cuda else None
                pending.append(writer.submit(_write_piece, file, part, copied))
                del piece
            del tensor  # before the next is gathered
        for each in pending:
            each.result()


def _write_piece(file: BinaryIO, piece: Tensor, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    file.write(piece.view(torch.uint8).numpy().data)


def _layer_by_layer(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which layer 2 comes before layer 10, as transformers sorts weights into files."""
    return [(False, int(part), "") if part.isdigit() else (True, 0, part) for part in name.split(".")]
