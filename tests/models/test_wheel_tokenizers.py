"""The laws of chunks on tokenizers of real language models, all ordered pairs of them.

`make test-tokenizers` runs these and prints what each pair came to. SPOT_TOKENIZERS_PYTHON is the interpreter of an
environment with the packages that bring the vocabularies. Their code is not run.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
import unicodedata
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from chunk_laws import assert_laws
from wheel_tokenizers import NAMES, wheel_tokenizer

from spot_async.models.chunks import UNKNOWN, Reading
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.retokenizing import Encoder
from spot_async.types import BoolArray

PYTHON = os.environ.get("SPOT_TOKENIZERS_PYTHON", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="SPOT_TOKENIZERS_PYTHON names no interpreter with vocabularies"),
]
LOGGER = logging.getLogger(__name__)
TEXTS = 100
PIECES = (  # N is a number
    "We need the smallest integer $n$ with $n^2 > N$, so $n = N$.\n",
    "\\[\\frac{N}{N} + \\sqrt{N.N} = \\boxed{N}\\]\n\n",
    "Therefore $\\sum_{k=1}^{N} k = \\frac{N(N+1)}{2} \\equiv N \\pmod{N}$, which isn't N.  ",
    "**Step N.** Let's rationalise the denominator; we've 10,N,N of them, or N%.\r\n",
    "def total(x: int) -> float:\n    return [x**2 % N for x in range(N, -N)]  # N.N\n\n",
    "```python\n\tif count >= N and 0xN:\n\t\tprint(f\"{total:,.2f}\", end='')\n```\n",
    "| $x$ | N | N |\n|-----|---|---|\n<answer>N</answer>",
    "Σ_{i≤N} aᵢ² ≥ N·π, x ∈ ℝ, ∠ABC = N°, ½N€ ",
    "设 x 为整数，则答案等于 N。\n",
    "Пусть n = N, тогда ответ N. ",
    "मान लीजिए n = N है। ३४ ",
    "لنفترض أن N أكبر من ٣٤. ",
    "กำหนดให้ n = N 답은 N개입니다. ",
    "👩\u200d👩\u200d👧 N 🎉🏳\ufe0f\u200d🌈 café naïve ",
)


@cache
def texts() -> list[str]:
    draw = random.Random(0)

    def number(_: re.Match[str]) -> str:
        return str(draw.randrange(10 ** draw.randint(1, 7)))

    drawn = ["".join(draw.choices(PIECES, k=8)) for _ in range(TEXTS)]
    return [unicodedata.normalize("NFC", re.sub("N", number, text)) for text in drawn]


class Side:
    """A tokenizer, its tables, and each text in its tokens."""

    def __init__(self, name: str) -> None:
        self.tokenizer = wheel_tokenizer(next(Path(PYTHON).parents[1].glob("lib/*/site-packages")), name)
        self.encoder = Encoder(self.tokenizer, len(self.tokenizer))
        self.table = self.encoder.table
        self.end: int = self.tokenizer.eos_token_id
        self.ids_of = {content: token_id for token_id, content in enumerate(self.table.bytes_of) if content}
        self.written = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts()]

    def apart(self, token_id: int, draw: random.Random) -> list[int]:
        """Return a token in two at a random place, or in its bytes where no two tokens have them."""
        content = self.content(token_id)
        if len(content) == 1:
            return [token_id]
        place = draw.randrange(1, len(content))
        halves = [content[:place], content[place:]]
        if not all(half in self.ids_of for half in halves):
            halves = [bytes([byte]) for byte in content]
        return [self.ids_of[half] for half in halves]

    def content(self, token_id: int) -> bytes:
        return self.table.bytes_of[token_id] or b""


side = cache(Side)


def counts(reading: Reading, is_digit: BoolArray) -> list[int]:
    """Return how many tokens there are, are unknown, are one to one with a teacher's, are digits, and both of these."""
    is_known = reading.ours != UNKNOWN
    ours, theirs = (np.bincount(each, minlength=1) for each in (reading.ours[is_known], reading.theirs))
    is_alike = is_known & ((ours == 1) & (theirs == 1))[reading.ours]
    return [len(is_known), *(int(each.sum()) for each in (~is_known, is_alike, is_digit, is_alike & is_digit))]


@pytest.mark.parametrize("apart", [0.0, 0.1])
@pytest.mark.parametrize(("student", "teacher"), [*permutations(NAMES, 2)])
def test_chunks_tile_both_sides_have_equal_bytes_and_cannot_be_cut_further(
    student: str, teacher: str, apart: float
) -> None:
    """`apart` of the student's tokens are cut in two, so that it wrote what its tokenizer would not."""
    one, other, draw = side(student), side(teacher), random.Random(1)
    pair = OwnTokens(one.encoder, other.encoder, student_ends=[one.end], teacher_ends=[other.end])
    sums, longest, seconds = np.zeros(5, np.int64), 0, 0.0
    for text, written in zip(texts(), one.written, strict=True):
        ids = [part for each in written for part in (one.apart(each, draw) if draw.random() < apart else [each])]
        contents = [one.content(each) for each in ids]
        assert b"".join(contents) in (text.encode(), b" " + text.encode())
        response = np.array([*ids, one.end], np.int32)
        started = time.process_time()
        reading = pair.read(response)
        seconds += time.process_time() - started
        assert_laws(reading, response, one.table, other.table, (one.end, other.end))
        cut_off = response[: draw.randrange(len(response))]
        assert_laws(pair.read(cut_off), cut_off, one.table, other.table, (one.end, other.end))
        sums += counts(reading, np.array([*(each.strip().isdigit() for each in contents), False]))
        longest = max(longest, int(np.bincount(reading.ours[reading.ours != UNKNOWN]).max(initial=0)))
    tokens, masked, alike, digits, alike_digits = sums.tolist()
    assert masked == 0
    LOGGER.info(
        f"{student} <- {teacher}, {apart:.0%} apart: {tokens} tokens, masked {masked / tokens:.4f}, one to one "
        f"{alike / tokens:.2f}, of digits {alike_digits / digits:.2f}, longest chunk {longest}, "
        f"{seconds / tokens * 1e6:.1f} us of CPU a token"
    )
