"""Loads causal models with transformers, and refuses directories whose files are not whole models.

transformers gives random numbers to what the files lack, and leaves out what it has no place for. No code of a
directory is run. It imports torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spot_async.errors import DataError
from spot_async.models.small_files import CONFIG_FILE, read_json
from spot_async.models.vocabulary import without_code
from spot_async.models.weight_files import FLOATING, names_in_model, weight_files, weight_headers

# What transformers raises for a config.json that is none; it checks few of the values.
LOADING_ERRORS = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError,
                  ImportError, RuntimeError, SafetensorError)  # fmt: skip


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    try:
        yield
    except LOADING_ERRORS as error:
        raise DataError(f"{directory}: cannot be loaded as a causal language model: {without_code(error)}") from error


def read_config(directory: Path) -> PreTrainedConfig:
    """Return what transformers makes of a directory's config.json. Raises `DataError`."""
    read_json(directory / CONFIG_FILE)
    with _refusing(directory):
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def load_whole(directory: Path, **settings: Any) -> PreTrainedModel:
    """Load a directory's causal model into memory. Raises `DataError` if its files are not a whole model.

    `settings` are `from_pretrained`'s.
    """
    check_files(directory, empty_model(directory))  # before anything is read: transformers unties what differs
    with _refusing(directory):
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
            **settings,
        )
    for name, found, own in sorted(report["mismatched_keys"]):
        raise _misshapen(directory, name, found, own)
    if report["missing_keys"]:
        raise _missing(directory, report["missing_keys"], weight_headers(directory))
    return model


def empty_model(directory: Path) -> PreTrainedModel:
    """Return a directory's causal model without numbers, for `check_files`. Raises `DataError`."""
    config = read_config(directory)
    with _refusing(directory), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def check_files(directory: Path, model: PreTrainedModel) -> None:
    """Raise `DataError` unless the files of a directory are the weights of its model. Only tied tensors are read.

    None may be missing, of another shape or type, unused within a layer, or differ from one that it is tied to. Where
    transformers renames or joins tensors as it loads, only `load_whole` finds the missing ones.
    """
    headers = weight_headers(directory)
    if getattr(model.config, "quantization_config", None) is not None:
        return  # the quantiser knows what its files must hold
    own = model.state_dict(keep_vars=True)
    names = names_in_model(headers, own)
    for name, file_name in names.items():
        kind, shape = headers[file_name][:2]
        if name in own and shape != tuple(own[name].shape):
            raise _misshapen(directory, file_name, shape, own[name].shape)
        if name in own and own[name].is_floating_point() and kind not in FLOATING:
            raise DataError(
                f"{directory}: tensor {file_name!r} is of type {kind}, and config.json has no quantization_config"
            )
    unknown = [file_name for name, file_name in names.items() if name not in own]
    if doubled := [name for name in unknown if f"{model.base_model_prefix}.{name}" in own]:
        raise DataError(f"{directory}: holds tensor {doubled[0]!r} with and without its prefix: take one of them out")
    there = {own[name] for name in names if name in own}
    missing = [name for name, each in own.items() if each not in there and not _matches(name, model, "missing")]
    if missing and (not unknown or not there):
        raise _missing(directory, missing, headers)
    if not missing:
        for name in unknown:
            _refuse_unused(directory, name, model)
    _check_ties(directory, own, names)


def check_rope(directory: Path, model: PreTrainedModel, longest: int | None = None) -> None:
    """Raise `DataError` if the factors of rotary positions follow the longest sequence of a pass.

    What a model computes of a sequence would depend on its neighbours. No sequence is longer than `longest` tokens; by
    default that is the model's own context.
    """
    own = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", math.inf)
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", "")  # one, or one for each kind of layer
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
            if kind != "longrope" and "dynamic" not in kind:  # of which transformers computes them in each pass
                continue
            rope: Any = module.config.rope_parameters
            original = rope.get(layers, rope).get("original_max_position_embeddings") if kind == "longrope" else own
            if original is None or (longest or own) > original:
                raise DataError(
                    f"{directory}: its {kind} rotary scaling changes with the sequence length (rope_type in "
                    f"config.json), and so with what else is in a batch, above {original} tokens: make sequences no "
                    "longer (max_context_tokens of our engine, sampling.max_response_tokens), or give another model"
                )


def _misshapen(directory: Path, name: str, found: Iterable[int], own: Iterable[int]) -> DataError:
    return DataError(f"{directory}: tensor {name!r} has shape {tuple(found)}, and by config.json {tuple(own)}")


def _missing(directory: Path, missing: Iterable[str], headers: Iterable[str]) -> DataError:
    names = sorted(missing)
    said = f"{directory}: tensor {names[0]!r} is missing ({len(names)} in all)"
    longer = next(((one, other) for one in names for other in sorted(headers) if other.endswith(f".{one}")), None)
    if longer is not None:
        one, other = longer
        said += f"; {one!r} is called {other!r} in its files: take {other.removesuffix(one)!r} out of their names"
    elif names == ["lm_head.weight"]:
        said += ": a model without one has tie_word_embeddings=true in its config.json"
    return DataError(said)


def _matches(name: str, model: PreTrainedModel, kind: str) -> bool:
    """Whether transformers knows that a model's files may lack a tensor (`missing`), or have it (`unexpected`)."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _refuse_unused(directory: Path, name: str, model: PreTrainedModel) -> None:
    """Raise `DataError` for a tensor inside the model that it does not use. Those beside it (other heads) are left out.

    It shows that config.json describes another model: fewer layers, or layers without a bias.
    """
    if _matches(name, model, "unexpected"):
        return
    module: nn.Module = model
    is_inside = False  # a numbered layer
    for part in name.split(".")[:-1]:
        is_inside |= isinstance(module, nn.ModuleList)
        inner = getattr(module, part, None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    else:
        is_inside |= not any(True for _ in module.children())
    if is_inside:
        raise DataError(
            f"{directory}: no layer uses tensor {name!r}: config.json describes another model than its files"
        )


def _check_ties(directory: Path, own: dict[str, Tensor], names: dict[str, str]) -> None:
    """Raise `DataError` if the files have one tied tensor twice, with different numbers."""
    first: dict[Tensor, str] = {}
    for name in filter(names.__contains__, own):
        other = first.setdefault(own[name], name)
        if other != name and not _are_equal(directory, names[name], names[other]):
            one, two = sorted((names[name], names[other]))
            raise DataError(
                f"{directory}: tensors {one!r} and {two!r} differ, but by config.json they are one "
                "(tie_word_embeddings=true): set it to false, or take the one that is not meant out of the files"
            )


def _are_equal(directory: Path, *names: str) -> bool:
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(directory)]
        one, two = (next(file.get_tensor(name) for file in files if name in file.keys()) for name in names)  # noqa: SIM118
        kind = min(one.dtype, two.dtype, key=lambda dtype: dtype.itemsize)  # one may be the other, rounded
        return torch.equal(one.to(kind), two.to(kind))
