"""Keys and values of the responses being decoded: one row of the buffers per slot, every row from position 0.

`SlotCache` is a transformers cache, so any module that takes one can be decoded slot by slot. Before each forward pass
the engine says which kind it is:

* A prefill attends only among its own tokens. It writes each of its sequences into one or more new rows.
* A decode writes one token per row, each at its own position, and attends to the row so far. Its mask hides whatever
  lies behind a row's position.

Which row belongs to which response is up to the engine.
"""

from __future__ import annotations

import dataclasses

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

WIDTH_MULTIPLE = 32  # a width that is not a multiple of the vector length gives other roundings

# The longest context decides a decode's width. A shorter context in it must be summed in the same order at every width
# that is used, and the libraries choose the order. MKL sums up to 192 numbers one after the other, and divides more by
# rules of each processor's own. torch's attention gives it 512 positions at a time, so of these only 192, or all, may
# be used. torch computes a product of fewer than 400 multiplications in its own loop: hence a multiple of 64.
DECODE_MULTIPLE = 64
SUMMED_IN_ORDER = 192
ATTENTION_BLOCK = 512


def bucketed(width: int, multiple: int = WIDTH_MULTIPLE) -> int:
    """Round `width` up to a multiple."""
    return -(-width // multiple) * multiple


def decode_width(width: int) -> int:
    """Round `width` up to one that a decode by torch's attention may have."""
    blocks, rest = divmod(bucketed(width, DECODE_MULTIPLE), ATTENTION_BLOCK)
    return blocks * ATTENTION_BLOCK + (rest if rest <= SUMMED_IN_ORDER else ATTENTION_BLOCK)


class PrefillDone(Exception):
    """Ends a module's forward pass once every layer's keys and values are written, which is all that a prefill is for.

    It saves the last layer's attention and MLP of every token, which are much of the work in a small module.
    """


@dataclasses.dataclass
class _Write:
    """Where the current forward pass puts its keys and values."""

    first_row: int
    rows: int
    width: int  # columns that the forward attends to
    positions: torch.Tensor | None = None  # (rows,) in a decode; None in a prefill
    sources: torch.Tensor | None = None  # (rows,) in a prefill: the sequence that each row gets
    layers_left: int = 0  # layers that a prefill has yet to write
    flat_index: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)

    def rows_of(self, heads: int, capacity: int) -> torch.Tensor:
        """Return the new tokens' places (rows * heads,) in a buffer flattened to (slots * heads * capacity, dim)."""
        index = self.flat_index.get((heads, capacity))
        if index is None:
            assert self.positions is not None
            first = torch.arange(0, self.rows * heads * capacity, capacity, device=self.positions.device)
            index = (first.view(self.rows, heads) + self.positions[:, None]).view(-1)
            self.flat_index[heads, capacity] = index
        return index


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer's buffers, (slots, kv_heads, capacity, dim)."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.keys: torch.Tensor
        self.values: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        slots, capacity = self._cache.slots, self._cache.capacity
        # Zeros, not empty: uninitialised memory may hold NaN, and attention's sum would be NaN in spite of the mask.
        self.keys = key_states.new_zeros(slots, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = self._cache.write
        if write.positions is None:
            rows = slice(write.first_row, write.first_row + write.rows)
            self.keys[rows, :, : write.width] = key_states[write.sources]
            self.values[rows, :, : write.width] = value_states[write.sources]
            write.layers_left -= 1
            if not write.layers_left:
                raise PrefillDone
            return key_states, value_states
        return self._append(self.keys, key_states, write), self._append(self.values, value_states, write)

    def _append(self, buffer: torch.Tensor, states: torch.Tensor, write: _Write) -> torch.Tensor:
        _, heads, capacity, dim = buffer.shape
        buffer.view(-1, dim).index_copy_(0, write.rows_of(heads, capacity), states.reshape(-1, dim))
        return buffer[: write.rows, :, : write.width]

    def grown(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both buffers with `capacity` columns."""
        more = (0, 0, 0, capacity - self.keys.shape[2])
        return torch.nn.functional.pad(self.keys, more), torch.nn.functional.pad(self.values, more)

    # transformers calls these to make a mask. Only in a prefill does the module make its own mask, and there nothing
    # lies before its tokens.
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """A cache of `slots` rows of at most `limit` positions. Memory grows with the positions in use."""

    def __init__(self, layers: int, *, slots: int, limit: int) -> None:
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])
        self.slots = slots
        self.capacity = 0
        self.write: _Write
        self._limit = limit

    def prefill(self, first_row: int, sources: torch.Tensor, width: int) -> None:
        """Prepare for a forward pass that reads sequences of `width` tokens, and ends with `PrefillDone`.

        The rows from `first_row` on get the sequences that `sources` (rows,) numbers.
        """
        self._reserve(width)
        self.write = _Write(first_row, len(sources), width, sources=sources, layers_left=len(self.layers))

    def decode(self, positions: torch.Tensor, width: int) -> None:
        """Prepare for a forward pass that writes one token into each of the first rows, at `positions` (rows,)."""
        self._reserve(width)
        self.write = _Write(0, len(positions), width, positions=positions)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def erase(self, row: int) -> None:
        """Zero a row that may hold numbers that are not finite. A mask does not keep those out of a sum."""
        for layer in self.layers:
            layer.keys[row].zero_()
            layer.values[row].zero_()

    def _reserve(self, width: int) -> None:
        if width <= self.capacity:
            return
        capacity = decode_width(min(max(width, 2 * self.capacity), self._limit))
        used = [layer for layer in self.layers if layer.is_initialized]
        for layer, buffers in zip(used, [layer.grown(capacity) for layer in used], strict=True):
            layer.keys, layer.values = buffers  # last, so that all layers keep their old buffers if memory runs out
        self.capacity = capacity
