"""A model directory's small files: configuration, tokenizer, chat templates. What they are, and what is published.

A published student has its own, byte for byte but for what training changes: readers of other versions of transformers
understand what they were given, and not what this one would write.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from spot_async.base import files
from spot_async.base.files import read_bounded, reading, refuse_pointer
from spot_async.base.text import shortened
from spot_async.base.writers import refuse_foreign_writers
from spot_async.errors import DataError

CONFIG_FILE, GENERATION_CONFIG = "config.json", "generation_config.json"
TEMPLATES = "additional_chat_templates"  # a folder
PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe", "*.spm", "tokenizer.*", "LICENSE*")
MAX_SMALL_BYTES, MAX_SMALL_VALUES = 64 << 20, 4_000_000  # the largest tokenizers have half of that
# Keys of config.json whose value is a size or, in the first group, a number of modules that are made one by one.
SIZE_KEY = re.compile(
    r"^(?:(num_(?:hidden_)?layers|n_layers?|num_(?:local_|routed_)?experts|n_routed_experts)|vocab_size|hidden_size|"
    r"intermediate_size|moe_intermediate_size|num_attention_heads|num_key_value_heads|head_dim|n_embd|n_head|n_inner|"
    r"max_position_embeddings|n_positions|n_ctx)$"
)
MAX_SIZE, MAX_MODULES = 1 << 28, 4096
DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5, and of all versions


def is_small(name: str) -> bool:
    """Whether a file of a model directory is one of those, by its name in the directory."""
    folder, _, last = name.rpartition("/")
    if folder:
        return folder == TEMPLATES and last.endswith(".jinja")
    return any(fnmatch(name, each) for each in PATTERNS) and not name.endswith((".index.json", ".safetensors"))


def small_files(directory: Path) -> list[Path]:
    """Return those files of a model directory, in order."""
    found = [*directory.iterdir(), *(directory / TEMPLATES).glob("*")]
    return sorted(each for each in found if is_small(each.relative_to(directory).as_posix()) and each.is_file())


def refuse_foreign_files(directory: Path) -> None:
    """Raise `DataError` if another user could change a file of a model directory, its weights included."""
    files = [*directory.iterdir(), *(directory / TEMPLATES).glob("*")]
    refuse_foreign_writers([directory, *filter(Path.is_file, files)])


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, which is empty where there is no file. Raises `DataError`."""
    if not path.exists():
        return {}
    refuse_pointer(path)
    found = files.read_json(path, dict[str, Any], otherwise="cannot be read as a JSON object")
    if path.name == CONFIG_FILE:
        _refuse_sizes(found, path)
    return found


def refuse_large(directory: Path) -> None:
    """Raise `DataError` for a small file that is none, or whose values would take gigabytes of memory."""
    for path in small_files(directory):
        refuse_pointer(path)
        with reading(path):
            data = read_bounded(path, MAX_SMALL_BYTES)
        if max(map(data.count, (b",", b"[", b"{", b"\n"))) > MAX_SMALL_VALUES:
            raise DataError(f"{path}: has more than {MAX_SMALL_VALUES:,} values")


def _refuse_sizes(config: dict[str, Any], path: Path) -> None:
    """Raise `DataError` for a size that no model has: transformers would take all time or memory for it."""
    for key, value in config.items():
        if isinstance(value, dict):
            _refuse_sizes(value, path)
        elif (named := SIZE_KEY.search(key)) is not None and isinstance(value, int | float | str):
            most = MAX_SIZE if named[1] is None else MAX_MODULES
            if not isinstance(value, int) or not -1 <= value <= most:
                raise DataError(f"{path}: {key}={shortened(repr(value), 40)} is no whole number up to {most:,}")


def publish_small_files(
    student: Path, directory: Path, *, architecture: str, dtype: str, end_token_ids: Collection[int]
) -> None:
    """Write a student's small files beside new weights: those of `student`, for a model class and a type of weights.

    A response ends with any of `end_token_ids`; without them, as before. Raises `OSError` and `DataError`.
    """
    for file in small_files(student):
        copy = directory / file.relative_to(student)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    config = read_json(student / CONFIG_FILE)
    changed = _with_dtype(config, dtype) | {"architectures": [architecture]}
    if not changed.keys() & {*DTYPE_KEYS}:
        changed["torch_dtype"] = dtype
    if changed != config:
        _write(directory / CONFIG_FILE, changed)
    generation = read_json(student / GENERATION_CONFIG)
    if end_token_ids:
        own = generation.get("eos_token_id")
        if {*(own if isinstance(own, list) else [own])} != {*end_token_ids}:
            others = generation or {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
            _write(directory / GENERATION_CONFIG, others | {"eos_token_id": list(end_token_ids)})


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration whose weights are of a type, as those of its parts (`text_config`)."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in DTYPE_KEYS:
            changed[key] = dtype
        elif isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            changed[key] = _with_dtype(value, dtype)
        else:
            changed[key] = value
    return changed


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
