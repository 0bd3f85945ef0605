"""E6: the trainer's tests on the device, a step after a checkpoint, and a rank that runs out of memory."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import time

from gpu_training import settings_of, trainer_of, trajectories

from gpu_proof.machine import ROOT
from gpu_proof.place import Place, Rows
from gpu_proof.training import FEW
from spot_async.errors import TrainerError
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.messages import Batch

TINY_TESTS = ("tests/trainer/test_loss.py", "tests/trainer/test_selected_logprobs.py")
CPU_LIMIT = 4 << 30  # bytes of address space, so that a rank runs out of memory on a CPU too


def tests(place: Place) -> Rows:
    """Run them with the device visible. Those of several ranks need more cards."""
    chosen = TINY_TESTS if place.is_tiny else ("tests/trainer",)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *chosen]
    command += ["-k", "not ranks", "-m", "not long and not nightly"]
    # On the device the tests' processes share it, and each has its own memory there.
    environment = {**os.environ, **({} if place.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    sys.stdout.write(done.stdout)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    if "passed" not in counts and "failed" not in counts:
        raise SystemExit(f"pytest ran nothing: {done.stdout.strip().splitlines()[-1:]}")
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    yield {
        "what": "tests/trainer",
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "which": ", ".join(failing),
    }


def resumed(place: Place) -> Rows:
    """The step after a checkpoint, beside that of a trainer that was not stopped."""
    size = place.size("0.6b")
    batches = [Batch(iteration, trajectories(iteration, size, FEW)) for iteration in range(2)]
    directory = place.with_models()
    settings = settings_of(size, place.keys, directory, FEW)
    saved = directory / "checkpoint"
    saved.mkdir()
    refusals: list[str] = []
    with trainer_of(settings) as trainer:
        trainer.train(batches[0])
        started = time.perf_counter()
        trainer.begin_to_save(saved, lambda seconds, reason: refusals.append(reason) if reason else None)
        held_up_s = time.perf_counter() - started
        trainer._saver.wait()
        saved_s = time.perf_counter() - started
        straight = trainer.train(batches[1]).metrics
    if refusals:
        raise SystemExit(refusals[0])
    del trainer
    resume = {"resume": {"directory": str(saved), "step": 1}, "run_directory": str(directory / "resumed")}
    started = time.perf_counter()
    with trainer_of(settings_of(size, place.keys, directory, FEW, **resume)) as trainer:
        loaded_s = time.perf_counter() - started
        after = trainer.train(batches[1]).metrics
    yield {
        "what": "step 2, resumed beside straight on",
        "loss_apart": abs(after["loss"] - straight["loss"]),
        "norm_apart": abs(after["grad_norm"] - straight["grad_norm"]),
        "loss": after["loss"],
        "checkpoint_gb": sum(each.stat().st_size for each in saved.iterdir()) / 1e9,
        "held_up_s": held_up_s,
        "saved_s": saved_s,
        "resumed_s": loaded_s,
    }


def out_of_memory(place: Place) -> Rows:
    """A batch that no card can hold: what the run is told, and after how long."""
    size = place.size("0.6b")
    tokens = 200_000
    count = 1200 if place.is_tiny else 80
    keys = {**place.keys, "micro_batch_tokens": tokens, "packing": not place.is_tiny}
    settings = settings_of(size, keys, place.with_models(), count)
    if place.device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (CPU_LIMIT, CPU_LIMIT))
    yield asyncio.run(_told(settings, trajectories(0, size, count), "micro_batch_tokens=200000"))


async def _told(settings: object, samples: tuple[object, ...], what: str) -> dict[str, object]:
    started = time.perf_counter()
    async with TrainerProcess(settings) as trainer:  # type: ignore[arg-type]
        ready_s = time.perf_counter() - started
        started = time.perf_counter()
        try:
            await trainer.train(0, samples)  # type: ignore[arg-type]
        except TrainerError as error:
            said = f"{type(error).__name__}: {error}"
        else:
            raise SystemExit("the batch was trained: it was too small to run out of memory here")
    return {"what": what, "ready_s": ready_s, "told_after_s": time.perf_counter() - started, "said": said[:400]}
