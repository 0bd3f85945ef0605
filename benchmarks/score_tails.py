"""Measures what the tails of scored rows add to the time of a score, at Qwen3's vocabulary.

    python benchmarks/score_tails.py

A score is the engine's `score_rows`, from hidden states as wide as Qwen3-0.6B's; the layers before it are left out, so
the share of a whole score is smaller. The tails alone are computed from the same block's probabilities.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from qwen3_models import VOCABULARY
from report import show, spread

from spot_async.serving.engine.logits import score_rows, tail_logprobs

HIDDEN, ROWS = 1024, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of tails within that of a score.")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, head = torch.randn(ROWS, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    table, notes = [], []
    for top_k in (1, 16, 64):
        seconds: dict[str, list[float]] = {"score": [], "tails": []}
        for round_number in range(arguments.rounds + 1):
            started = time.process_time()
            scores = score_rows(head, hidden, torch.zeros(ROWS).long(), top_k=top_k, temperature=1.0, chunk_rows=ROWS)
            scored = time.process_time()
            probabilities = head(hidden).softmax(-1)
            began = time.process_time()
            tail_logprobs(probabilities, scores.topk_ids)
            if round_number:
                seconds["score"].append(scored - started)
                seconds["tails"].append(time.process_time() - began)
        shares = [own / whole for own, whole in zip(seconds["tails"], seconds["score"], strict=True)]
        table.append([str(top_k), *(f"{statistics.median(each) * 1e3:.1f}" for each in seconds.values())])
        notes.append(f"top-{top_k}: tails are {spread(shares, '.3f')} of a score")
    show(f"{ROWS} rows of {VOCABULARY:,} logits in float32", ["top-k", "score, CPU ms", "its tails"], table, notes)


if __name__ == "__main__":
    main()
