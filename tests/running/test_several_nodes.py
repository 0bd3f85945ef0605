"""Runs whose trainer is spread over machines: network namespaces with addresses of their own, a command in each.

Machines, their ranks and their network fail, and the runs continue by themselves to the weights of two ranks on one
machine. `make test-nodes` does all of it to one run after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kill_drill import ROOT, command
from network_namespaces import machines
from nodes_run import (
    NURSERY,
    PATIENCE_S,
    RANK,
    SECRET,
    SERVER,
    NodesRun,
    begun,
    check,
    kill,
    needs_proc,
    on_one_machine,
    pids,
    restarts,
    rows,
    wait_until,
)
from ssh_server import ssh_server

from spot_async.base.processes.guard import process_tree

DATA = ROOT / "examples" / "running_sum"


@pytest.mark.long
@pytest.mark.nightly
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
    iterations = 12
    keys = (f"training.iterations={iterations}", f"training.sharding={sharding}")
    with begun(3, tmp_path / "nodes", *keys, heartbeat_timeout_s=5.0) as (run, (first, second)):
        here, there, elsewhere = run.place

        def goes_on(restart: int) -> None:
            wait_until(lambda: restarts(run) == restart or first.poll() is not None, run.all_said())
            assert first.poll() is None, run.all_said()

        run.reach(1)
        kill(pids(there, RANK))  # a rank
        goes_on(1)
        assert "rank 1 " in run.said(here)
        assert "was killed by SIGKILL" in run.said(here)

        run.reach(3)
        kill([second.pid])  # the node's command: the rest dies with it
        wait_until(lambda: not pids(there), "processes outlive their node's command")
        time.sleep(4.0)
        second = run.start(1, there)  # the node is back
        goes_on(2)
        assert f"node 1 ({there.address}) is gone: it " in run.said(here)

        run.reach(5)
        there.set_link("down")  # nobody says a word
        goes_on(3)
        assert f"node 1 ({there.address}) is gone: it was silent for 5 s" in run.said(here)
        there.set_link("up")  # it joins again by itself

        run.reach(7)
        kill(pids(here, RANK))  # a rank beside the run
        goes_on(4)

        run.reach(9)
        kill(pids(there))  # the whole machine
        third = run.start(1, elsewhere)
        goes_on(5)
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
        # The next ranks are forked from the nursery.
        wait_until(lambda: {*pids(there)} - {*pids(there, NURSERY)} == {second.pid}, "ranks outlive the run")
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
            environment = {**os.environ, "SPOT_ASYNC_CLUSTER_SECRET": SECRET}
            again.append(subprocess.Popen(machine.command(*words, *place), cwd=ROOT, env=environment))
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
                return {pid for pid in pids(there, SERVER) if len(process_tree(pid)) == 1}

            def comes_back(iteration: int, victims: Callable[[], Sequence[int]], ends: int) -> None:
                run.reach(iteration)
                before = servers()
                kill(victims())
                wait_until(lambda: len(servers() - before) == ends and len(servers()) == 2, run.all_said())

            try:
                nodes = [run.start(node, place[node]) for node in range(2)]
                comes_back(1, lambda: [min(servers())], 1)
                comes_back(3, lambda: pids(here, "ssh -F"), 2)
                assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], run.all_said()
            finally:
                run.end()
            wait_until(lambda: not pids(there, SERVER), "servers are left")
        check(run, on_one_machine(tmp_path / "whole", *keys), 6)
