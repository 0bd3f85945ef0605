"""Measures what an update with LoRA takes beside one of all weights: peak memory of a rank, and what is published.

    python benchmarks/lora_memory.py            # a 0.5B shape; ten minutes and 8 GiB

Each way is a process of its own, on a CPU, in float32, with all layers recomputed and one short response. Weights are
random, since only sizes count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from report import show
from training import trajectories
from transformers import AutoModelForCausalLM, Qwen2Config

from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import process_group, strategy_of
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import TrainerSettings

GIB = 1 << 30
WAYS = {"all weights": None, "LoRA, rank 16": {"rank": 16, "alpha": 32, "targets": "all"}}
SHAPE = Qwen2Config(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
LONGEST_RESPONSE = 64


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(way: str, directory: Path) -> None:
    """Train two iterations, so that moments are there; print the peak and what the second one published."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    training = {"iterations": 3, "batch_size": 1, "mini_batch_size": 1, "recompute_layers": True, "lora": WAYS[way]}
    settings = TrainerSettings.model_validate(
        {
            "training": training,
            "model_directory": str(directory / "model"),
            "run_directory": str(directory / way),
            "temperature": 1.0,
            "seed": 0,
            "iterations": 3,
            "merged_every": 0 if WAYS[way] else 1,  # the adapter alone
        }
    )
    short = [each for each in trajectories(0, 500) if len(each.response_ids) <= LONGEST_RESPONSE][:1]
    with process_group(str(directory), torch.device("cpu"), "none"):
        trainer = StudentTrainer(settings, strategy_of(settings.training), torch.device("cpu"))
        loaded = peak_bytes()
        for iteration in range(2):
            snapshot = trainer.train(Batch(iteration, tuple(short))).snapshot
    published = sum(each.stat().st_size for each in Path(snapshot.directory).rglob("*.safetensors"))
    sys.stdout.write(json.dumps({"loaded": loaded, "peak": peak_bytes(), "published": published}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker[0], Path(given.worker[1]))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = AutoModelForCausalLM.from_config(SHAPE, trust_remote_code=False)
        size = sum(each.numel() for each in model.parameters()) / 1e6
        model.save_pretrained(Path(directory) / "model")
        del model
        found = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--worker", way, directory]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[way] = json.loads(said.splitlines()[-1])
    most = found["all weights"]["published"]
    rows = [
        [
            way,
            f"{each['peak'] / GIB:.1f}",
            f"{each['loaded'] / GIB:.1f}",
            f"{each['published'] / 1e6:.0f}",
            f"{each['published'] / most:.1%}",
        ]
        for way, each in found.items()
    ]
    columns = ["trained", "peak, GiB", "peak when loaded, GiB", "published, MB", "of all weights"]
    show("An update with LoRA", columns, rows, [f"{size:.0f}M parameters, float32, layers recomputed"])


if __name__ == "__main__":
    main()
