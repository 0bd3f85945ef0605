"""Measures publishing of weights on a CPU: by itself, and before or beside the trainer's next step.

    python benchmarks/publishing.py
    python benchmarks/publishing.py --shape 0.6b --samples 2 --rounds 1 --iterations 3
    python benchmarks/publishing.py --shape 1.7b --alone

`before`: a strict run's way, in which the weights are written before the next step begins. `beside`: that of a run with
`max_staleness`. The bound is the time of the step alone. One rank with one thread; the other core may write.

`--alone` has the weights in float32 and neither optimiser nor step. It publishes bfloat16, as in the recipes, and also
counts the bytes that a rank copies which writes nothing. `--directory` says where weights are published: on a disk, or
in memory (/dev/shm).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from qwen3_models import SHAPES, save_qwen3
from report import show, spread
from torch.utils._python_dispatch import TorchDispatchMode
from training import HIDDEN, trajectories
from transformers import AutoModelForCausalLM, Qwen3Config

from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import process_group, strategy_of
from spot_async.trainer.publishing import WeightWriter
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import TrainerSettings
from spot_async.trainer.streaming import published_types

LONGEST_RESPONSE = 128


class Copied(TorchDispatchMode):
    """Counts the bytes of tensors that are copied or computed while it is entered."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta and not func.is_view:
            self.bytes += result.nbytes
        return result


def alone(model: Path, directory: Path, publishes: int) -> tuple[list[float], int]:
    """Publish, and return the seconds of each time, and the bytes that a rank copies which writes nothing."""
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)

    def publisher(name: str, *, writes: bool) -> WeightWriter:
        return WeightWriter(
            directory / name,
            student_directory=model,
            end_token_ids=(),
            dtype=torch.bfloat16,
            types=published_types(student, model, torch.bfloat16),
            keep=2,
            writes=writes,
        )

    writer, took = publisher("weights", writes=True), []
    for step in range(1, publishes + 1):
        started = time.perf_counter()
        writer.publish(student, step)
        took.append(time.perf_counter() - started)
    with Copied() as copied:
        publisher("none", writes=False).publish(student, 1)
    return took, copied.bytes


def iteration_s(
    model: Path, directory: Path, *, is_beside: bool, iterations: int, seed: int, samples: int, dtype: str
) -> tuple[float, float, float]:
    """Train, and return seconds: of an iteration, for which writing weights held up training, and of writing them."""
    training = {"iterations": iterations, "batch_size": samples, "mini_batch_size": samples, "dtype": dtype}
    given = {"model_directory": str(model), "run_directory": str(directory), "temperature": 1.0, "seed": 0}
    settings = TrainerSettings.model_validate(
        {**given, "training": training, "iterations": iterations, "publishes_beside": is_beside}
    )
    trainer = StudentTrainer(settings, strategy_of(settings.training), torch.device("cpu"))
    wrote, publish = [], trainer._publisher.publish

    def timed(*given: Any, **choices: Any) -> None:
        started = time.perf_counter()
        publish(*given, **choices)
        wrote.append(time.perf_counter() - started)

    trainer._publisher.publish = timed  # type: ignore[method-assign]
    chosen = tuple(each for each in trajectories(seed, 200) if len(each.response_ids) <= LONGEST_RESPONSE)[:samples]
    took, held_up = [], []
    for iteration in range(iterations):
        started = time.perf_counter()
        held_up.append(trainer.train(Batch(iteration, chosen)).metrics["publish_s"])
        took.append(time.perf_counter() - started)
    trainer._publisher.wait()
    # The first iteration had nothing to write before it, and the last weights nothing to be written beside.
    return statistics.mean(took[1:]), statistics.mean(held_up[1:]), statistics.mean(wrote[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="What it takes to publish weights.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6, help="of a turn; with --alone: how often to publish")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shape", choices=SHAPES, help="of this Qwen3 in bfloat16, in place of a small one")
    parser.add_argument("--samples", type=int, default=8, help="of an iteration")
    parser.add_argument("--alone", action="store_true", help="without a step")
    parser.add_argument("--directory", type=Path, help="where weights are published; default: the temporary directory")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir=given.directory) as published,
        process_group(name, torch.device("cpu"), "none"),
    ):
        model = Path(name) / "model"
        if given.shape:
            save_qwen3(given.shape, model, "cpu")
        else:
            save_small(model, given.layers)
        os.sync()  # the model's own pages are not to be written meanwhile
        if given.alone:
            show_alone(*alone(model, Path(published), given.iterations))
        else:
            show_turns(given, model, Path(published))


def save_small(directory: Path, layers: int) -> None:
    config = Qwen3Config(
        vocab_size=16_384, hidden_size=HIDDEN, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(directory)


def show_alone(took: list[float], copied_bytes: int) -> None:
    rows = [
        ["seconds to publish", spread(took)],
        ["bytes that a rank copies which writes nothing", f"{copied_bytes:,}"],
    ]
    show("Publishing alone", ["", ""], rows, [f"{len(took)} times, load {os.getloadavg()[1]:.1f}; median and range"])


def show_turns(given: argparse.Namespace, model: Path, directory: Path) -> None:
    """Train by turns in both ways, and show what that took."""
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for seed in range(given.rounds):
        for is_beside in (False, True) if seed % 2 else (True, False):
            run = directory / f"run-{seed}-{is_beside}"
            turn = iteration_s(
                model,
                run,
                is_beside=is_beside,
                iterations=given.iterations,
                seed=seed,
                samples=given.samples,
                dtype="bfloat16" if given.shape else "float32",
            )
            shutil.rmtree(run)
            found[is_beside].append(turn)
    bounds = [took - held_up for took, held_up, _ in found[False]]
    rows = [
        [
            "beside the next step" if is_beside else "before the next step",
            *(spread(list(column)) for column in zip(*each, strict=True)),
            spread([took / bound for (took, _, _), bound in zip(each, bounds, strict=True)]),
        ]
        for is_beside, each in found.items()
    ]
    columns = ["weights are written", "iteration, s", "held up, s", "written in, s", "x the step alone"]
    show("Writing weights", columns, rows, [f"{given.rounds} rounds by turns, load {os.getloadavg()[1]:.1f}; medians"])


if __name__ == "__main__":
    main()
