"""Checks a weight snapshot before it is sent to a server that is not ours.

Real servers trust what they are given. A file that is cut off, or a tensor of another shape, crashes them. A missing
tensor leaves a mix of two models that answers as if nothing had happened. So a snapshot is compared with the model
directory that the server was started with. Only the headers of safetensors files are read, never a tensor. That numbers
are finite is up to the publisher, and backends do the sending.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

from spot_async.errors import DataError
from spot_async.models.files import files_signature
from spot_async.models.small_files import CONFIG_FILE, read_json
from spot_async.models.weight_files import FLOATING, SINGLE_FILE, Header, names_in_model, weight_files, weight_headers

TIED_SUFFIX = "lm_head.weight"  # a model with tied embeddings may leave this out


Layout = Mapping[str, Header]  # all tensors of a directory, by name


async def ties_embeddings(directory: Path) -> bool:
    """Return whether a model's output layer is its embedding. Raises `DataError` for files that cannot be read."""
    return await asyncio.to_thread(lambda: _model_layout(directory, files_signature(weight_files(directory)))[1])


async def check_snapshot(directory: str | Path, like: str | Path) -> Layout:
    """Check that `directory` has exactly the weights of the model in `like`; return its layout.

    Raises `DataError`, in one line that names the first tensor or file at fault: files missing, cut off or too many;
    tensors missing, unknown, given twice, of another shape, or of a type that servers do not convert. The tied output
    layer may be left out. Runs in a thread.
    """
    return await asyncio.to_thread(_check, Path(directory), Path(like))


def _check(directory: Path, like: Path) -> Layout:
    if not directory.is_dir():
        raise DataError(f"{directory}: no such weight directory")
    files = weight_files(directory)
    others = sorted({*directory.glob("*.safetensors")} - {*files})
    if others and files == [directory / SINGLE_FILE]:  # without an index servers load all there are
        raise DataError(f"{others[0]}: is no part of the weights, but servers would load it too; remove it")
    found = weight_headers(directory)
    expected, tied = _model_layout(like, files_signature(weight_files(like)))
    compare(directory, found, expected, tied=tied)
    return found


def compare(directory: Path, found: Layout, expected: Layout, *, tied: bool) -> None:
    """Raise `DataError` for the first tensor, by name, in which `found` differs from `expected`.

    With `tied` embeddings either may lack the output layer. What a server computes does not count, and `expected` may
    lack a base model's prefix, since transformers publishes neither.
    """
    expected = {name: expected[other] for name, other in names_in_model(expected, found).items()}
    found = {name: found[other] for name, other in names_in_model(found, expected).items()}

    def needed(names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if not (tied and name.endswith(TIED_SUFFIX)))

    if missing := needed(expected.keys() - found.keys()):
        raise DataError(f"{directory}: tensor {missing[0]!r} is missing ({len(missing)} of {len(expected)} in all)")
    if unknown := needed(found.keys() - expected.keys()):
        raise DataError(f"{directory}: tensor {unknown[0]!r} is not one of the served model's ({len(unknown)} in all)")
    for name in sorted(found.keys() & expected.keys()):
        ours, served = found[name], expected[name]
        if ours.shape != served.shape:
            raise DataError(
                f"{directory}: tensor {name!r} has shape {ours.shape}, the served model's has {served.shape}"
            )
        if ours.dtype != served.dtype and not {ours.dtype, served.dtype} <= FLOATING:  # between which servers convert
            raise DataError(f"{directory}: tensor {name!r} is {ours.dtype}, the served model's is {served.dtype}")


@functools.lru_cache(maxsize=8)
def _model_layout(like: Path, signature: object) -> tuple[Layout, bool]:
    """Return the served model's tensors, and whether its output layer is its embedding.

    `signature` makes the cache miss when files have been replaced.
    """
    layout = weight_headers(like)
    has_output_layer = any(name.endswith(TIED_SUFFIX) for name in layout)
    return layout, not has_output_layer or _ties_embeddings(like)


def _ties_embeddings(directory: Path) -> bool:
    config = read_json(directory / CONFIG_FILE)
    inner = config.get("text_config", config)
    return bool(inner.get("tie_word_embeddings", False)) if isinstance(inner, dict) else False
