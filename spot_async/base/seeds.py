"""Seeds that depend on what a request is, never on when or how often it is sent.

`derive_seed(run_seed, ordinal, "probe", position, candidate, n)` is the same in every attempt, at
every concurrency and arrival order, so sampled tokens repeat (design: Determinism).
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """A 63-bit seed from the run's seed and the names of a request."""
    text = "/".join([str(run_seed), *map(str, parts)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
