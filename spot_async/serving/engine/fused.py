"""The engine's own forward pass of plain pre-norm decoders (Llama, Qwen2, Qwen3, Mistral and the like).

They have RMSNorm, rotary positions, grouped-query attention with or without biases and q/k norms, and SwiGLU. In a
small model the number of operations, not their arithmetic, takes the time of a step. So projections of the same input
are one product, a layer works in place where it can, and a prefill ends with the last layer's keys and values.

The module's parameters become views of the fused weights, so there is one copy and a weight update reaches both.
`model.py` finds out by trying whether a module may be run this way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from spot_async.serving.engine.cache import DECODE_MULTIPLE, SUMMED_IN_ORDER, bucketed
from spot_async.serving.engine.model import CausalModel, logprob_gap
from spot_async.serving.engine.weights import Products

TOLERANCE_NATS = 1e-4

_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class _Norm(NamedTuple):
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class _Layer(NamedTuple):
    """One layer's tensors: H query heads, G key/value heads, d numbers per head, I inner numbers, D hidden numbers."""

    number: int
    attention_norm: _Norm
    qkv: torch.Tensor  # ((H + 2 G) d, D)
    qkv_bias: torch.Tensor | None
    head_norms: _Norm | None  # weights (2, d): of queries, of keys
    output: torch.Tensor  # (H d, D), transposed
    output_bias: torch.Tensor | None
    mlp_norm: _Norm
    gate_up: torch.Tensor  # (2 I, D)
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # (I, D), transposed
    down_bias: torch.Tensor | None


def fused(model: CausalModel) -> CausalModel:
    """Return `model` with this forward pass if it gives the same log-probabilities, else `model` as it is."""
    if not FusedModel.fits(model.module):
        return model
    faster = FusedModel(model)
    return faster if logprob_gap(faster) <= TOLERANCE_NATS else model


