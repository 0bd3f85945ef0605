"""What holds of each reading: its chunks tile both sides, have equal bytes there, and none can be cut further."""

from __future__ import annotations

from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np

from spot_async.models.chunks import UNKNOWN, Reading
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import IntArray


def assert_laws(
    reading: Reading, response: IntArray, student: TokenBytes, teacher: TokenBytes, ends: tuple[int, int]
) -> None:
    """`ends` are the student's and the teacher's end token."""
    assert [each.dtype for each in (reading.ids, reading.theirs, reading.ours)] == [np.dtype(np.int32)] * 3
    known = reading.ours[reading.ours != UNKNOWN]
    assert (reading.ours[: len(known)] == known).all(), "what is unknown stands at the end"
    assert len(reading.ours) == len(response)
    assert len(reading.ids) == len(reading.theirs)
    sides = []
    for end, table, ids, numbers in (
        (ends[0], student, response[: len(known)], known),
        (ends[1], teacher, reading.ids, reading.theirs),
    ):
        contents = [b"end" if token_id == end else table.bytes_of[token_id] or b"" for token_id in ids.tolist()]
        chunks = groupby(zip(numbers.tolist(), contents, strict=True), key=itemgetter(0))
        sides.append([(chunk, [content for _, content in tokens]) for chunk, tokens in chunks])
    assert len(sides[0]) == len(sides[1])
    for number, ((ours, one), (theirs, other)) in enumerate(zip(*sides, strict=True)):
        assert ours == theirs == number
        assert b"".join(one) == b"".join(other)
        assert len({*accumulate(map(len, one))} & {*accumulate(map(len, other))}) == 1, "it ends where both do"
