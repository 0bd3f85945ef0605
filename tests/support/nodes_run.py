"""A run of two nodes in network namespaces: starts it, looks into it, and compares it with the same on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from kill_drill import ROOT, SHORT, command, with_heartbeats
from network_namespaces import Machine, machines
from safetensors.numpy import load_file

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
KEYS = (
    *SHORT,
    "training.ranks=2",
    "training.checkpoint_every=2",
    "training.restarts=9",
    "evaluation=null",
    "run.trace=false",
)
PATIENCE_S = 240.0
SERVER, RANK, NURSERY = (f"-m spot_async.{each} " for each in ("serving", "trainer", "base.processes.nursery"))
SECRET = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def train(run: Path, *keys: str) -> list[str]:
    return command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *KEYS, *keys)


def rows(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pids(machine: Machine, word: str = "") -> list[int]:
    """Return the processes on a machine with this text on their command line."""
    found = subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True, text=True, check=True)
    chosen = []
    for pid in map(int, found.stdout.split()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if word in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                chosen.append(pid)
    return chosen


def wait_until(is_so: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class NodesRun:
    """A run of node 0 on the first machine and node 1 on the second, which does not see the first one's disk."""

    def __init__(
        self, place: Sequence[Machine], directory: Path, keys: Sequence[str], heartbeat_timeout_s: float = 60.0
    ) -> None:
        self.place = place
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.run = directory / "run"
        self._directory = directory
        self._keys = (*keys, "cluster.nodes=2", f"cluster.address={place[0].address}")
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, machine: Machine, *keys: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{machine.name}.log").open("ab") as log:
            words = train(self.run, *self._keys, f"cluster.node_rank={node}", *keys)
            words = with_heartbeats(words, self._heartbeat_timeout_s)
            if node:
                words = ["sh", "-c", f"mount -t tmpfs none {self._directory} && exec {shlex.join(words)}"]
            environment = {**os.environ, "SPOT_ASYNC_CLUSTER_SECRET": SECRET}
            process = subprocess.Popen(machine.command(*words), cwd=ROOT, stdout=log, stderr=log, env=environment)
        self._started.append(process)
        return process

    def said(self, machine: Machine) -> str:
        return (self._directory / f"{machine.name}.log").read_text(errors="replace")

    def all_said(self) -> str:
        return "".join(f"== {machine.name}\n{self.said(machine)}" for machine in self.place if self._has_log(machine))

    def _has_log(self, machine: Machine) -> bool:
        return (self._directory / f"{machine.name}.log").exists()

    def reach(self, iteration: int) -> None:
        wait_until(lambda: len(rows(self.run)) >= iteration or self._started[0].poll() is not None, self.all_said())
        assert self._started[0].poll() is None, self.all_said()

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def begun(
    count: int, directory: Path, *keys: str, nodes: int = 2, heartbeat_timeout_s: float = 60.0
) -> Iterator[tuple[NodesRun, list[subprocess.Popen[bytes]]]]:
    directory.mkdir()
    with machines(count) as place:
        run = NodesRun(place, directory, keys, heartbeat_timeout_s)
        try:
            yield run, [run.start(node, place[node]) for node in range(nodes)]
        finally:
            run.end()


def kill(found: Sequence[int]) -> None:
    assert found, "nothing to kill"
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def restarts(run: NodesRun) -> int:
    return run.said(run.place[0]).count("(restart ")


def check(run: NodesRun, whole: Path, iterations: int) -> None:
    """It has done what the same run did on one machine, and no process is left."""
    checked = subprocess.run(command("verify-run", str(run.run)), cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    found, expected = rows(run.run), rows(whole)
    assert [row["iteration"] for row in found] == list(range(1, iterations + 1))
    assert [row["train/loss"] for row in found] == pytest.approx([row["train/loss"] for row in expected], abs=1e-5)
    weights, others = (load_file(each / "student" / "model.safetensors") for each in (run.run, whole))
    assert all(np.allclose(weights[name], others[name], rtol=0, atol=1e-5) for name in others)
    wait_until(lambda: not any(map(pids, run.place)), "processes are left")


def on_one_machine(directory: Path, *keys: str) -> Path:
    subprocess.run(train(directory, *keys), check=True, cwd=ROOT, capture_output=True)
    return directory
