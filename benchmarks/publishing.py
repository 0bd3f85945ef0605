"""Measures what writing weights beside the next step saves: iterations of the trainer on a CPU, in two ways by turns.

    python benchmarks/publishing.py

`before`: a strict run's way, in which the weights are on disk before the next step begins. `beside`: that of a run with
`max_staleness`. The bound is the time of the step alone. One rank with one thread; the other core may write.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import show, spread
from training import HIDDEN, trajectories
from transformers import AutoModelForCausalLM, Qwen3Config

from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import process_group, strategy_of
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import TrainerSettings

LONGEST_RESPONSE = 128


def iteration_s(model: Path, directory: Path, *, is_beside: bool, iterations: int, seed: int) -> tuple[float, float]:
    """Train, and return the seconds of an iteration, and those for which writing weights held up training."""
    training = {"iterations": iterations, "batch_size": 8, "mini_batch_size": 8}
    given = {"model_directory": str(model), "run_directory": str(directory), "temperature": 1.0, "seed": 0}
    settings = TrainerSettings.model_validate(
        {**given, "training": training, "iterations": iterations, "publishes_beside": is_beside}
    )
    trainer = StudentTrainer(settings, strategy_of(settings.training), torch.device("cpu"))
    samples = tuple(each for each in trajectories(seed, 200) if len(each.response_ids) <= LONGEST_RESPONSE)[:8]
    took, held_up = [], []
    for iteration in range(iterations):
        started = time.perf_counter()
        held_up.append(trainer.train(Batch(iteration, samples)).metrics["publish_s"])
        took.append(time.perf_counter() - started)
    trainer._publisher.wait()
    return statistics.mean(took[1:]), statistics.mean(held_up[1:])  # the first one had nothing to write before it


def main() -> None:
    parser = argparse.ArgumentParser(description="What writing weights beside the next step saves.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6, help="of a turn")
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name, process_group(name, torch.device("cpu"), "none"):
        directory = Path(name)
        config = Qwen3Config(
            vocab_size=16_384, hidden_size=HIDDEN, intermediate_size=2048, num_hidden_layers=given.layers,
            num_attention_heads=12, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(directory / "model")
        for seed in range(given.rounds):
            for is_beside in (False, True) if seed % 2 else (True, False):
                run = directory / f"run-{seed}-{is_beside}"
                turn = iteration_s(
                    directory / "model", run, is_beside=is_beside, iterations=given.iterations, seed=seed
                )
                found[is_beside].append(turn)
    bounds = [took - held_up for took, held_up in found[False]]
    rows = [
        [
            "beside the next step" if is_beside else "before the next step",
            spread([took for took, _ in each]),
            spread([held_up for _, held_up in each]),
            spread([took / bound for (took, _), bound in zip(each, bounds, strict=True)]),
        ]
        for is_beside, each in found.items()
    ]
    columns = ["weights are written", "iteration, s", "held up, s", "x the step alone"]
    show("Writing weights", columns, rows, [f"{given.rounds} rounds by turns, load {os.getloadavg()[1]:.1f}; medians"])


if __name__ == "__main__":
    main()
