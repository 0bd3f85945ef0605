"""What holds of each reading: its chunks tile both sides, have equal bytes there, and none can be cut further."""

from __future__ import annotations

import numpy as np

from spot_async.models.chunks import UNKNOWN, Reading
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import IntArray


def chunks_of(tokens: list[bytes], others: list[bytes]) -> list[tuple[int, int]]:
    """How many tokens of both sides end together, one after the other: by the definition, token by token."""
    found, position, other = [], 0, 0
    ours = theirs = b""
    while position < len(tokens) or other < len(others):
        if len(ours) <= len(theirs) and position < len(tokens):
            ours += tokens[position]
            position += 1
        else:
            theirs += others[other]
            other += 1
        if ours == theirs:
            found.append((position, other))
    return found


def assert_laws(
    reading: Reading, response: IntArray, student: TokenBytes, teacher: TokenBytes, ends: tuple[int, int]
) -> None:
    """`ends` are the student's and the teacher's end token."""
    assert [each.dtype for each in (reading.ids, reading.theirs, reading.ours)] == [np.dtype(np.int32)] * 3
    known = reading.ours[reading.ours != UNKNOWN]
    assert (reading.ours[: len(known)] == known).all(), "what is unknown stands at the end"
    assert len(reading.ours) == len(response)
    assert len(reading.ids) == len(reading.theirs)
    ours, theirs = (
        [b"end" if token_id == end else table.bytes_of[token_id] or b"" for token_id in ids.tolist()]
        for end, table, ids in zip(ends, (student, teacher), (response[: len(known)], reading.ids), strict=True)
    )
    expected = chunks_of(ours, theirs)
    counted = [(int((known <= chunk).sum()), int((reading.theirs <= chunk).sum())) for chunk in range(len(expected))]
    assert counted == expected
    assert known.max(initial=-1) == reading.theirs.max(initial=-1) == len(expected) - 1
