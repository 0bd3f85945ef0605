"""A Hugging Face causal model as the engine uses it: hidden states of slots or whole sequences, logits of chosen rows.

Nothing here is specific to an architecture. Models that the engine would serve wrong are refused in one line, and that
is found out by trying: when a model is loaded, a few tokens go through the engine's own path (padded prefill, slots,
separate output head) and must give the log-probabilities of a plain forward pass. What a few tokens cannot show
(windows, rescaled positions) is read from the configuration.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from spot_async.base.processes.resources import keep_rows_apart
from spot_async.base.text import first_line
from spot_async.config.training import TARGETS
from spot_async.errors import DataError
from spot_async.models.causal_model import check_rope, load_whole, read_config
from spot_async.serving.engine.cache import PrefillDone, SlotCache, bucketed, decode_width
from spot_async.serving.engine.weights import AdaptedRows, Adapter, Products
from spot_async.serving.settings import EngineSettings

# If a row's bits must not depend on how many rows there are, rows are computed in multiples of this. Matrix products of
# 1 to 3 rows take another path. Element-wise functions treat an array's last numbers differently if they do not fill a
# vector, and 8 rows of a multiple of 4 numbers always do.
ROW_MULTIPLE = 8
TRIAL_ROWS = 8
TRIAL_TOKENS = 12
TRIAL_TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.5}

_WINDOWED_LAYERS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_SERVED_LAYERS = {"full_attention", *_WINDOWED_LAYERS}


class _GivenHidden(torch.nn.Module):
    """Stands in for the base model: returns the hidden states it is given, in the base's own output type."""

    def __init__(self, output_type: type[Any]) -> None:
        super().__init__()
        self._output_type = output_type

    def forward(self, *args: object, inputs_embeds: torch.Tensor, **kwargs: object) -> Any:
        return self._output_type(last_hidden_state=inputs_embeds)


