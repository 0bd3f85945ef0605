"""Seeds that depend on what a request is, never on when or how often it is sent.

`derive_seed(run_seed, ordinal, "probe", position, candidate, n)` is the same in every attempt, at any concurrency and
in any order of arrival. So the same tokens are sampled again.
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed made from the run's seed and the parts that identify a request."""
    text = "/".join([str(run_seed), *map(str, parts)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