class FusedCache:
    """Keys (layers, slots, G, d, capacity) and values (layers, slots, G, capacity, d), as attention reads them.

    Memory grows with the positions in use. Which row belongs to which response is up to the engine.
    """

    def __init__(self, layers: int, *, slots: int, heads: int, dim: int, limit: int, like: torch.Tensor) -> None:
        # Zeros, not empty: uninitialised memory may hold NaN, and attention's sum would be NaN in spite of the mask.
        self.keys = like.new_zeros(layers, slots, heads, dim, 0)
        self.values = like.new_zeros(layers, slots, heads, 0, dim)
        self.capacity = 0
        self._limit = limit

    def reserve(self, width: int) -> None:
        if width <= self.capacity:
            return
        # Not twice as many: what lies unused between the rows makes a decode slower.
        capacity = max(width, bucketed(min(5 * self.capacity // 4, self._limit)))
        more = capacity - self.capacity
        keys, values = F.pad(self.keys, (0, more)), F.pad(self.values, (0, 0, 0, more))
        self.keys, self.values, self.capacity = keys, values, capacity  # last: memory may run out before

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def erase(self, row: int) -> None:
        """Zero a row that may hold numbers that are not finite. A mask does not keep those out of a sum."""
        self.keys[:, row].zero_()
        self.values[:, row].zero_()


class FusedModel(CausalModel):
    """A `CausalModel` with this forward pass in place of the Hugging Face module's."""

    def __init__(self, model: CausalModel) -> None:
        self.__dict__.update(model.__dict__)
        base = self._base
        attention = base.layers[0].self_attn
        self._dim: int = attention.head_dim
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._query_heads = attention.q_proj.out_features // self._dim
        self._scale: float = attention.scaling
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = [_fuse(number, layer) for number, layer in enumerate(base.layers)]
        self._norm = _norm(base.norm)
        positions = torch.arange(self.max_context_tokens, device=self.device)
        cos, sin = base.rotary_emb(self._embedding, positions[None])  # (1, positions, d) each
        half = self._dim // 2
        self._cos: torch.Tensor = cos[0, :, None]  # (positions, 1, d)
        # This is multiplied with a head whose halves are swapped.
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)[:, None]
        self._norm_of_head = torch.tensor([0] * self._query_heads + [1] * self._kv_heads, device=self.device)

    @staticmethod
    def fits(module: Any) -> bool:
        """Return whether the module has exactly the parts that this forward pass knows."""
        base = module.base_model
        return (
            module.dtype == torch.float32  # with fewer bits, attention's products would have to be summed in more
            and _children(base) == _BASE
            and type(base.embed_tokens) is nn.Embedding
            and all(_layer_fits(layer) for layer in base.layers)
        )

    @property
    def products(self) -> Products:
        names = {layer: name for name, layer in self._adaptable().items()}
        return {
            (number, product): [names[linear] for linear in linears]
            for number, layer in enumerate(self._base.layers)
            for product, linears in _products(layer.self_attn, layer.mlp).items()
        }

    def padded_width(self, width: int) -> int:
        return bucketed(width, DECODE_MULTIPLE) if self.is_deterministic else bucketed(width)

    def new_cache(self, slots: int) -> FusedCache:  # type: ignore[override]
        return FusedCache(
            self.layers,
            slots=slots,
            heads=self._kv_heads,
            dim=self._dim,
            limit=self.max_context_tokens,
            like=self._embedding,
        )

    def hidden(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        n, width = token_ids.shape
        computed = F.pad(rows, (0, self.padded_rows(len(rows)) - len(rows)))
        x = self._embed(token_ids)
        for layer in self._layers:
            attended = self._attend_causally(*self._sequence_heads(layer, x, n, width))
            if layer is self._layers[-1]:  # after attention each row is computed by itself, and only some are wanted
                x, attended, self._adapted = x[computed], attended[computed], self._adapted.at(computed)
            x = self._mlp(layer, self._project(layer, x, attended))
        return self._norm(x)[: len(rows)]

    def prefill(self, token_ids: torch.Tensor, cache: FusedCache, first_row: int, sources: torch.Tensor) -> None:
        n, width = token_ids.shape
        cache.reserve(width)
        rows = slice(first_row, first_row + len(sources))
        x = self._embed(token_ids)
        for number, layer in enumerate(self._layers):
            query, key, value = self._sequence_heads(layer, x, n, width)
            cache.keys[number][rows, :, :, :width] = key.transpose(2, 3)[sources]
            cache.values[number][rows, :, :width] = value[sources]
            if number < len(self._layers) - 1:
                x = self._mlp(layer, self._project(layer, x, self._attend_causally(query, key, value)))

    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor, width: int, cache: FusedCache) -> torch.Tensor:
        cache.reserve(width)
        n, heads, dim = len(token_ids), self._kv_heads, self._dim
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)  # (n, 1, d)
        seen = torch.where(self._columns[:width] <= positions[:, None], self._shown, self._masked)  # (n, width)
        mask = seen[:, None].expand(n, heads, width).reshape(n * heads, 1, width)
        place = positions[:, None, None, None].expand(n, heads, dim, 1)
        x = self._embedding.index_select(0, token_ids)
        for layer, all_keys, all_values in zip(self._layers, cache.keys, cache.values, strict=True):
            query, key, value = self._heads(layer, x, cos, sin)
            keys, values = all_keys[:n], all_values[:n]
            keys.scatter_(3, place, key[..., None])
            values.scatter_(2, place.transpose(2, 3), value[:, :, None])
            # The queries of one key/value head are rows of one product, so keys and values need not be copied.
            scores = torch.baddbmm(
                mask.expand(-1, self._query_heads // heads, -1),
                query.reshape(n * heads, -1, dim),
                keys[..., :width].flatten(0, 1),
                alpha=self._scale,
            )
            attended = self._weighted(scores.softmax(-1), values[:, :, :width].flatten(0, 1))  # (n G, H / G, d)
            x = self._mlp(layer, self._project(layer, x, attended.view(n, -1)))
        return self._norm(x)

    # -- the parts of a layer; x is (rows, D) --

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding.index_select(0, token_ids.flatten())

    def _heads(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries (rows, H, d), keys and values (rows, G, d), with queries and keys rotated."""
        normed = layer.attention_norm(x)
        projected = F.linear(normed, layer.qkv, layer.qkv_bias)
        self._adapted.add((layer.number, "qkv"), normed, projected)
        projected = projected.view(len(x), -1, self._dim)
        queries, keys = self._query_heads, self._kv_heads
        turned = projected[:, : queries + keys]
        if layer.head_norms is not None:
            weights, eps = layer.head_norms
            turned = F.rms_norm(turned, (self._dim,), None, eps).mul_(weights.index_select(0, self._norm_of_head))
        turned = (turned * cos).addcmul_(turned.roll(self._dim // 2, -1), sin)
        return turned[:, :queries], turned[:, queries:], projected[:, queries + keys :]

    def _sequence_heads(
        self, layer: _Layer, x: torch.Tensor, n: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same as `_heads` for n sequences: (n, H or G, width, d)."""
        cos, sin = (table[:width].repeat(n, 1, 1) for table in (self._cos, self._sin))
        query, key, value = self._heads(layer, x, cos, sin)

        def by_sequence(heads: torch.Tensor) -> torch.Tensor:
            return heads.reshape(n, width, -1, self._dim).transpose(1, 2)

        return by_sequence(query), by_sequence(key), by_sequence(value)

    def _weighted(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the product of weights (n, h, width) and values (n, width, d), with sums in the positions' order."""
        at_once = SUMMED_IN_ORDER if self.is_deterministic else weights.shape[-1]
        first, *others = zip(torch.split(weights, at_once, 2), torch.split(values, at_once, 1), strict=True)
        total = torch.bmm(*first)
        for each in others:
            total.baddbmm_(*each)
        return total

    def _attend_causally(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return what each row attends to, (rows, H d)."""
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale, enable_gqa=True)
        return attended.transpose(1, 2).reshape(-1, self._query_heads * self._dim)

    def _project(self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x.addmm_(attended, layer.output)
        self._adapted.add((layer.number, "output"), attended, x)
        return x if layer.output_bias is None else x.add_(layer.output_bias)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        normed = layer.mlp_norm(x)
        gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
        self._adapted.add((layer.number, "gate_up"), normed, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        x.addmm_(inner, layer.down)
        self._adapted.add((layer.number, "down"), inner, x)
        return x if layer.down_bias is None else x.add_(layer.down_bias)


def _layer_fits(layer: Any) -> bool:
    if _children(layer) != _LAYER or _children(layer.mlp) != _MLP:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if _children(attention) not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS) or not hasattr(attention, "scaling"):
        return False
    products = _products(attention, mlp).values()
    dim = getattr(attention, "head_dim", None)
    return (
        all(type(linear) is nn.Linear for linears in products for linear in linears)
        and all(len({linear.bias is None for linear in linears}) == 1 for linears in products)
        and attention.k_proj.out_features == attention.v_proj.out_features
        and all(_norm_fits(getattr(attention, name), dim) for name in _HEAD_NORMS & _children(attention))
        and all(_norm_fits(norm, None) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    )


def _products(attention: Any, mlp: Any) -> dict[str, list[nn.Linear]]:
    """Return the layers that one product computes, by the product's name."""
    return {
        "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
        "output": [attention.o_proj],
        "gate_up": [mlp.gate_proj, mlp.up_proj],
        "down": [mlp.down_proj],
    }


def _norm_fits(norm: Any, size: int | None) -> bool:
    return hasattr(norm, "variance_epsilon") and (size is None or tuple(norm.weight.shape) == (size,))


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _fuse(number: int, layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _fuse_linears([mlp.gate_proj, mlp.up_proj])
    normed = _children(attention) >= _HEAD_NORMS
    return _Layer(
        number=number,
        attention_norm=_norm(layer.input_layernorm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        head_norms=_fuse_head_norms(attention.q_norm, attention.k_norm) if normed else None,
        output=attention.o_proj.weight.t(),
        output_bias=attention.o_proj.bias,
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight.t(),
        down_bias=mlp.down_proj.bias,
    )


def _fuse_linears(linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join several layers' weights and biases into one each. The modules keep views of them."""
    weight = _fuse_parameters([linear.weight for linear in linears])
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return weight, _fuse_parameters(biases) if biases else None


def _fuse_head_norms(query: Any, key: Any) -> _Norm:
    return _Norm(_fuse_parameters([query.weight, key.weight]).view(2, -1), query.variance_epsilon)


def _fuse_parameters(parameters: list[torch.Tensor]) -> torch.Tensor:
    fused = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)
