"""Computes log-probabilities, top-K and entropy of hidden rows, with logits of only a few rows at a time.

With a vocabulary of 150,000 the logits of one 4,096-token response take 2.5 GB in float32. In chunks they never exist
all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

Head = Callable[[torch.Tensor], torch.Tensor]  # hidden (R, D) -> logits (R, V)


class RowScores(NamedTuple):
    logprobs: torch.Tensor  # (R,) of the targets
    topk_ids: torch.Tensor  # (R, K)
    topk_logprobs: torch.Tensor  # (R, K)
    entropy: torch.Tensor  # (R,) nats, exact


def score_rows(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, *, top_k: int, temperature: float, chunk_rows: int
) -> RowScores:
    """Return scores of hidden (R, D) for targets (R,). R is at least 1."""
    parts = []
    for rows, logits in _logit_chunks(head, hidden, temperature, chunk_rows):
        logprobs = logits.log_softmax(-1)
        best = logprobs.topk(top_k, dim=-1)
        chosen = logprobs.gather(-1, targets[rows, None])[:, 0]
        finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)  # so that 0 * -inf adds 0 and not NaN
        parts.append((chosen, best.indices, best.values, -(logits.softmax(-1) * finite).sum(-1)))
    return RowScores(*(torch.cat(part) for part in zip(*parts, strict=True)))


def candidate_rows(
    head: Head, hidden: torch.Tensor, candidates: torch.Tensor, *, temperature: float, chunk_rows: int
) -> torch.Tensor:
    """Return log-probabilities (R, k) of candidates (R, k) at hidden (R, D). R is at least 1."""
    return torch.cat(
        [
            logits.log_softmax(-1).gather(-1, candidates[rows])
            for rows, logits in _logit_chunks(head, hidden, temperature, chunk_rows)
        ]
    )


def _logit_chunks(
    head: Head, hidden: torch.Tensor, temperature: float, chunk_rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        yield rows, head(hidden[rows]).float() / temperature