class CausalModel:
    """The loaded model. Not thread-safe: the engine's thread owns it."""

    def __init__(self, module: Any, *, max_context_tokens: int, name: str, is_deterministic: bool = True) -> None:
        """With `is_deterministic` a row's bits do not depend on the number and lengths of the rows beside it."""
        self.module = module
        self.name = name
        self.max_context_tokens = max_context_tokens
        self.is_deterministic = is_deterministic
        self.device: torch.device = module.device
        self.layers: int = _text_config(module).num_hidden_layers
        self._base = module.base_model
        # The head is the module's own forward pass with a stand-in for its base. So it does whatever the module does
        # between hidden states and logits (scaling, soft-capping), but only on the requested rows.
        self._head = copy.copy(module)
        stand_in = _GivenHidden(type(self._base(**self._any_token())))
        self._head._modules = {**module._modules, module.base_model_prefix: stand_in}
        self._dtype: torch.dtype = module.dtype
        self._columns = torch.arange(decode_width(max_context_tokens), device=self.device)
        self._shown = torch.tensor(0.0, dtype=self._dtype, device=self.device)  # what a mask adds to scores
        self._masked = torch.tensor(torch.finfo(self._dtype).min, dtype=self._dtype, device=self.device)
        self.vocab_size: int = module(**self._any_token()).logits.shape[-1]
        self._output_layer = module.get_output_embeddings()
        self._plain_head = self._has_plain_head()
        self._adapted = AdaptedRows()
        for name, layer in self._adaptable().items():
            layer.register_forward_hook(self._adding(name))

    @property
    def products(self) -> Products:
        """The products that can take an adapter, each with its layers' names in the model."""
        return {name: (name,) for name in self._adaptable()}

    @contextlib.contextmanager
    def adapted(self, adapters: Sequence[Adapter | None], *, repeats: int = 1) -> Iterator[None]:
        """Compute with adapters in the `with` block: one for each sequence, of `repeats` tokens; None for none."""
        self._adapted = AdaptedRows.of(adapters, repeats, self.device)
        try:
            yield
        finally:
            self._adapted = AdaptedRows()

    def padded_rows(self, rows: int) -> int:
        """Return how many rows to compute where `rows` are needed."""
        return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE if self.is_deterministic else rows

    def padded_width(self, width: int) -> int:
        """Return how many positions a decode attends to if its longest context has `width`."""
        return decode_width(width) if self.is_deterministic else bucketed(width)

    def hidden(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return hidden states (R, D) of some rows (R,) of right-padded sequences (n, L), counted through them all."""
        positions = self._columns[None, : token_ids.shape[1]]
        output: torch.Tensor = self._base(
            input_ids=token_ids, position_ids=positions, use_cache=False
        ).last_hidden_state
        return output.flatten(0, 1)[rows]

    def prefill(self, token_ids: torch.Tensor, cache: SlotCache, first_row: int, sources: torch.Tensor) -> None:
        """Read right-padded sequences (n, L) into the cache: rows from `first_row` get sequences `sources` (rows,)."""
        width = token_ids.shape[1]
        cache.prefill(first_row, sources, width)
        positions = self._columns[None, :width]
        with contextlib.suppress(PrefillDone):
            self._base(input_ids=token_ids, position_ids=positions, past_key_values=cache, use_cache=True)

    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor, width: int, cache: SlotCache) -> torch.Tensor:
        """Return hidden states (n, D) of one token (n,) per row, each at its own position (n,) below `width`."""
        cache.decode(positions, width)
        seen = self._columns[:width] <= positions[:, None]  # (n, width)
        mask = torch.where(seen, self._shown, self._masked)[:, None, None]
        output: torch.Tensor = self._base(
            input_ids=token_ids[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return output[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (R, V) of hidden rows (R, D)."""
        rows = len(hidden)
        padding = self.padded_rows(rows) - rows
        if padding:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, padding))
        output: torch.Tensor = (
            self._output_layer(hidden) if self._plain_head else self._head(inputs_embeds=hidden[None]).logits[0]
        )
        return output[:rows]

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(self.layers, slots=slots, limit=self.max_context_tokens)

    def _adaptable(self) -> Mapping[str, torch.nn.Linear]:
        return {
            name: layer
            for name, layer in self.module.named_modules()
            if type(layer) is torch.nn.Linear and name.rpartition(".")[2] in TARGETS["all"]
        }

    def _adding(self, product: Hashable) -> Callable[[torch.nn.Module, tuple[torch.Tensor], torch.Tensor], None]:
        """Return a forward hook that adds to a layer's output what the rows' adapters add."""

        def add(layer: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            self._adapted.add(product, inputs[0].flatten(0, -2), output.flatten(0, -2))

        return add

    @torch.no_grad()
    def _has_plain_head(self) -> bool:
        """Return whether the output layer's product is all that the module does between hidden states and logits."""
        layer = self._output_layer
        if layer is None:
            return False
        hidden = self._base(**self._any_token()).last_hidden_state[0].expand(TRIAL_ROWS, -1)
        return torch.equal(layer(hidden), self._head(inputs_embeds=hidden[None]).logits[0])

    def _any_token(self) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=self.device)}


def load_model(directory: Path, settings: EngineSettings) -> CausalModel:
    """Load a model directory. Raises `DataError` if it cannot be read or would be served wrong."""
    if settings.is_deterministic:
        keep_rows_apart()
    config = read_config(directory)
    module: Any = load_whole(
        directory,
        config=config,
        dtype=getattr(torch, settings.dtype),
        attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
    )
    context = _check_config(module, settings, directory)
    module.config.pad_token_id = None  # the engine pads itself, and some modules warn about padding on every call
    try:
        module = module.eval().requires_grad_(False).to(settings.device)
    except (RuntimeError, AssertionError) as error:  # torch asserts if it was not built for the device
        raise DataError(f"device={settings.device}: {first_line(error)}") from error
    model = CausalModel(
        module, max_context_tokens=context, name=str(directory), is_deterministic=settings.is_deterministic
    )
    _check_by_trying(model, TRIAL_TOLERANCE_NATS[settings.dtype])
    return model


