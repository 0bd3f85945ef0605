"""E4 and E11: how long it takes to publish weights, and until servers answer with them."""

from __future__ import annotations

import json
import time
from typing import Any

import weight_updates
from gpu_training import settings_of, trainer_of, trajectories

from gpu_proof.place import Place, Rows
from gpu_proof.servers import launch, model_of
from gpu_proof.training import FEW
from spot_async.trainer.messages import Batch

ITERATIONS = 3
UPDATES = 6


def publishing(place: Place, is_beside: bool) -> Rows:
    """Seconds from the end of a step until its weights are on disk, and those for which that held up training."""
    size = place.size("1.7b")
    keys = {**place.keys, "iterations": ITERATIONS}
    settings = settings_of(size, keys, place.with_models(), FEW, publishes_beside=is_beside)
    with trainer_of(settings) as trainer:
        begun: list[float] = []
        written: list[float] = []
        held_up, took, total = [], [], 0
        for iteration in range(ITERATIONS):
            [share] = trainer.divide(Batch(iteration, trajectories(iteration, size, FEW)))
            started = time.perf_counter()
            report = trainer.train_share(share, lambda files, reason: written.append(time.perf_counter()))
            took.append(time.perf_counter() - started)
            begun.append(started + report.metrics["train_s"])
            held_up.append(report.metrics["publish_s"])
        trainer._publisher.wait()
        total = sum(each.stat().st_size for each in trainer._publisher.path(ITERATIONS).glob("*.safetensors"))
    for number in range(1, ITERATIONS):  # the first one makes buffers
        seconds = written[number] - begun[number]
        yield {
            "what": f"{'beside' if is_beside else 'before'} the next step, iteration {number + 1}",
            "gb": total / 1e9,
            "written_after_s": seconds,
            "s_per_gb": seconds / (total / 1e9),
            "held_up_s": held_up[number],
            "iteration_s": took[number],
        }


def updates(place: Place, kind: str, keys: dict[str, Any]) -> Rows:
    """`benchmarks/weight_updates.py`: what an iteration publishes, and how long until the server has it."""
    model = model_of(place, "1.7b")
    transport = keys.get("transport")
    backend: dict[str, Any] = {"kind": kind, "launch": launch(place, kind, memory_fraction=0.3)}
    if transport:
        backend["weights"] = {"transport": transport, "device": "cuda:1" if place.device == "cuda" else "cpu"}
    ways = {f"all weights, {transport}": ()} if transport else weight_updates.WAYS
    models = [f"student.model={model}", f"teacher.model={model}", f"training.device={place.device}"]
    models += [f"data.train={_problems(place)}", "training.batch_size=8", "training.mini_batch_size=8"]
    models.append(f"teacher.backend={{kind: local, device: {place.device}}}")
    for number, (way, own) in enumerate(ways.items()):
        run = place.with_models() / f"updates-{number}"
        weight_updates.train(run, [f"student.backend={json.dumps(backend)}", *own, *models], UPDATES)
        size, written, live = weight_updates.measured(run)
        yield {
            "what": way,
            "published_kb": float(size),
            "written_s": float(written.split()[0]) / 1000,
            "live_s": float(live.split()[0]) / 1000,
        }


def _problems(place: Place) -> str:
    path = place.with_models() / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"w{each}", "answer": f"w{each}"}) + "\n" for each in range(64)))
    return str(path)
