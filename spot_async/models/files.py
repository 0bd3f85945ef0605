"""Reads a model directory's vocabulary, softmax size and context length.

A remote server's model needs its tokenizer and config.json here, but no weights.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_async.base.later import later
from spot_async.errors import ConfigError, DataError
from spot_async.models.hub import local_path
from spot_async.models.small_files import CONFIG_FILE, read_json, refuse_foreign_files
from spot_async.models.vocabulary import Vocabulary, untyped_config
from spot_async.models.weight_files import ADAPTER_CONFIG
from spot_async.types import PolicyContext

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# What config.json may ask of transformers: the package to import, and to install.
ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")
ATTENTION_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
WIDTH_KEYS = ("vocab_size",)
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx")


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory's files say about the model."""

    directory: Path
    vocab_size: int
    max_context_tokens: int
    vocabulary: Vocabulary

    @property
    def policy_context(self) -> PolicyContext:
        """What a policy may know. These must be the teacher's files, or the student's in a run without a teacher."""
        return PolicyContext(vocab_size=self.vocab_size, tokenizer=self.vocabulary.tokenizer)


def read_model(role: str, name: str) -> ModelFiles:
    """Read a Hugging Face directory's configuration and tokenizer.

    Unchanged files are read once per process, because a large tokenizer takes a second to read, and each backend that
    is made reads its model again.
    """
    directory = Path(local_path(name))
    if not directory.is_dir():
        raise ConfigError(f"{role}.model: {no_directory(name)}")
    try:
        refuse_foreign_files(directory)
    except DataError as error:
        raise DataError(f"{role}.model: {error}") from None
    text_config = _text_config(role, directory)
    if (directory / ADAPTER_CONFIG).is_file():
        raise DataError(
            f"{role}.model: {directory} holds an adapter beside a whole model, which transformers would lay over it: "
            f"merge the two, or take {ADAPTER_CONFIG} out"
        )
    return ModelFiles(
        directory=directory,
        vocab_size=_size(role, directory, text_config, WIDTH_KEYS),
        max_context_tokens=_size(role, directory, text_config, CONTEXT_KEYS),
        vocabulary=_vocabulary(directory, files_signature(filter(Path.is_file, directory.resolve().iterdir()))),
    )


def check_attention(role: str, directory: Path) -> None:
    """Raise ConfigError if config.json asks transformers for a kind of attention that is not installed here."""
    config = _text_config(role, directory)
    for key in ATTENTION_KEYS:
        kind = str(config.get(key, ""))
        module, package = ATTENTION_PACKAGES.get(kind, ("kernels", "kernels") if "/" in kind else ("", ""))
        if module and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{role}.model: {directory}/config.json has {key}={kind}, which is not installed here: pip install "
                f"{package}, or take the key out of the file"
            )


def softmax_width(role: str, directory: Path) -> int:
    """Return the number of rows of a model's softmax. Reads only config.json."""
    return _size(role, directory, _text_config(role, directory), WIDTH_KEYS)


def _size(role: str, directory: Path, text_config: Mapping[str, Any], keys: Sequence[str]) -> int:
    """Return a size by the first of its keys that config.json has, or by transformers' default for the architecture."""
    if (named := next((text_config[key] for key in keys if key in text_config), None)) is not None:
        if type(named) is not int or named < 1:
            raise DataError(
                f"{role}.model: {directory}/config.json has {keys[0]}={named!r}, which is no number of tokens"
            )
        return named
    with later("torch"):
        config = untyped_config(directory)
    if config is None:
        from spot_async.models.causal_model import read_config  # imports torch

        with suppress(DataError):
            config = read_config(directory)
    text = config and config.get_text_config(decoder=True)
    if (default := next((getattr(text, key) for key in keys if hasattr(text, key)), None)) is not None:
        return int(default)
    raise DataError(
        f"{role}.model: {directory}/config.json names no {keys[0]}, and transformers has no default for its model_type"
    )


def _text_config(role: str, directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG_FILE).exists():
        if (directory / ADAPTER_CONFIG).is_file():
            raise DataError(
                f"{role}.model: {directory} holds an adapter, and no whole model: give the directory of the model that "
                "it is merged into, as a run's `student` is"
            )
        said = f"{role}.model: {directory} has no config.json, so it is no Hugging Face model directory"
        raise DataError(said)
    try:
        raw = read_json(directory / CONFIG_FILE)
    except DataError as error:
        raise DataError(f"{role}.model: {error}") from None
    # Multimodal models keep the language model's part separately.
    text_config = raw.get("text_config", raw)
    return text_config if isinstance(text_config, dict) else raw


def no_directory(name: str) -> str:
    """Say that there is no such model directory, where it was looked for, and how to download a model of the hub."""
    path = Path(name)
    tried = "" if path.is_absolute() else f" ({path.absolute()})"
    said = f"no directory {name!r}{tried}; give the path of a Hugging Face model directory"
    if HUB_ID.fullmatch(name) and not path.parent.is_dir():
        hub_id = name if path.parent.name != "models" else f"OWNER/{path.name}"
        said += f", for a model of the hub after: hf download {hub_id} --local-dir models/{path.name}"
    return said


@functools.lru_cache(maxsize=8)
def _vocabulary(directory: Path, signature: object) -> Vocabulary:
    """Load the vocabulary. `signature` makes the cache miss when files have changed."""
    return Vocabulary.load(directory)


def files_signature(files: Iterable[Path]) -> object:
    """Return a hashable value that stays equal until one of the files is replaced or written to."""
    try:
        return tuple((path, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(files))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
