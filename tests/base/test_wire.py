"""Arrays in messages: what they are after reading, and which are refused."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import numpy as np
import pytest

from spot_async.base import wire
from spot_async.testing.services import token_scores
from spot_async.types import FloatArray, TokenScores


class Message(msgspec.Struct):
    values: FloatArray


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64, np.bool_, np.uint8])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,), (0, 4), (4, 0)])
def test_an_array_arrives_as_it_was_sent(dtype, shape):
    sent = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for values in (sent, sent[::-1]):  # also one whose numbers do not stand in a row
        came = wire.decode(wire.encode(Message(values)), Message).values
        assert came.dtype == values.dtype
        np.testing.assert_array_equal(came, values, strict=True)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (["<c8", [1], bytes(8)], "dtype '<c8' is not one of"),
        (["<M8[s]", [1], bytes(8)], r"dtype '<M8\[s\]' is not one of"),
        ([">i4", [1], bytes(4)], "dtype '>i4' is not one of"),
        (["|O", [1], bytes(8)], r"dtype '\|O' is not one of"),
        (["<f4", [-1], bytes(8)], "negative length"),
        (["<f4", [3], bytes(8)], "cannot reshape"),
        (["<f4", [2], bytes(7)], "buffer size"),
    ],
)
def test_only_arrays_of_plain_numbers_that_are_whole_are_taken(array: list[Any], reason: str) -> None:
    """Whoever sends may be anybody; what an array is read as is never the sender's choice alone."""
    with pytest.raises(msgspec.ValidationError, match=reason):
        wire.decode(msgspec.msgpack.encode({"values": array}), Message)


def test_what_has_no_form_on_the_wire_is_not_sent_as_something_else() -> None:
    with pytest.raises(NotImplementedError, match="no wire form for complex"):
        wire.encode(Message(complex(1.0, 2.0)))  # type: ignore[arg-type]


def test_an_array_that_is_kept_keeps_nothing_else_of_its_message_in_memory():
    """A supervision in the queue counts its own bytes; those of the teacher's top-k that it came with must be free."""
    rows, tokens = np.zeros((9, 20), np.float32), np.ones(9, np.float32)
    scores = token_scores(tokens, topk_ids=rows, topk_logprobs=rows)
    message = bytearray(wire.encode(scores))
    kept = wire.decode(message, TokenScores).logprobs
    message.clear()  # raises BufferError while anybody looks into it
    np.testing.assert_array_equal(kept, tokens)


def test_no_garbage_is_collected_while_a_decoder_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(msgspec.Struct):
        number: int

    make, collecting = msgspec.msgpack.Decoder, list[bool]()

    def making(*given: Any, **named: Any) -> Any:
        collecting.append(gc.isenabled())
        return make(*given, **named)

    monkeypatch.setattr(msgspec.msgpack, "Decoder", making)
    assert wire.decode(wire.encode(Fresh(1)), Fresh) == Fresh(1)
    assert collecting == [False]
    assert gc.isenabled()
