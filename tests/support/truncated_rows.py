"""What servers tell of whole rows, and whether bounds that follow from it hold the exact values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spot_async.models.entropy import entropy_bounds
from spot_async.policies.truncated.score_bounds import TeacherRows
from spot_async.types import Float64Array, FloatArray, IntArray

PARTS = ("entropy", "mass", "coverage", "divergence", "gap")


def top(logprobs: Float64Array, k: int) -> tuple[IntArray, FloatArray]:
    """The k best of each row, as float32 over the wire."""
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k]
    return ids, np.take_along_axis(logprobs, ids, -1).astype(np.float32)


def teacher_rows(logprobs: Float64Array, top_k: int, *noises: float) -> TeacherRows:
    """The teacher's top-k of rows (T, V), and bounds of the entropy from it. `noises`: sure and spread, in nats."""
    ids, told = top(logprobs, top_k)
    bounds, rows = entropy_bounds(told, logprobs.shape[-1]), len(ids)
    sure, spread = (np.full(rows, each) for each in (*noises, 0.0, 0.0)[:2])
    return TeacherRows(ids, told.astype(float), *bounds, np.zeros(rows, bool), sure, spread)


def assert_held(bounds: Any, truth: Mapping[str, Any], variant: str, *parts: str, off: float = 0.0) -> None:
    """The score lies in its interval, and all parts do, or those that are named."""
    for name in (*(parts or PARTS), "score"):
        interval, values = getattr(bounds, name), truth[variant if name == "score" else name]
        assert (interval.lower <= values + off).all(), name
        assert (values - off <= interval.upper).all(), name
