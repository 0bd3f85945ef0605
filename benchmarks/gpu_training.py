"""Measures memory and speed of the trainer on a GPU at Qwen3's sizes, beside the estimates of `models/footprint`.

    python benchmarks/gpu_training.py 0.6b 1.7b 4b/recompute_layers=true

Each argument is a size, followed by `key=value` of `training` after slashes. Each runs in a process of its own, so that
memory peaks do not mix. A run makes two updates, each on 32 trajectories of 1,024 to 4,096 response tokens, with pi_old
recomputed, in bfloat16, and publishes weights after each. The second update is timed. Weights are random, since only
sizes count. Tokens a second, MFU and peak memory are the metrics `perf/...` that a run shows. The bound is the same
arithmetic as MFU's, at the rate that a large product reaches on this GPU in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from qwen3_models import VOCABULARY, save_qwen3, vocabulary_of
from report import show
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from spot_async.trainer.rank import StudentTrainer

TRAJECTORIES = 32
PROMPT_TOKENS = 200
RESPONSE_TOKENS = (1024, 4096)
MICRO_BATCH_TOKENS = {"0.6b": 16384, "1.7b": 8192, "4b": 5120, "tiny": 512}  # as in configs/paper
BRANCH_POSITIONS, CANDIDATES = 2, 4
GIB = float(1 << 30)


def response_tokens(size: str) -> tuple[int, int]:
    return (16, 64) if size == "tiny" else RESPONSE_TOKENS


def trajectories(seed: int, size: str, count: int = TRAJECTORIES) -> tuple[Any, ...]:
    from spot_async.types import Pull, SoftTargets, Supervision, WeightVersion

    rng = np.random.default_rng(seed)
    samples = []
    for ordinal in range(count):
        tokens = int(rng.integers(*response_tokens(size), endpoint=True))
        behavior = -rng.exponential(1.0, tokens).astype(np.float32)
        samples.append(
            Supervision(
                prompt_ordinal=ordinal,
                problem_id=str(ordinal),
                prompt_ids=rng.integers(0, vocabulary_of(size), PROMPT_TOKENS).astype(np.int32),
                response_ids=rng.integers(0, vocabulary_of(size), tokens).astype(np.int32),
                behavior_logprobs=behavior,
                pulls=(Pull(logprobs=behavior + rng.normal(0, 0.3, tokens).astype(np.float32)),),
                version=WeightVersion(0, 0),
                soft_targets=(
                    SoftTargets(
                        positions=np.sort(rng.choice(tokens, BRANCH_POSITIONS, replace=False)).astype(np.int32),
                        token_ids=rng.integers(0, vocabulary_of(size), (BRANCH_POSITIONS, CANDIDATES)).astype(np.int32),
                        probabilities=np.full((BRANCH_POSITIONS, CANDIDATES), 1 / CANDIDATES, np.float32),
                        weights=np.full(BRANCH_POSITIONS, 0.05, np.float32),
                    ),
                ),
            )
        )
    return tuple(samples)


def settings_of(
    size: str, keys: dict[str, Any], directory: Path, trajectories: int = TRAJECTORIES, **others: Any
) -> Any:
    """Return a trainer's settings. `keys` are of `training`, `others` of the trainer; a model is made if need be."""
    from spot_async.trainer.settings import TrainerSettings

    model = save_qwen3(size, directory / size, "cpu" if keys.get("device") == "cpu" else "cuda")
    training = {
        "iterations": 2,
        "batch_size": trajectories,
        "mini_batch_size": trajectories,
        "micro_batch_tokens": MICRO_BATCH_TOKENS[size],
        "behavior": "recomputed",
        "dtype": "bfloat16",
        **keys,
    }
    return TrainerSettings.model_validate(
        {
            "training": training,
            "model_directory": str(model),
            "run_directory": str(directory / "run"),
            "temperature": 1.0,
            "seed": 0,
            "iterations": training["iterations"],
            **others,
        }
    )


