"""Measures what the trainer's own backward pass of log-probabilities saves over autograd's, at Qwen3's vocabulary.

    python benchmarks/selected_logprobs.py

Both compute one block of rows as the trainer makes them (2^26 logits), forward and backward, from hidden states: each
row's own token, and two positions with four candidates. "autograd" is `log_softmax` by `logsumexp` and `gather`. They
take turns. Memory is the most that the CPU allocator held beyond the inputs, by torch's profiler.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from qwen3_models import VOCABULARY
from report import show, spread
from torch.profiler import ProfilerActivity, profile

from spot_async.trainer.model import LOGITS_PER_BLOCK, Block, selected_logprobs

HIDDEN = 64
POSITIONS, CANDIDATES = 2, 4
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_autograd(
    hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    own = len(hidden)
    logits = (hidden @ weight.T).float() / 1.0
    normaliser = logits.logsumexp(-1)
    sampled = logits.gather(1, token_ids[:own, None])[:, 0] - normaliser
    return torch.cat([sampled, logits[rows[own:], token_ids[own:]] - normaliser[rows[own:]]])


def by_selection(
    hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    return selected_logprobs(hidden, weight, None, [Block(0, len(hidden), rows, token_ids)], 1.0)[0][0]


def peak_gib(work: Callable[[], None]) -> float:
    """Return the most memory that was held at a time beyond what was there before, by the allocator's records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = most = 0
    for event in sorted(
        (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        most = max(most, held)
    return most / (1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description="Backward pass of log-probabilities beside autograd's.")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows_of_block = LOGITS_PER_BLOCK // VOCABULARY
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.cat([torch.arange(rows_of_block), torch.arange(POSITIONS).repeat_interleave(CANDIDATES)])
    token_ids = torch.randint(0, VOCABULARY, rows.shape)
    hidden = torch.randn(rows_of_block, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def work(way: Way) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(way(hidden, weight, rows, token_ids).sum(), [hidden, weight])

        return run

    ways = {"autograd": work(by_autograd), "selected_logprobs": work(by_selection)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(arguments.rounds + 1):
        for name, run in ways.items():
            started = time.process_time()
            run()
            if round_number:
                seconds[name].append(time.process_time() - started)
    ratios = [other / own for own, other in zip(seconds["selected_logprobs"], seconds["autograd"], strict=True)]
    table = [[name, f"{statistics.median(seconds[name]):.2f}", f"{peak_gib(run):.2f}"] for name, run in ways.items()]
    notes = [f"autograd takes {spread(ratios)} times the CPU time"]
    show(f"{rows_of_block} rows of {VOCABULARY:,} logits in bfloat16", ["way", "CPU s", "peak GiB"], table, notes)


if __name__ == "__main__":
    main()
