"""Measures what a checkpoint of the trainer costs: seconds to save it durably and to load it, and its size.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py MODEL_DIRECTORY --shape 0.6b --directory /where/runs/live

One rank, replicated, in float32: parameters and two moments, 12 bytes a parameter. The page cache holds the files when
they are loaded. The share is that of the quickest saving in `--iteration-s`, the seconds of an iteration of the first
model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from qwen3_models import SHAPES, qwen3_config
from report import show, spread
from torch import nn
from transformers import AutoModelForCausalLM

from spot_async.trainer.checkpoint import CheckpointSaver, load_checkpoint
from spot_async.trainer.loading import new_student, read_parameters
from spot_async.trainer.parallel import Strategy

STUDENT = Path(__file__).parents[1] / "examples" / "running_sum" / "student"


def measured(name: str, model: nn.Module, directory: Path, repeats: int, iteration_s: float | None) -> list[str]:
    optimizer, strategy = torch.optim.AdamW(model.parameters(), fused=True), Strategy()
    saver = CheckpointSaver(strategy, torch.device("cpu"))
    saved_s, loaded_s = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        saver.begin(directory, 1, model, optimizer, lambda seconds, failure: None)
        saver.wait()
        saved_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        load_checkpoint(directory, 1, model, optimizer, strategy)
        loaded_s.append(time.perf_counter() - started)
    size = sum(file.stat().st_size for file in directory.iterdir())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    share = "" if iteration_s is None else f"{min(saved_s) / iteration_s:.2%}"
    form = ".3f" if size < 1 << 28 else ".1f"
    millions, mebibytes = f"{parameters / 1e6:,.1f} M", f"{size / (1 << 20):,.1f} MiB"
    return [name, millions, mebibytes, spread(saved_s, form), spread(loaded_s, form), share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=STUDENT, help="a student; default: the quickstart's")
    parser.add_argument("--iteration-s", type=float, help="seconds of one of its iterations")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="a second model, of random weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: that of temporary files")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        student = new_student(str(options.model))
        read_parameters(student, str(options.model), torch.device("cpu"))
        rows.append(measured(options.model.name, student, Path(directory) / "a", options.repeats, options.iteration_s))
        shape = AutoModelForCausalLM.from_config(
            qwen3_config(options.shape), dtype=torch.float32, trust_remote_code=False
        )
        rows.append(measured(options.shape, shape, Path(directory) / "b", options.repeats, None))
    columns = ["student", "parameters", "on disk", "save, s", "load, s", "share of an iteration"]
    notes = [f"{os.getloadavg()[0]:.1f} processes wanted the cores in the last minute"]
    show("a checkpoint, median (least..most)", columns, rows, notes)


if __name__ == "__main__":
    main()