@contextmanager
def trainer_of(settings: Any) -> Iterator[StudentTrainer]:
    """Give a trainer of one rank, in this process. Leaves nothing of it on the device."""
    from spot_async.trainer.parallel import process_group, rank_device, strategy_of
    from spot_async.trainer.rank import StudentTrainer

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    disable_progress_bar()
    device = rank_device(settings.training.device)
    empty_cache(device)
    with tempfile.TemporaryDirectory() as channel, process_group(channel, device, settings.training.sharding):
        yield StudentTrainer(settings, strategy_of(settings.training), device)


def train_once(size: str, keys: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Make two updates in this process; return what the second took, and memory.

    `keys` are of `training`, and `trajectories`.
    """
    from spot_async.models.footprint import trainer_memory
    from spot_async.models.model_size import read_size
    from spot_async.trainer.messages import Batch

    keys = dict(keys)
    count = keys.pop("trajectories", TRAJECTORIES)
    shutil.rmtree(directory / "run", ignore_errors=True)  # of the run before
    settings = settings_of(size, keys, directory, count)
    started = time.perf_counter()
    with trainer_of(settings) as trainer:
        loaded_s = time.perf_counter() - started
        rate = matrix_rate(trainer._device)
        empty_cache(trainer._device)
        _, second = (trainer.train(Batch(iteration, trajectories(iteration, size, count))) for iteration in range(2))
    metrics, performance = second.metrics, second.performance
    found = read_size(Path(settings.model_directory))
    assert found is not None
    estimate = trainer_memory(found, settings.training, longest_tokens=PROMPT_TOKENS + response_tokens(size)[1])
    return {
        "peak_gib": performance.get("max_memory_allocated_gib"),
        "reserved_gib": performance.get("max_memory_reserved_gib"),
        "estimate_gib": estimate.training,
        "update_s": metrics["train_s"],
        "publish_s": metrics["publish_s"],
        "loaded_s": loaded_s,
        "tokens_per_s": performance["tokens_per_s_per_rank"],
        "mfu": performance.get("mfu"),  # None: nobody knows this GPU's data sheet
        "bound_s": 1e12 * performance["tflops_per_rank"] * metrics["train_s"] / rate,
        "rate": rate,
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "attention": trainer.model.config._attn_implementation,
    }


def matrix_rate(device: torch.device) -> float:
    """Return the operations per second of a large bfloat16 product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(device)
    started = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize(device)
    return 10 * 2 * size**3 / (time.perf_counter() - started)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and speed of the trainer on one GPU.")
    parser.add_argument("runs", nargs="+", help="size[/key=value...], sizes: " + ", ".join(MICRO_BATCH_TOKENS))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "spot-gpu")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        size, *pairs = arguments.runs[0].split("/")
        keys = {key: yaml.safe_load(value) for key, value in (pair.split("=") for pair in pairs)}
        sys.stdout.write(json.dumps(train_once(size, keys, arguments.directory)) + "\n")
        return
    rows = []
    for run in arguments.runs:
        worker = [sys.executable, __file__, run, "--worker", "--directory", str(arguments.directory)]
        finished = subprocess.run(worker, stdout=subprocess.PIPE, text=True, check=False)
        if finished.returncode:
            rows.append([run, f"failed ({finished.returncode})", *[""] * 8])
            continue
        found = json.loads(finished.stdout.splitlines()[-1])
        rows.append(
            [
                run,
                f"{found['peak_gib']:.1f}",
                f"{found['estimate_gib']:.1f}",
                f"{found['update_s']:.2f}",
                f"{found['update_s'] / found['bound_s']:.2f}",
                f"{found['tokens_per_s']:,.0f}",
                "" if found["mfu"] is None else f"{100 * found['mfu']:.1f}",
                f"{found['loaded_s']:.0f} / {found['publish_s']:.1f}",
                f"{found['loss']:.5f}",
                f"{found['grad_norm']:.3f}",
            ]
        )
    columns = ["run", "peak GiB", "estimate", "update s", "x bound", "tokens/s", "MFU %", "load / publish s",
               "loss", "norm"]  # fmt: skip
    device = torch.cuda.get_device_properties(0)
    notes = [f"{device.name}, {device.total_memory / GIB:.0f} GiB, torch {torch.__version__}"]
    show(f"{TRAJECTORIES} trajectories an update, vocabulary {VOCABULARY:,}", columns, rows, notes)


if __name__ == "__main__":
    main()