def _check_config(module: Any, settings: EngineSettings, directory: Path) -> int:
    """Return the context length to serve. Raises `DataError` for what the engine's full attention would get wrong."""
    config = _text_config(module)
    if module.config.is_encoder_decoder:
        raise DataError(f"{directory}: {type(module).__name__} is an encoder-decoder; only decoders can be served")
    own = getattr(config, "max_position_embeddings", None)
    context = settings.max_context_tokens or own
    if context is None:
        raise DataError(f"{directory}: its config.json states no context length: set max_context_tokens")
    if own is not None and context > own:
        raise DataError(f"max_context_tokens={context} exceeds the {own} positions of {directory}")
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _SERVED_LAYERS:
        raise DataError(f"{directory}: has {min(kinds - _SERVED_LAYERS)} layers; only full attention can be served")
    window = _smallest_window(config, kinds)
    if window is not None and window < context:
        raise DataError(f"{directory}: attends to {window} tokens only: set max_context_tokens to {window} or less")
    check_rope(directory, module, context)
    return int(context)


def _smallest_window(config: Any, kinds: set[str]) -> int | None:
    names = [_WINDOWED_LAYERS[kind] for kind in kinds & _WINDOWED_LAYERS.keys()]
    if not kinds:
        names = [*_WINDOWED_LAYERS.values()]
        if "local" in (getattr(config, "attention_layers", None) or ()):
            names.append("window_size")
    windows = [getattr(config, name, None) for name in names]
    return min((window for window in windows if window is not None), default=None)


def _check_by_trying(model: CausalModel, tolerance_nats: float) -> None:
    try:
        gap = logprob_gap(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{model.name}: {type(model.module).__name__} cannot be served: {first_line(error)}") from error
    if not gap <= tolerance_nats:
        raise DataError(
            f"{model.name}: {type(model.module).__name__} cannot be served: in the engine's slots its "
            f"log-probabilities are {gap:.2g} nats off a plain forward's (it needs full attention and finite weights)"
        )


def logprob_gap(model: CausalModel) -> float:
    """Return the largest difference, in nats, between log-probabilities of the engine's path and a plain forward pass.

    NaN if either has NaN.
    """
    count = min(TRIAL_TOKENS, model.max_context_tokens)
    tokens = torch.arange(1, 2 * count + 1, device=model.device).mul(7919).remainder(model.vocab_size).view(2, count)
    half = count // 2
    rows = torch.arange(TRIAL_ROWS, device=model.device).remainder(2)
    with torch.inference_mode():
        expected = model.module(input_ids=tokens).logits.float().log_softmax(-1)
        found = _slot_logits(model, tokens, half, rows)
        whole = model.logits(model.hidden(tokens, torch.arange(2 * count, device=model.device))).view(2, count, -1)
    found_gap = (found.float().log_softmax(-1) - expected[rows, half:]).abs().amax()
    whole_gap = (whole.float().log_softmax(-1) - expected).abs().amax()
    return torch.maximum(found_gap, whole_gap).item()


def _slot_logits(model: CausalModel, tokens: torch.Tensor, half: int, rows: torch.Tensor) -> torch.Tensor:
    """Return logits (TRIAL_ROWS, count - half, V) of the trial's rows by a prefill of `half` tokens, then decodes."""
    cache = model.new_cache(TRIAL_ROWS)
    width = model.padded_width(tokens.shape[1])
    model.prefill(tokens[:, :half], cache, 0, rows)
    steps = []
    for position in range(half, tokens.shape[1]):
        positions = torch.full((TRIAL_ROWS,), position, device=model.device)
        steps.append(model.logits(model.decode(tokens[rows, position], positions, width, cache)))
    return torch.stack(steps, dim=1)


def _text_config(module: Any) -> Any:
    return module.config.get_text_config()


def quiet_transformers() -> None:
    """Keep progress bars and advice out of the server's log."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
