"""What an array of a message is once it was read."""

from __future__ import annotations

import numpy as np

from spot_async import wire
from spot_async.types import TokenScores, WeightVersion


def test_an_array_that_is_kept_keeps_nothing_else_of_its_message_in_memory():
    """A supervision in the queue counts its own bytes; those of the teacher's top-k that it came with must be free."""
    rows, tokens = np.zeros((9, 20), np.float32), np.ones(9, np.float32)
    scores = TokenScores(
        logprobs=tokens, topk_ids=rows.astype(np.int32), topk_logprobs=rows,
        entropy=tokens, entropy_lower=tokens, entropy_upper=tokens, version=WeightVersion(0, 0),
    )  # fmt: skip
    message = bytearray(wire.encode(scores))
    kept = wire.decode(message, TokenScores).logprobs
    message.clear()  # raises BufferError while anybody looks into it
    np.testing.assert_array_equal(kept, tokens)
