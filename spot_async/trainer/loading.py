"""Loads the student: first without memory for its parameters, then what this rank holds of them, from the files.

So no rank holds the model twice, and one that holds a part reads that part. On a CPU float32 parameters are views of
the mapped file, which ranks share until they change them.

Some files do not hold just the model's parameters, as those of mixtures whose experts transformers stacks. Those models
are loaded whole, as transformers does it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spot_async.base.processes.resources import without_gc
from spot_async.errors import DataError
from spot_async.models.causal_model import (
    LOADING_ERRORS,
    check_files,
    check_rope,
    load_whole,
    read_config,
)
from spot_async.models.vocabulary import without_code
from spot_async.models.weight_files import names_in_model, weight_files, weight_shapes
from spot_async.trainer.lora import own_weights
from spot_async.trainer.parallel import local, offsets


@without_gc()  # loading imports the model's architecture
def new_student(directory: str, longest: int | None = None) -> PreTrainedModel:
    """Return the causal model of a Hugging Face directory: float32, training mode, no dropout.

    Its parameters are on the meta device until `read_parameters`, or else it is whole, on the CPU. It is trained on
    sequences of up to `longest` tokens; None: of its whole context.

    Raises `DataError` if it cannot be loaded, if its files are not a whole model, or if the architecture does something
    between hidden states and logits that `ResponseLogprobs` would leave out (soft caps, scales).
    """
    path = Path(directory)
    try:
        model = _without_memory(path)
        if model is None or not _is_right_in_passing(model, directory):
            model = _to_train(load_whole(path, dtype=torch.float32))
            if not _is_finite(model, directory):
                raise DataError(f"{directory}: computes numbers that are not finite: its weights are damaged")
        check_rope(path, model, longest)
    except DataError as error:
        raise DataError(f"student {error}") from error
    except LOADING_ERRORS as error:
        raise DataError(f"student {directory} cannot be loaded: {without_code(error)}") from error
    return model


@torch.no_grad()
def read_parameters(model: nn.Module, directory: str, device: torch.device) -> None:
    """Give parameters on the meta device their memory on `device`, and read this rank's part of them."""
    read: dict[nn.Parameter, nn.Parameter] = {}  # tied ones once
    with ExitStack() as stack:
        for module, key, parameter, stored in list(_without_values(model, directory, stack)):
            if parameter not in read:
                # A DTensor is made on its mesh's device, also if it is to rest on the CPU.
                tensor = _like(parameter, stored[_held(parameter)].to(device, parameter.dtype)).to(device)
                read[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            setattr(module, key, read[parameter])


@contextmanager
def read_in_passing(model: PreTrainedModel, directory: str) -> Iterator[None]:
    """Let a model compute on the CPU whose parameters are on the meta device: a layer has all of its while it runs.

    What is in no layer, or in several, is there all the time.
    """
    with ExitStack() as stack:
        layer_of: dict[nn.Module, nn.Module | None] = {}
        for layer in decoder_layers(model):
            for module in layer.modules():
                layer_of[module] = None if module in layer_of else layer
        own: dict[nn.Module | None, list[tuple[nn.Module, str, nn.Parameter, Any]]] = {}
        for module, key, parameter, stored in _without_values(model, directory, stack):
            own.setdefault(layer_of.get(module), []).append((module, key, parameter, stored))

        def take(layer: nn.Module | None, *_: Any) -> None:
            read: dict[nn.Parameter, nn.Parameter] = {}  # tied ones once
            for module, key, parameter, stored in own[layer]:
                if parameter not in read:
                    read[parameter] = nn.Parameter(stored[...].to(parameter.dtype), requires_grad=False)
                setattr(module, key, read[parameter])

        def drop(layer: nn.Module | None, *_: Any) -> None:
            for module, key, parameter, _stored in own[layer]:
                setattr(module, key, parameter)

        for holder in own:
            if holder is None:
                stack.callback(drop, None)
                take(None)
            else:
                stack.callback(holder.register_forward_pre_hook(take).remove)
                stack.callback(holder.register_forward_hook(drop, always_call=True).remove)
        yield


def has_just(directory: Path, model: nn.Module) -> bool:
    """Return whether the tensors of a directory's files are a model's weights as they are.

    The files may have tied ones twice, buffers that the model computes, and a base model's names.
    """
    try:
        found = weight_shapes(directory)
    except DataError:
        return False
    live = model.state_dict(keep_vars=True)
    names = names_in_model(found, live)
    shapes = {name: found[file_name] for name, file_name in names.items()}
    own = {name: tuple(each.shape) for name, each in own_weights(model).items()}
    return own.items() <= shapes.items() and shapes.keys() <= live.keys()


def _without_memory(directory: Path) -> PreTrainedModel | None:
    """Return the model with its parameters on the meta device, or None if the files do not hold just these.

    Buffers are computed, as always, since files do not have those of rotary positions, and read where files have them.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # one that is tied stays the same
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    config = read_config(directory)
    if getattr(config, "quantization_config", None) is not None:
        return None
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return one
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    finally:
        hook.remove()
    check_files(directory, model)
    if not has_just(directory, model):
        return None
    with ExitStack() as stack:
        buffers = {name: each for name, each in own_weights(model).items() if not each.is_meta}
        for name, stored in _stored(directory, buffers, stack).items():
            if name in buffers:
                buffers[name].copy_(stored[...])
    return _to_train(model)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers, which are sharded and recomputed one by one. Empty if the model marks none."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {each for layer in layers for each in layer.modules() if each is not layer}
    return [layer for layer in layers if layer not in inner]


def _to_train(model: PreTrainedModel) -> PreTrainedModel:
    # Of transformers' own, since a student's may be one that transformers reads and refuses to write.
    model.generation_config = GenerationConfig()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):  # a float on transformers' attention layers
            module.attention_dropout = 0.0
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # torch would give this token no gradient, also where it ends each turn
    return model


def _is_right_in_passing(model: PreTrainedModel, directory: str) -> bool:
    """Whether a model on the meta device computes, as none does that reads a layer's weights beside the layer."""
    try:
        with read_in_passing(model, directory):
            return _is_finite(model, directory)
    except LOADING_ERRORS:
        return False


def _stored(directory: Path, own: Collection[str], stack: ExitStack) -> dict[str, Any]:
    """Return what files have for a model's tensors of these names. It is read when it is indexed, in the stack."""
    files: dict[str, Any] = {}
    for path in weight_files(directory) if own else ():
        file = stack.enter_context(safe_open(path, framework="pt"))
        files |= dict.fromkeys(file.keys(), file)
    return {name: files[each].get_slice(each) for name, each in names_in_model(files, own).items()}


def _without_values(
    model: nn.Module, directory: str, stack: ExitStack
) -> Iterator[tuple[nn.Module, str, nn.Parameter, Any]]:
    """Yield parameters on the meta device: module, its name for it, parameter, and what the files have for it.

    The last is read when it is indexed, until the stack ends.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.is_meta}
    stored = _stored(Path(directory), set(names.values()), stack)
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in names:
                yield module, key, parameter, stored[names[parameter]]


def _held(parameter: nn.Parameter) -> Any:
    """Return which part of a whole tensor this rank holds, as an index."""
    if not isinstance(parameter, DTensor):
        return ...
    first = offsets(parameter)[0]
    return slice(first, first + len(local(parameter)))


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """Return `part` as a tensor like `parameter`: this rank's shard of a sharded tensor, or else the whole one."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def _is_finite(model: PreTrainedModel, directory: str) -> bool:
    """Whether logits are. Raises `DataError` if they are not just the output layer's."""
    ids = torch.arange(min(4, model.config.get_text_config().vocab_size))[None]
    logits = model(input_ids=ids, use_cache=False).logits
    ours = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not logits.isfinite().all():
        return False
    if not torch.allclose(logits, ours, rtol=1e-3, atol=1e-3):
        raise DataError(f"{directory}: {type(model).__name__} changes logits after its output layer; not supported")
    return True
