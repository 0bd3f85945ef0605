"""A role's vocabulary: text of token ids, end tokens, and a fingerprint that tells tokenizers apart."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spot_async.base.later import later
from spot_async.base.text import first_line
from spot_async.errors import DataError
from spot_async.models.plain_decoder import DTYPES, plain_size
from spot_async.models.small_files import CONFIG_FILE, DTYPE_KEYS, GENERATION_CONFIG, read_json, refuse_large
from spot_async.types import IntArray

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


TOKENIZER_CONFIG = "tokenizer_config.json"
# The modules of `decode` and `_decode` as all models have them whose tokenizer is the library's.
TRANSFORMERS_DECODE = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]


class Vocabulary:
    """A model directory's tokenizer, and the ids that end a response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids
        self._decode = _decoder(tokenizer)
        self._token_text = functools.cache(lambda token_id: self._decode([token_id], skip_special_tokens=True))

    @classmethod
    def load(cls, directory: Path) -> Vocabulary:
        """Read the tokenizer, and the end tokens that it and the configuration name."""
        tokenizer = load_tokenizer(directory)
        ends = end_token_ids(directory, tokenizer)
        if not ends:
            raise DataError(f"{directory}: neither tokenizer, {GENERATION_CONFIG} nor {CONFIG_FILE} names an end token")
        return cls(tokenizer, ends)

    def decode(self, token_ids: IntArray) -> str:
        """Return the text without special tokens. Single tokens are cached: samples' records name many of them."""
        if len(token_ids) == 1:
            return self._token_text(int(token_ids[0]))
        return self._decode(token_ids.tolist(), skip_special_tokens=True)

    def whole_text(self, token_ids: IntArray) -> str:
        """Return the text with special tokens, as a prompt is read."""
        return self._decode(token_ids.tolist(), skip_special_tokens=False)

    def encode(self, text: str) -> IntArray:
        """Return the tokens (T,) of a text. Special tokens that it spells are those tokens, and no others are added."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    @functools.cached_property
    def added(self) -> re.Pattern[str]:
        """Matches what is one token as it stands. Which of these are control tokens, transformers decides."""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = [re.escape(each.content) for each in added if each.special or not each.content.isspace()]
        return re.compile("|".join(texts) or "(?!)")

    @functools.cached_property
    def fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """Return what makes a text of a list of ids: the tokenizers library itself, where transformers adds nothing to it.

    It adds a clean-up of spaces where a tokenizer asks for one, and some models' classes decode in their own way.
    """
    kind = type(tokenizer)
    methods = [getattr(getattr(kind, name, None), "__module__", None) for name in ("decode", "_decode")]
    is_plain = methods == TRANSFORMERS_DECODE and not tokenizer.clean_up_tokenization_spaces
    decode: Callable[..., str] = tokenizer.backend_tokenizer.decode if is_plain else tokenizer.decode
    return decode


def stop_token_ids(*vocabularies: Vocabulary) -> tuple[int, ...]:
    """Return all ids that end a response. A student may end with its own token or, once distilled, its teacher's."""
    return tuple(dict.fromkeys(end for vocabulary in vocabularies for end in vocabulary.end_token_ids))


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory. Raises DataError when there is none that loads."""
    if directory.is_dir():
        refuse_large(directory)
    with later("torch"):  # transformers imports it for types of weights and arrays, which no tokenizer here has
        from transformers import AutoTokenizer  # slow to import

        config = _bare_config(directory) or untyped_config(directory)
        try:
            return AutoTokenizer.from_pretrained(
                directory, config=config, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises no other class for what it cannot read
            raise DataError(f"{directory}: has no tokenizer that can be loaded: {without_code(error)}") from None


def _bare_config(directory: Path) -> PreTrainedConfig | None:
    """Return all that AutoTokenizer asks of a configuration whose kind is known, where the tokenizer's class is named.

    Without it, llama's own configuration would import torch.
    """
    from transformers import PreTrainedConfig

    try:
        config, tokenizer = read_json(directory / CONFIG_FILE), read_json(directory / TOKENIZER_CONFIG)
    except DataError:
        return None
    config = {key: value for key, value in config.items() if key != "quantization_config"}  # not the tokenizer's matter
    if "auto_map" in tokenizer or not tokenizer.get("tokenizer_class") or plain_size(config) is None:
        return None
    return PreTrainedConfig(model_type=config["model_type"], name_or_path=directory)


def untyped_config(directory: Path) -> PreTrainedConfig | None:
    """Return a directory's configuration as transformers' AutoConfig, but whose type of weights is none of torch's.

    None where AutoConfig may take another, or refuse: whoever asks it then learns what is wrong.
    """
    from transformers import CONFIG_MAPPING

    try:
        raw = read_json(directory / CONFIG_FILE)
        is_other = raw["model_type"] == "mistral" and "layer_types" in raw  # another kind for AutoConfig
        if is_other or {"auto_map", "configuration_files"} & raw.keys():
            return None
        if not {raw[key] for key in DTYPE_KEYS if key in raw} <= DTYPES:
            return None
        untyped = {key: value for key, value in raw.items() if key not in DTYPE_KEYS}
        return CONFIG_MAPPING[raw["model_type"]](**untyped, name_or_path=directory)
    except Exception:  # noqa: BLE001 - AutoConfig meets the same, and says it
        return None


def without_code(error: Exception) -> str:
    """Return why transformers cannot load a directory, in one line. Its advice to trust code is left out."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own (auto_map), which is never run: give a model that transformers itself has"
    return first_line(error)


def end_token_ids(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response by tokenizer and configuration; empty when neither names one.

    They are those of generation_config.json or, where it names none, those of config.json, as transformers has it.
    Raises `DataError` for what is no token id.
    """
    ends: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    config = read_json(directory / CONFIG_FILE)
    text = config.get("text_config")
    for name, each in (
        (GENERATION_CONFIG, read_json(directory / GENERATION_CONFIG)),
        (CONFIG_FILE, config),
        (f"text_config of {CONFIG_FILE}", text if isinstance(text, dict) else {}),
    ):
        if (found := each.get("eos_token_id")) not in (None, []):
            ends += found if isinstance(found, list) else [found]
            if not all(type(end) is int and end >= 0 for end in ends):
                raise DataError(f"{directory}: {name} has eos_token_id={found!r}, which is no token id")
            break
    return tuple(dict.fromkeys(ends))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that is equal for tokenizers that map the same ids to the same tokens."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{token_id}\t{token}\n".encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()
