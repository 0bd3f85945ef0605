"""Runs whose trainer is spread over machines: network namespaces with addresses of their own, a command in each.

Machines, their ranks and their network fail, and the runs go on by themselves to the weights of two ranks on one
machine. `make test-nodes` does all of it to one run after the other.
"""

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
from kill_drill import ROOT, command
from network_namespaces import Machine, machines
from safetensors.numpy import load_file
from ssh_server import ssh_server

from spot_async.base.processes.guard import process_tree

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
KEYS = (
    "training.ranks=2",
    "training.checkpoint_every=2",
    "training.batch_size=8",
    "training.mini_batch_size=8",
    "training.warmup_iterations=0",
    "training.restarts=9",
    "sampling.max_response_tokens=64",
    "evaluation=null",
    "run.trace=false",
)
PATIENCE_S = 240.0
DATA = ROOT / "examples" / "running_sum"


def train(run: Path, *keys: str) -> list[str]:
    return command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *KEYS, *keys)


def rows(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pids(machine: Machine, module: str = "", word: str = "") -> list[int]:
    """Return the processes on a machine, or those with this module of ours and this word on their command line."""
    found = subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True, text=True, check=True)
    chosen = []
    for pid in map(int, found.stdout.split()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if (f"-m {module} " in line or not module) and word in line:
                chosen.append(pid)
    return chosen


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class NodesRun:
    """A run of node 0 on the first machine and node 1 on the second, which does not see the first one's disk."""

    def __init__(self, place: Sequence[Machine], directory: Path, keys: Sequence[str]) -> None:
        self.place = place
        self.run = directory / "run"
        self._directory = directory
        self._keys = (*keys, "cluster.nodes=2", f"cluster.address={place[0].address}")
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, machine: Machine) -> subprocess.Popen[bytes]:
        with (self._directory / f"{machine.name}.log").open("ab") as log:
            words = train(self.run, *self._keys, f"cluster.node_rank={node}")
            if node:
                words = ["sh", "-c", f"mount -t tmpfs none {self._directory} && exec {shlex.join(words)}"]
            process = subprocess.Popen(machine.command(*words), cwd=ROOT, stdout=log, stderr=log)
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
def begun(count: int, directory: Path, *keys: str) -> Iterator[tuple[NodesRun, list[subprocess.Popen[bytes]]]]:
    directory.mkdir()
    with machines(count) as place:
        run = NodesRun(place, directory, keys)
        try:
            yield run, [run.start(node, place[node]) for node in range(2)]
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


@pytest.mark.long
@needs_proc
def test_a_node_is_killed_another_comes_in_its_place_and_the_weights_are_those_of_one_machine(tmp_path: Path) -> None:
    keys = ("training.iterations=4", "training.sharding=fsdp2")
    with begun(3, tmp_path / "nodes", *keys) as (run, (first, _)):
        run.reach(3)
        kill(pids(run.place[1]))
        third = run.start(1, run.place[2])
        assert first.wait(PATIENCE_S) == 0, run.all_said()
        assert third.wait(PATIENCE_S) == 0, run.all_said()
        assert f"node 1 ({run.place[1].address}) is gone: it " in run.said(run.place[0])
        assert restarts(run) == 1
        check(run, on_one_machine(tmp_path / "whole", *keys), 4)


@pytest.mark.nightly
@needs_proc
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_whatever_is_killed_or_cut_off_is_named_and_the_run_ends_as_on_one_machine(
    tmp_path: Path, sharding: str
) -> None:
    iterations = 14
    keys = (f"training.iterations={iterations}", f"training.sharding={sharding}", "cluster.heartbeat_timeout_s=5")
    with begun(3, tmp_path / "nodes", *keys) as (run, (first, second)):
        here, there, elsewhere = run.place

        def goes_on(restart: int) -> None:
            wait_until(lambda: restarts(run) == restart or first.poll() is not None, run.all_said())
            assert first.poll() is None, run.all_said()

        run.reach(1)
        kill(pids(there, "spot_async.trainer"))  # a rank
        goes_on(1)
        assert "rank 1 " in run.said(here)
        assert "was killed by SIGKILL" in run.said(here)

        run.reach(3)
        ranks = pids(there, "spot_async.trainer")
        kill(pids(there, "spot_async.trainer.launcher"))  # its agent
        wait_until(lambda: not set(ranks) & set(pids(there)), "a rank outlives its agent")
        goes_on(2)

        run.reach(5)
        kill([second.pid])  # the node's command: the rest dies with it
        wait_until(lambda: not pids(there), "processes outlive their node's command")
        time.sleep(4.0)
        second = run.start(1, there)  # the node is back
        goes_on(3)
        assert f"node 1 ({there.address}) is gone: it " in run.said(here)

        run.reach(7)
        there.set_link("down")  # nobody says a word
        goes_on(4)
        assert f"node 1 ({there.address}) is gone: it was silent for 5 s" in run.said(here)
        there.set_link("up")  # it joins again by itself

        run.reach(9)
        kill(pids(here, "spot_async.trainer"))  # a rank beside the run
        goes_on(5)

        run.reach(11)
        kill(pids(there))  # the whole machine
        third = run.start(1, elsewhere)
        goes_on(6)
        assert first.wait(PATIENCE_S) == 0, run.all_said()
        assert third.wait(PATIENCE_S) == 0, run.all_said()
        check(run, on_one_machine(tmp_path / "whole", *keys), iterations)


