"""Tokenizers are those that transformers chooses, and the text of token ids is transformers', whoever makes it."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from spot_async.errors import DataError
from spot_async.models.model_size import SIZED
from spot_async.models.vocabulary import Vocabulary, load_tokenizer, tokenizer_fingerprint, without_code

ROOT = Path(__file__).parent.parent.parent
DIRECTORIES = ["examples/running_sum/student", "experiments/mechanism/relay/student", "tests/recorded/openai"]


@pytest.fixture(scope="module", params=DIRECTORIES)
def tokenizer(request):
    return AutoTokenizer.from_pretrained(ROOT / request.param)


@functools.cache
def cleaning_tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / DIRECTORIES[0], clean_up_tokenization_spaces=True)


def assert_same_text(tokenizer, token_ids):
    vocabulary = Vocabulary(tokenizer, (1,))
    ids = np.array(token_ids, np.int32)
    assert vocabulary.decode(ids) == tokenizer.decode(token_ids, skip_special_tokens=True)
    assert vocabulary.whole_text(ids) == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_each_id_has_the_text_that_transformers_gives_it(tokenizer):
    assert Vocabulary(tokenizer, (1,))._decode == tokenizer.backend_tokenizer.decode
    for token_id in range(len(tokenizer) + 3):  # and those beyond the last, with which a softmax is padded
        assert_same_text(tokenizer, [token_id])


@given(places=st.lists(st.floats(0, 1, exclude_max=True), max_size=40))
def test_responses_have_the_text_that_transformers_gives_them(tokenizer, places):
    assert_same_text(tokenizer, [int(place * (len(tokenizer) + 3)) for place in places])


@given(places=st.lists(st.floats(0, 1, exclude_max=True), max_size=20))
def test_a_tokenizer_that_cleans_up_spaces_goes_on_doing_so(places):
    cleaned = cleaning_tokenizer()
    assert Vocabulary(cleaned, (1,))._decode == cleaned.decode
    assert_same_text(cleaned, [int(place * len(cleaned)) for place in places])


def variant(directory, name, **changes):
    """Change keys of a directory's JSON file; those that are set to None are taken out."""
    values = json.loads((directory / name).read_text()) | changes
    (directory / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def model(tmp_path, random_architecture):
    """Makes a directory of a kind of model, with a tokenizer."""

    def make(kind):
        directory = shutil.copytree(random_architecture(kind), tmp_path / kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / DIRECTORIES[0] / name, directory)
        return directory

    return make


@pytest.mark.parametrize("kind", [*SIZED, "gemma2", "gpt2"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast", "Unknown", None])
def test_a_tokenizer_is_of_the_class_that_transformers_chooses(model, kind, name):
    directory = model(kind)
    variant(directory, "tokenizer_config.json", tokenizer_class=name)
    own, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert type(own) is type(theirs)
    assert own.name_or_path == theirs.name_or_path
    assert tokenizer_fingerprint(own) == tokenizer_fingerprint(theirs)
    assert own.encode("12 + 7 =") == theirs.encode("12 + 7 =")


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "nonsense"},
        {"model_type": ["llama"]},
        {"rms_norm_eps": "small"},
        {"num_hidden_layers": "many"},
        {"layer_types": ["nonsense"] * 2},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_what_transformers_refuses_is_refused_in_its_words(model, kind, config):
    directory = model(kind)
    variant(directory, "config.json", **config)
    with pytest.raises(Exception, match=r"\S") as theirs:
        AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    with pytest.raises(DataError) as own:
        load_tokenizer(directory)
    assert str(own.value) == f"{directory}: has no tokenizer that can be loaded: {without_code(theirs.value)}"
