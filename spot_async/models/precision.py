"""How far apart two computations of one log-probability may be, by the type of the numbers. Pure.

The limits lie between what rounding does and what another distribution does. In float32, servers and trainer agree
within 1e-4 nats (CUDA's TF32 products: 1e-2). In 16 bits the logits themselves are rounded, by up to 0.125 nats between
16 and 32: 0.3 nats is the most that was seen of a few hundred tokens, and 1e-2 is usual on average.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """The precision of a computation, and how far its log-probabilities may be from those of another."""

    words: str  # for people
    largest_nats: float  # of a few hundred tokens
    mean_nats: float


FLOAT32 = Precision("float32", largest_nats=0.05, mean_nats=0.01)
BITS16 = Precision("16 bits", largest_nats=0.5, mean_nats=0.1)


def precision(*dtypes: str | None) -> Precision:
    """Return the precision of a comparison between computations of these types.

    A type that nobody states is taken for one of 16 bits, since its limits hold for both.
    """
    return FLOAT32 if all(dtype in ("float32", "float") for dtype in dtypes) else BITS16