@pytest.mark.nightly
@needs_proc
def test_node_0_is_killed_and_resumed_and_the_other_node_joins_again_by_itself(tmp_path: Path) -> None:
    keys = ("training.iterations=5",)
    with begun(2, tmp_path / "nodes", *keys, "--resume", "auto") as (run, (_, second)):
        here, there = run.place
        run.reach(3)
        kill(pids(here))
        wait_until(lambda: pids(there) == [second.pid], "ranks outlive the run")
        again = run.start(0, here)
        assert again.wait(PATIENCE_S) == 0, run.all_said()
        assert second.wait(PATIENCE_S) == 0, run.all_said()
        check(run, on_one_machine(tmp_path / "whole", *keys), 5)


@pytest.mark.nightly
@needs_proc
def test_a_signal_to_all_nodes_ends_the_run_with_a_checkpoint_and_both_go_on_by_one_command(tmp_path: Path) -> None:
    with begun(2, tmp_path / "nodes", "training.iterations=400") as (run, nodes):
        run.reach(2)
        for number in (signal.SIGUSR1, signal.SIGTERM):  # as Slurm does
            for process in nodes:
                process.send_signal(number)
        assert [process.wait(PATIENCE_S) for process in nodes] == [75, 75], run.all_said()
        so_far = len(rows(run.run))
        again = []
        for node, machine in enumerate(run.place):
            words = command("train", "--resume", str(run.run), f"training.iterations={so_far + 1}")
            place = [f"cluster.node_rank={node}", "cluster.nodes=2", f"cluster.address={run.place[0].address}"]
            again.append(subprocess.Popen(machine.command(*words, *place), cwd=ROOT))
        assert [process.wait(PATIENCE_S) for process in again] == [0, 0]
        assert len(rows(run.run)) == so_far + 1


@pytest.mark.nightly
@needs_proc
def test_servers_on_a_third_machine_behind_ssh_come_back_whichever_end_is_killed(tmp_path: Path) -> None:
    keys = (
        "training.iterations=6",
        f"student.model={DATA / 'student'}",
        f"teacher.model={DATA / 'teacher'}",
    )
    (directory := tmp_path / "nodes").mkdir()
    (keys_of_ssh := tmp_path / "ssh").mkdir()
    with machines(3) as place:
        here, _, there = place
        with ssh_server(keys_of_ssh, 2222, address=there.address, within=there.command()) as client:
            far = f"{{launch: {{prefix: [ssh, -F, {client}, there], host: {there.address}}}}}"
            run = NodesRun(place, directory, (*keys, f"student.backend={far}", f"teacher.backend={far}"))

            def servers() -> set[int]:
                """Return the two servers, without their guards."""
                return {pid for pid in pids(there, "spot_async.serving") if len(process_tree(pid)) == 1}

            def comes_back(iteration: int, victims: Callable[[], Sequence[int]], ends: int) -> None:
                run.reach(iteration)
                before = servers()
                kill(victims())
                wait_until(lambda: len(servers() - before) == ends and len(servers()) == 2, run.all_said())

            try:
                nodes = [run.start(node, place[node]) for node in range(2)]
                comes_back(1, lambda: [min(servers())], 1)
                comes_back(3, lambda: pids(here, word="ssh -F"), 2)
                assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], run.all_said()
            finally:
                run.end()
            wait_until(lambda: not pids(there, "spot_async.serving"), "servers are left")
        check(run, on_one_machine(tmp_path / "whole", *keys), 6)
