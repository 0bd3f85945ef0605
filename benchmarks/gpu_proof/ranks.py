"""E12: two ranks on two cards, one that is killed, and a rank on each of two nodes."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_training import settings_of, trajectories

from gpu_proof.machine import ROOT
from gpu_proof.place import Place, Rows
from gpu_proof.training import FEW
from spot_async.errors import TrainerError
from spot_async.trainer.handle import TrainerProcess

UPDATES = 2
os.environ["SPOT_PROOF"] = str(os.getpid())  # by which this process knows its own ranks


def together(place: Place, sharding: str) -> Rows:
    """Two updates by one rank and by two."""
    size = place.size("0.6b")
    losses: dict[int, float] = {}
    for ranks in (1, 2):
        keys = {**place.keys, "sharding": sharding, "ranks": ranks}
        others = {"run_directory": str(place.with_models() / f"ranks-{ranks}")}
        settings = settings_of(size, keys, place.with_models(), FEW, **others)
        report = asyncio.run(_trained(settings, size))
        losses[ranks] = report.metrics["loss"]
        yield {
            "what": f"{sharding}, {ranks} rank{'s' * (ranks > 1)}",
            "update_s": report.metrics["train_s"],
            "tokens_per_s_per_rank": report.performance.get("tokens_per_s_per_rank"),
            "peak_gib": report.performance.get("max_memory_allocated_gib"),
            "loss": losses[ranks],
            **({"loss_apart": abs(losses[2] - losses[1])} if ranks == 2 else {}),
        }


async def _trained(settings: Any, size: str) -> Any:
    async with TrainerProcess(settings) as trainer:
        for iteration in range(UPDATES):
            report = await trainer.train(iteration, trajectories(iteration, size, FEW))
    return report


def killed(place: Place) -> Rows:
    """One of two ranks is killed while it waits for a batch."""
    size = place.size("0.6b")
    yield asyncio.run(_killed(settings_of(size, {**place.keys, "ranks": 2}, place.with_models(), FEW), size))


async def _killed(settings: Any, size: str) -> dict[str, Any]:
    async with TrainerProcess(settings) as trainer:
        await trainer.train(0, trajectories(0, size, FEW))
        [pid] = [each for each in _ranks() if each[1] == 1]
        started = time.perf_counter()
        os.kill(pid[0], signal.SIGKILL)
        try:
            await trainer.train(1, trajectories(1, size, FEW))
        except TrainerError as error:
            return {"what": "rank 1 is killed", "told_after_s": time.perf_counter() - started, "said": str(error)[:300]}
    raise SystemExit("the run continued without a rank")


def _ranks() -> list[tuple[int, int]]:
    """Return the processes of this user's ranks, below this process, each with its number."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = dict(
                    each.split("=", 1) for each in (entry / "environ").read_text().split("\0") if "=" in each
                )
                words = (entry / "cmdline").read_text().split("\0")
            except (OSError, UnicodeDecodeError):
                continue  # it ended, or belongs to another user
            if "spot_async.trainer" in words and variables.get("SPOT_PROOF") == str(os.getpid()):
                found.append((int(entry.name), int(variables["RANK"])))
    return found


def two_nodes(place: Place) -> Rows:
    """The quickstart with a rank on each node. Both see this checkout, and its interpreter, under the same path."""
    directory = place.with_models()
    secret = directory / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    run = directory / "train"
    words = [sys.executable, "-m", "spot_async", "train", str(ROOT / "configs" / "quickstart.yaml")]
    words += [
        "training.iterations=3",
        "training.warmup_iterations=0",
        "training.ranks=2",
        f"training.device={place.device}",
        "evaluation=null",
        "policy.gamma=1.0",
    ]
    words += [
        "cluster.nodes=2",
        f"cluster.address={place.address}",
        f"cluster.secret_file={secret}",
        f"run.directory={run}",
    ]
    started = time.perf_counter()
    with subprocess.Popen(
        [*shlex.split(place.node), "env", f"--chdir={ROOT}", *words, "cluster.node_rank=1"], cwd=ROOT
    ) as second:
        first = subprocess.run([*words, "cluster.node_rank=0"], cwd=ROOT, env={**os.environ, "NCCL_DEBUG": "INFO"})
        if first.returncode:
            second.terminate()
            raise SystemExit(f"node 0: exit code {first.returncode}")
    log = (run / "logs" / "trainer.log").read_text(errors="replace")
    networks = sorted({line.partition("NET/")[2].split()[0] for line in log.splitlines() if "NET/" in line})
    yield {
        "what": "a rank on each of two nodes",
        "second_exit_code": second.returncode,
        "seconds": time.perf_counter() - started,
        "networks": ", ".join(networks),
    }
