"""Log-probabilities, top-K and entropy of hidden rows, projecting onto the vocabulary a few rows at a time.

At a vocabulary of 150,000 the logits of one 4,096-token response take 2.5 GB in float32; in chunks they
never exist at once.
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
    """Scores of hidden (R, D) for targets (R,). R is at least 1."""
    parts = []
    for rows, logprobs in _logprob_chunks(head, hidden, temperature, chunk_rows):
        best = logprobs.topk(top_k, dim=-1)
        chosen = logprobs.gather(-1, targets[rows, None])[:, 0]
        # entr is 0 where the probability is 0, also for logits of minus infinity
        parts.append((chosen, best.indices, best.values, torch.special.entr(logprobs.exp()).sum(-1)))
    return RowScores(*(torch.cat(part) for part in zip(*parts, strict=True)))


def candidate_rows(
    head: Head, hidden: torch.Tensor, candidates: torch.Tensor, *, temperature: float, chunk_rows: int
) -> torch.Tensor:
    """Log-probabilities (R, k) of candidates (R, k) at hidden (R, D). R is at least 1."""
    return torch.cat(
        [
            logprobs.gather(-1, candidates[rows])
            for rows, logprobs in _logprob_chunks(head, hidden, temperature, chunk_rows)
        ]
    )


def _logprob_chunks(
    head: Head, hidden: torch.Tensor, temperature: float, chunk_rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        yield rows, torch.log_softmax(head(hidden[rows]).float() / temperature, dim=-1)
