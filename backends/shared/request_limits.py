"""Refuses requests that would crash a server, or that it would answer only in part, before they are sent. Pure.

Some servers crash on a single token outside their vocabulary. Others silently sample fewer tokens than requested. And
servers know more ids than a model has tokens: these are banned by a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spot_async.errors import PermanentError
from spot_async.models.alignment import branch_prefix_length
from spot_async.types import IntArray, SamplingSettings, ScoreRequest

BAN = -1e4  # outweighs any logit
OPENAI_BAN = -100.0  # the lowest bias that OpenAI's API allows


@dataclass(frozen=True)
class RequestLimits:
    """What one server accepts. Every check raises `PermanentError`."""

    server: str  # its name, for messages
    vocab_size: int
    max_tokens: int  # in one request, given and new ones together
    max_top_k: int
    longer: str  # the server's option that allows more tokens
    wider: str = ""  # the server's option that allows a larger top-k

    def check(self, token_ids: IntArray, *, new_tokens: int = 0, top_k: int = 0) -> None:
        """Check a request with `token_ids` for `new_tokens` more."""
        if not len(token_ids):
            raise PermanentError(f"{self.server}: a request needs at least one token")
        self.check_ids(token_ids)
        if not 0 <= top_k <= self.max_top_k:
            advice = f": raise {self.wider}" if self.wider and top_k <= self.vocab_size else ""
            raise PermanentError(f"{self.server}: top_k={top_k} is not one of 0 to {self.max_top_k}{advice}")
        if len(token_ids) + new_tokens > self.max_tokens:
            raise PermanentError(
                f"{self.server}: {len(token_ids)} tokens and {new_tokens} new ones exceed the server's context of "
                f"{self.max_tokens} tokens: raise its {self.longer} or lower sampling.max_response_tokens"
            )

    def check_generation(self, prompt_ids: IntArray, *, new_tokens: int, top_k: int) -> None:
        """Check a request for a response."""
        if new_tokens < 1:
            raise PermanentError(f"{self.server}: max_tokens={new_tokens}: a response has at least one token")
        self.check(prompt_ids, new_tokens=new_tokens, top_k=top_k)

    def check_positions(self, positions: IntArray, response_ids: IntArray) -> None:
        """Check positions (N,), 0-based, of a response (T,)."""
        if positions.size and not 0 <= positions.min() <= positions.max() < len(response_ids):
            raise PermanentError(f"{self.server}: positions are not all of the response's {len(response_ids)}")

    def check_ids(self, token_ids: IntArray) -> None:
        """Check token ids of any shape."""
        outside = token_ids[(token_ids < 0) | (token_ids >= self.vocab_size)]
        if outside.size:
            raise PermanentError(
                f"{self.server}: token {outside.flat[0]} is out of the vocabulary of {self.vocab_size}"
            )


def prefixes(request: ScoreRequest, positions: IntArray) -> list[IntArray]:
    """Return the context of each position, as views of one sequence. Copies would take the square of its length."""
    sequence = np.concatenate([request.prompt_ids, request.response_ids])
    return [sequence[: branch_prefix_length(len(request.prompt_ids), position)] for position in positions.tolist()]


def logit_bias(sampling: SamplingSettings, vocab_size: int, ban: float = BAN) -> dict[str, Any]:
    """Return the request fields of OpenAI's API that ban ids from `vocab_limit` on; none if there are no such ids."""
    left_out = range(sampling.vocab_limit or vocab_size, vocab_size)
    return {"logit_bias": {str(token_id): ban for token_id in left_out}} if left_out else {}
