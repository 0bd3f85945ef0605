"""Measures how soon new weights are live: all weights, LoRA merged, and the adapter alone, on a server of yours.

    python benchmarks/weight_updates.py runs/weight-updates --backend my-vllm.yaml

The file is a `student.backend` section that starts vLLM, SGLang or our own engine. (vLLM on a CPU has no attention for
the heads of 16 of the running sum's student, and keeps an output layer that is tied to its embeddings: give other
models by `--set`.) Each way is a strict run of OPD on the running sum. `published` is what an iteration writes,
`written in` how long the trainer takes for it, and `live after` the time from then, when the directory has got its
name, until the server answers with these weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import yaml
from report import show, spread

CONFIG = Path(__file__).parents[1] / "configs" / "running_sum" / "opd.yaml"
WARMING_UP = 2  # iterations that are not counted
LORA = "training.lora={rank: 8, alpha: 16, targets: all}"
WAYS = {
    "all weights": (),
    "LoRA, merged": (LORA,),
    "LoRA, the adapter alone": (LORA, "student.backend.weights.transport=adapter"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--backend", type=Path, required=True, help="a YAML file")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys, such as other models")
    given = parser.parse_args()
    backend = json.dumps(yaml.safe_load(given.backend.read_text()))
    rows = []
    for number, (way, keys) in enumerate(WAYS.items()):
        run = given.directory / str(number)
        train(run, [f"student.backend={backend}", *keys, *given.set], given.iterations)
        rows.append([way, *measured(run)])
    show("New weights, medians and extremes", ("", "published, kB", "written in, ms", "live after, ms"), rows)


def train(run: Path, keys: list[str], iterations: int) -> None:
    named = {
        "run.directory": run,
        "training.iterations": iterations,
        "training.keep_weights": iterations,
        "training.checkpoint_every": iterations,
        "sampling.max_response_tokens": 16,
        "evaluation": "null",
    }
    command = [
        sys.executable,
        "-m",
        "spot_async",
        "train",
        str(CONFIG),
        *(f"{key}={each}" for key, each in named.items()),
    ]
    done = subprocess.run([*command, *keys], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{run}: exit code {done.returncode}: {done.stderr[-2000:] or done.stdout[-2000:]}")


def measured(run: Path) -> list[str]:
    """Return what an iteration publishes, and what it takes. The last one is whole in each run, and does not count."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARMING_UP:-1]
    weights = [run / "weights" / f"step-{row['iteration']:06d}" for row in rows]
    size = statistics.median(sum(file.stat().st_size for file in each.rglob("*.safetensors")) for each in weights)
    written, live = (
        spread([1000 * row[key] for row in rows], ".0f") for key in ("train/publish_s", "time/update_weights_s")
    )
    return [f"{size / 1000:.0f}", written, live]


if __name__ == "__main__":
    main()
