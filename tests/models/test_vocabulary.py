"""The text of token ids is transformers', whoever makes it."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from spot_async.models.vocabulary import Vocabulary

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
