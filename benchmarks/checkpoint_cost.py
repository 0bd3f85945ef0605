"""Measures what checkpoints and the ledger take of an iteration: the quickstart's, and a larger student's on this CPU.

    python benchmarks/checkpoint_cost.py
    python benchmarks/checkpoint_cost.py --iterations 40 --shape 0.6b --directory /where/runs/live
    python benchmarks/checkpoint_cost.py --shape none

The quickstart runs in this process, with the default `training.checkpoint_every`. The ledger's time is that of all its
calls, which hold up the event loop. A checkpoint has two: for how long training waited for it, and for how long it was
written, hashed and read back beside the run.

The larger student has random weights. Its iteration is the training on one batch, of the default size unless another
is given: 128 responses of 48 tokens. Sampling is left out, so that shares are larger than those of a real run. One
iteration is timed alone, and one while a checkpoint of the step before is saved.
The machine needs 16 bytes a parameter, and the disk 12 for the checkpoint and 4 for each of three students.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from qwen3_models import SHAPES, VOCABULARY, save_qwen3
from report import show
from toy_runs import SPOT_KEYS
from transformers.utils.logging import disable_progress_bar

import spot_async
from spot_async.config import TrainingConfig
from spot_async.run_directory import manifest
from spot_async.run_directory.ledger import Ledger
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import Strategy
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import Pull, Supervision, WeightVersion

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
DEFAULTS = TrainingConfig(iterations=1)
EVERY = DEFAULTS.checkpoint_every
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 48


class Clock:
    """Adds up the seconds that functions take."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **keys: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*given, **keys)
            finally:
                with self._lock:
                    self.seconds[name] += time.perf_counter() - started

        return call


def quickstart_row(directory: Path, iterations: int) -> list[str]:
    """Run the quickstart, and return its row."""
    clock = Clock()
    for name in ("admit", "finish", "give_up", "cut", "forget_samples"):
        setattr(Ledger, name, clock.timed("ledger", getattr(Ledger, name)))
    for name in ("commit", "prune"):
        setattr(manifest, name, clock.timed("beside", getattr(manifest, name)))
    run = directory / "quickstart"
    keys = {"run.directory": run, "training.iterations": iterations, "evaluation": "null", **SPOT_KEYS}
    spot_async.run(QUICKSTART, [f"{key}={value}" for key, value in keys.items()])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "logs" / "run.jsonl").read_text().splitlines()]
    saved_s = [event["saved_s"] for event in events if event["event"] == "checkpoint"]
    waited_s = [row["train/checkpoint_s"] for row in rows if "train/checkpoint_s" in row]
    iteration_s = statistics.median(row["time/iteration_s"] for row in rows[1:])  # the first one warms up
    ledger_s = clock.seconds["ledger"] / len(rows)
    beside_s = (sum(saved_s) + clock.seconds["beside"]) / len(saved_s)
    return row("quickstart", iteration_s, ledger_s, statistics.mean(waited_s), beside_s)


def row(name: str, iteration_s: float, ledger_s: float, waited_s: float, beside_s: float) -> list[str]:
    held_up_s = ledger_s + waited_s / EVERY
    return [
        name,
        f"{iteration_s:.2f}",
        f"{ledger_s * 1000:.1f}" if ledger_s else "",
        f"{waited_s:.3f}",
        f"{beside_s:.2f}",
        f"{held_up_s / iteration_s:.2%}",
        f"{(held_up_s + beside_s / EVERY) / iteration_s:.2%}",
    ]


def shape_row(directory: Path, size: str, threads: int, batch_size: int) -> tuple[list[str], str]:
    """Train the larger student for two iterations, the last while a checkpoint is saved; return a row and a note."""
    model = save_qwen3(size, directory / size, "cpu")
    settings = TrainerSettings.model_validate(
        {
            "training": {
                "iterations": 3,
                "batch_size": batch_size,
                "mini_batch_size": min(DEFAULTS.mini_batch_size, batch_size),
                "micro_batch_tokens": 16 * (PROMPT_TOKENS + RESPONSE_TOKENS),
                "threads": threads,
                "keep_weights": 2,
            },
            "model_directory": str(model),
            "run_directory": str(directory / "run"),
            "temperature": 1.0,
            "seed": 0,
            "iterations": 3,
        }
    )
    torch.set_num_threads(threads)
    trainer = StudentTrainer(settings, Strategy(), torch.device("cpu"))
    trainer.train(Batch(0, trajectories(0, 2)))  # warms up, and makes the moments
    alone = trainer.train(Batch(1, trajectories(1, batch_size))).metrics
    said: list[float] = []
    checkpoint = directory / "run" / manifest.DIRECTORY / "step-000002"
    trainer.begin_to_save(checkpoint, lambda seconds, failure: said.append(seconds))
    beside = trainer.train(Batch(2, trajectories(2, batch_size))).metrics
    started = time.perf_counter()
    manifest.commit(checkpoint, manifest.Manifest(step=2, lineages=(0,), keys="", data=""))
    manifest.check(checkpoint)
    hashed_s = time.perf_counter() - started
    note = (
        f"{size}, a batch of {batch_size}: an iteration alone {alone['train_s']:.1f} s, "
        f"beside a checkpoint {beside['train_s']:.1f} s, of which "
        f"{beside['checkpoint_s']:.2f} s waiting; written in {said[0]:.1f} s, hashed and read back in {hashed_s:.1f} s"
    )
    return row(size, alone["train_s"] + alone["publish_s"], 0.0, beside["checkpoint_s"], said[0] + hashed_s), note


def trajectories(seed: int, count: int) -> tuple[Supervision, ...]:
    rng = np.random.default_rng(seed)
    samples = []
    for ordinal in range(count):
        behavior = -rng.exponential(1.0, RESPONSE_TOKENS).astype(np.float32)
        samples.append(
            Supervision(
                prompt_ordinal=ordinal,
                problem_id=str(ordinal),
                prompt_ids=rng.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32),
                response_ids=rng.integers(0, VOCABULARY, RESPONSE_TOKENS).astype(np.int32),
                behavior_logprobs=behavior,
                pulls=(Pull(logprobs=behavior + rng.normal(0, 0.3, RESPONSE_TOKENS).astype(np.float32)),),
                version=WeightVersion(0, seed),
            )
        )
    return tuple(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=21, help="of the quickstart; 0: leave it out")
    parser.add_argument("--shape", choices=(*SHAPES, "none"), default="0.6b")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the larger student's trainer")
    parser.add_argument("--batch-size", type=int, default=DEFAULTS.batch_size, help="responses in its iteration")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: that of temporary files")
    options = parser.parse_args()
    disable_progress_bar()
    rows, notes = [], [f"one checkpoint in {EVERY} iterations, ledger of each; goal: at most 3 %"]
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if options.iterations:
            rows.append(quickstart_row(Path(directory), options.iterations))
        if options.shape != "none":
            found, note = shape_row(Path(directory), options.shape, options.threads, options.batch_size)
            rows.append(found)
            notes.append(note)
    columns = ["student", "iteration s", "ledger ms", "waited s", "beside s", "share held up", "with what is beside"]
    notes.append(f"{os.getloadavg()[0]:.1f} processes wanted the cores in the last minute")
    show("checkpoints and ledger", columns, rows, notes)


if __name__ == "__main__":
    main()
