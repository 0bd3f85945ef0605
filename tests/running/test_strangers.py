"""Runs of two nodes on a network with a stranger, who reaches all their ports and does not know the run's secret."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_drill import ROOT
from network_namespaces import Machine
from nodes_run import PATIENCE_S, begun, check, needs_proc, on_one_machine, train

PORT = 29600


@contextlib.contextmanager
def stranger(machine: Machine, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as said:
        command = machine.command(sys.executable, str(ROOT / "tests/support/stranger.py"), *words)
        process = subprocess.Popen(["sh", "-c", 'ulimit -n 20000; exec "$@"', "sh", *command], stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
@needs_proc
def test_a_stranger_runs_nothing_ends_nothing_changes_nothing_and_is_told_of(tmp_path: Path) -> None:
    record, mark = tmp_path / "record", tmp_path / "mark"
    record.mkdir()
    keys = ("training.iterations=16",)
    with begun(3, tmp_path / "recorded", *keys, nodes=0) as (run, _):
        here, there, elsewhere = run.place
        with stranger(elsewhere, tmp_path / "recorder.log", "record", str(PORT), here.address, str(record)):
            nodes = [run.start(0, here), run.start(1, there, f"cluster.address={elsewhere.address}")]
            assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], run.all_said()
    assert len(list(record.glob("node-k-*"))) >= 2  # the node's own connection, and its rank's to the store

    whole = on_one_machine(tmp_path / "whole", *keys)
    with begun(3, tmp_path / "attacked", *keys, nodes=0) as (run, _):
        here, there, elsewhere = run.place
        false_node = stranger(elsewhere, tmp_path / "false.log", "replay", str(PORT), here.address, str(record), "3")
        with false_node, contextlib.ExitStack() as attacks:
            for name, *words in (
                ("scan-0", "scan", here.address, str(record), str(mark)),
                ("scan-1", "scan", there.address, str(record), str(mark)),
                ("hold", "hold", here.address, str(PORT)),
            ):
                attacks.enter_context(stranger(elsewhere, tmp_path / f"{name}.log", *words))
            nodes = [run.start(0, here), run.start(1, there, f"cluster.address={elsewhere.address}")]
            run.reach(1)
            wrong = subprocess.run(
                elsewhere.command(
                    *train(tmp_path / "wrong", "training.iterations=16", "cluster.nodes=2", "cluster.node_rank=1"),
                    *(f"cluster.address={here.address}", "cluster.join_timeout_s=4"),
                ),
                env={**os.environ, "SPOT_ASYNC_CLUSTER_SECRET": "5c0ffee5c0ffee5c0ffee5c0ffee5c0f"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], run.all_said()
        assert run.said(there).count("not let in yet: node 0 has another secret") == 1
        assert "joined" in run.said(there)
        assert wrong.returncode == 1, wrong.stderr
        assert "node 0 has another secret than this node" in wrong.stderr.splitlines()[-1]
        told = [line for line in run.said(here).splitlines() if "without the run's secret" in line]
        assert 1 < len(told) < 10, told
        assert f"last from {elsewhere.address}" in told[-1]
        assert "restart" not in run.said(here)
        assert "Traceback" not in run.all_said()
        assert not mark.exists()
        assert f"open: {PORT}\n" in (tmp_path / "scan-0.log").read_text()
        assert "open: " in (tmp_path / "scan-1.log").read_text()  # gloo's
        check(run, whole, 16)
