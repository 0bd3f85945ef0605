"""Runs whose servers are on a real Ray cluster: nodes in network namespaces, with addresses of their own.

`make test-ray` runs these. SPOT_RAY_PYTHON is the interpreter of an environment with spot-async and ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kill_drill import ROOT, SHORT, rows, with_heartbeats
from network_namespaces import Machine, machines
from nodes_run import PATIENCE_S, RANK, SERVER, kill, pids, wait_until

PYTHON = os.environ.get("SPOT_RAY_PYTHON", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="SPOT_RAY_PYTHON names no interpreter with ray"),
]
PORT = 6390


@contextlib.contextmanager
def ray_node(machine: Machine, directory: str, *where: str) -> Iterator[None]:
    """Start a node of Ray. One after another: two that start together may time out."""
    log = Path(directory) / f"{machine.name}.log"
    # Both nodes have all of this machine's memory, and what others take of it is no reason to kill our workers.
    environment = {**os.environ, "RAY_memory_monitor_refresh_ms": "0"}
    command = machine.command(
        PYTHON, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={machine.address}", "--num-cpus=2",
        "--object-store-memory=80000000", f"--temp-dir={directory}/ray", "--block",
        f"--resources={json.dumps({machine.name.split('-')[1]: 1})}",
    )  # fmt: skip
    with log.open("wb") as output:
        node = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
    try:
        wait_until(lambda: b"Ray runtime started" in log.read_bytes() or node.poll() is not None, "no node of Ray")
        assert node.poll() is None, log.read_text()
        yield
    finally:
        kill([node.pid])
        node.wait()
        for pid in pids(machine, "ray"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not pids(machine, ""), "processes of Ray are left")


@pytest.fixture(scope="module")
def places() -> Iterator[list[Machine]]:
    with machines(3) as found:
        yield found


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need a short path
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(places, directory) -> Iterator[list[Machine]]:
    head, other, _ = places
    with ray_node(head, directory, "--head", f"--port={PORT}"), joined_node(head, other, directory):
        yield [head, other]


@pytest.fixture
def lost(cluster, places, directory) -> Iterator[Machine]:
    """Add a node that need not be one of the cluster afterwards."""
    places[2].set_link("up")
    with joined_node(cluster[0], places[2], directory):
        yield places[2]


def joined_node(head: Machine, machine: Machine, directory: str) -> contextlib.AbstractContextManager[None]:
    return ray_node(machine, directory, f"--address={head.address}:{PORT}")


def small_run(student: str) -> list[str]:
    """Return the keys of a small run, with its student on the other node and its teacher on the head."""
    return [
        "cluster.kind=ray", "cluster.join_timeout_s=30", "student.serving.own_cores=0",
        f"student.backend={{launch: {{resources: {{{student}}}}}}}", "teacher.backend={launch: {resources: {m0: 1}}}",
        "training.iterations=3", *SHORT,
    ]  # fmt: skip


def left(cluster: Sequence[Machine]) -> list[int]:
    """Return what is left of a run on both nodes: its servers, their guards, and all that leads to them."""
    words = (SERVER, "SPOT_ASYNC_GUARD", "spot_async")
    return [pid for machine in cluster for word in words for pid in pids(machine, word)]


def check_trained_once(machine: Machine, run: Path) -> None:
    words = machine.command(PYTHON, "-m", "spot_async", "verify-run", str(run))
    checked = subprocess.run(words, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


class RayRun:
    """A run on the head."""

    def __init__(
        self,
        cluster: Sequence[Machine],
        directory: Path,
        *keys: str,
        student: str = "m1: 1",
        heartbeat_timeout_s: float = 60.0,
    ) -> None:
        self.cluster = cluster
        self.path = directory / "run"
        self._log = directory / "command.log"
        words = [
            PYTHON, "-m", "spot_async", "train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={self.path}",
            *small_run(student), f"cluster.address={cluster[0].address}:{PORT}", "evaluation=null", *keys,
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                cluster[0].command(*with_heartbeats(words, heartbeat_timeout_s)),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> RayRun:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        wait_until(lambda: not self.left(), "processes of the run are left", 30)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def iterations(self) -> int:
        return rows(self.path)

    def until(self, iterations: int) -> None:
        wait_until(lambda: self.iterations() >= iterations or self.process.poll() is not None, "no iteration")
        assert self.process.poll() is None, self.said

    def left(self) -> list[int]:
        return left(self.cluster)

    def ended(self) -> int:
        wait_until(lambda: self.process.poll() is not None, f"the run continues: {self.said}")
        return int(self.process.returncode)


LONG = "training.iterations=2000"
NODES = ("training.ranks=2", "cluster.nodes=2", "cluster.resources={m1: 0.5}", "training.checkpoint_every=1")
DATA = ROOT / "examples" / "running_sum"
TABLE = (
    f"evaluation={{problems: {DATA}/data/heldout.jsonl, samples: 1, max_response_tokens: 64, verifier: boxed_match}}"
)


def test_the_quickstart_trains_to_its_table_with_its_servers_on_two_nodes_and_leaves_nothing(cluster, tmp_path):
    with RayRun(cluster, tmp_path, TABLE) as run:
        run.until(1)
        assert [len(pids(machine, SERVER)) > 0 for machine in cluster] == [True, True]
        assert run.ended() == 0, run.said
        wait_until(lambda: not run.left(), "something is left", 5)
        assert run.iterations() == 3
        assert "Held-out problems: percent" in run.said
        assert (run.path / "logs" / "student.log").read_text()


class RayJob:
    """`deploy/ray-job.sh` with a small run, and a trainer node on the other machine."""

    def __init__(self, cluster: Sequence[Machine], directory: Path, *keys: str) -> None:
        self.run = directory / "run"
        self._head, self._log = cluster[0], directory / "job.log"
        programs = Path(PYTHON).parent
        variables = [
            f"PATH={programs}:{os.environ['PATH']}", f"SPOT_ASYNC={programs}/spot-async", f"RUN={self.run}",
            "TRAINER_NODES=2", "TRAINER_GPUS=0",
        ]  # fmt: skip
        paths = [
            f"student.model={DATA}/student",
            f"teacher.model={DATA}/teacher",
            f"data.train={DATA}/data/train.jsonl",
        ]
        words = [str(ROOT / "configs/quickstart.yaml"), *paths, *small_run("m1: 0.5"), *NODES, TABLE, *keys]
        script = str(ROOT / "deploy" / "ray-job.sh")
        with self._log.open("wb") as log:
            command = self._head.command("env", *variables, script, *words)
            self.process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        job = re.search(r"raysubmit_\w+", self.said)
        assert job is not None
        words = self._head.command(PYTHON, "-m", "ray.scripts.scripts", "job", "stop", job[0])
        subprocess.run(words, check=True, capture_output=True)


def test_a_submitted_job_that_is_stopped_leaves_nothing_and_goes_on_to_its_table_when_submitted_again(
    cluster, tmp_path
):
    job = RayJob(cluster, tmp_path, LONG)
    wait_until(lambda: rows(job.run) >= 2 or job.process.poll() is not None, f"no iteration: {job.said}")
    assert job.process.poll() is None, job.said
    assert [len(pids(machine, RANK)) for machine in cluster] == [1, 1]
    job.stop()
    wait_until(lambda: not left(cluster), "something is left", 20)
    job.process.wait(PATIENCE_S)
    iterations = rows(job.run) + 1
    again = RayJob(cluster, tmp_path, f"training.iterations={iterations}")
    assert again.process.wait(PATIENCE_S) == 0, again.said
    assert "continuing after iteration" in again.said
    assert "Held-out problems: percent" in again.said
    assert rows(job.run) == iterations
    check_trained_once(cluster[0], job.run)


OTHER_VERSION = """
import sys, ray
ray.__version__ = "2.0.0"
from spot_async.base.processes.ray_helper import connect
from spot_async.base.processes.ray_helper import Request
try:
    connect(Request(sys.argv[1], {}, 5.0))
except RuntimeError as error:
    print(error)
"""


def test_a_cluster_of_another_version_is_one_line_with_both(cluster):
    head = cluster[0]
    words = head.command(PYTHON, "-c", OTHER_VERSION, f"{head.address}:{PORT}")
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"cluster\.address=\S+: the cluster has Ray \S+ and .*, here are Ray 2\.0\.0 and .*\n", said), (
        said
    )


def test_what_cannot_be_placed_is_one_line_with_what_is_asked_and_free(cluster, tmp_path):
    with RayRun(cluster, tmp_path, student="GPU: 1") as run:
        assert run.ended() == 2, run.said
        line = next(line for line in run.said.splitlines() if "could not place" in line)
        assert "no node has what one of them takes" in line
        assert "student {GPU: 1}; teacher {m0: 1}" in line
        assert f"{cluster[1].address} {{CPU: 2, m1: 1}}" in line
        assert not run.left()


def test_a_trainer_s_second_node_is_placed_lost_placed_again_and_every_prompt_is_trained_once(cluster, tmp_path):
    with RayRun(cluster, tmp_path, *NODES, "training.iterations=6", student="m1: 0.5") as run:
        run.until(1)
        assert [len(pids(machine, RANK)) for machine in cluster] == [1, 1]
        kill([max(pids(cluster[1], "spot_async.trainer.nodes"))])
        assert run.ended() == 0, run.said
        assert "node 1 (" in run.said
        assert "(restart 1 of 2)" in run.said
        wait_until(lambda: not run.left(), "something is left", 5)
        assert run.iterations() == 6
        check_trained_once(cluster[0], run.path)


def test_nothing_is_left_of_a_placed_trainer_node_when_the_run_is_killed(cluster, tmp_path):
    with RayRun(cluster, tmp_path, *NODES, LONG, student="m1: 0.5") as run:
        run.until(1)
        kill([run.process.pid])
        wait_until(lambda: not run.left(), "something is left", 12)  # agents wait for no second SIGTERM


def test_a_trainer_node_that_fits_nowhere_is_in_the_line_of_what_is_asked(cluster, tmp_path):
    with RayRun(cluster, tmp_path, *NODES, "cluster.resources={GPU: 8}") as run:
        assert run.ended() == 2, run.said
        assert "trainer node 1 {GPU: 8}: nodes: " in " ".join(run.said.split())


@pytest.mark.parametrize("victim", ["orchestrator", "helper"])
def test_nothing_is_left_on_any_node_when_this_end_is_killed(cluster, tmp_path, victim):
    with RayRun(cluster, tmp_path, LONG) as run:
        run.until(1)
        kill(
            [run.process.pid] if victim == "orchestrator" else pids(cluster[0], "spot_async.base.processes.ray_helper")
        )
        wait_until(lambda: not run.left(), "something is left", 20)
        assert run.ended() != 0
        assert victim == "orchestrator" or "ray (pid" in run.said


@pytest.mark.parametrize("victim", ["ray::Worker", SERVER])
def test_a_worker_or_a_server_that_is_killed_takes_all_of_it_along_and_the_pool_starts_it_again(
    cluster, tmp_path, victim
):
    with RayRun(cluster, tmp_path, LONG) as run:
        run.until(1)
        before = pids(cluster[1], SERVER)
        kill(pids(cluster[1], victim))
        wait_until(lambda: not set(before) & set(pids(cluster[1], SERVER)), "the server is left", 20)
        wait_until(lambda: pids(cluster[1], SERVER), f"not started again: {run.said}")
        seen = run.iterations()
        run.until(seen + 3)


KILLED_BY_RAY = """
import sys, time, ray
from spot_async.base.processes.far_side import FarPlace
from spot_async.base.processes.ray_helper import BETWEEN, Worker
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
worker = ray.remote(Worker).options(resources={"m1": 1}).remote({}, BETWEEN)
number, address, pid = ray.get(worker.start.remote())
script = FarPlace([], sys.executable, 60).script(["sh", "-c", "sleep 6001 & setsid sleep 6002 & echo; wait"], {}, 1)
ray.get(worker.write.remote(number, script.encode()))
ray.get(worker.read.remote(number, "stdout", 1))
print("running", flush=True)
sys.stdin.readline()
ray.kill(worker)
sys.stdin.readline()
"""


def test_what_a_server_has_started_ends_when_ray_kills_the_worker(cluster):
    """Ray then kills the worker's direct children by SIGKILL; the far guard is none of those."""
    head, other = cluster
    driver = subprocess.Popen(
        head.command(PYTHON, "-c", KILLED_BY_RAY, f"{head.address}:{PORT}"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with driver:
        assert driver.stdout.readline() == "running\n"
        assert len(pids(other, "sleep 600")) >= 2
        driver.stdin.write("\n")
        driver.stdin.flush()
        wait_until(lambda: not pids(other, "sleep 600"), "something is left", 10)
        driver.kill()


@pytest.mark.parametrize("victim", ["raylet/raylet", "scripts start", "link"])
def test_nothing_is_left_on_a_node_that_ray_has_lost(cluster, lost, tmp_path, victim):
    with RayRun([*cluster, lost], tmp_path, LONG, student="m2: 1", heartbeat_timeout_s=5.0) as run:
        run.until(1)
        assert pids(lost, SERVER)
        if victim == "link":
            lost.set_link("down")
        else:
            kill(pids(lost, victim))
        wait_until(lambda: not pids(lost, "spot_async"), "something is left", 20)


def test_nothing_is_left_when_the_head_of_the_cluster_is_gone(cluster, tmp_path):
    """The last test: it takes the cluster. Ray's processes wait a minute for a head that comes back."""
    with RayRun(cluster, tmp_path, LONG) as run:
        run.until(1)
        kill(pids(cluster[0], "gcs_server"))
        wait_until(lambda: not run.left(), "something is left", 150)
        assert run.ended() != 0
        assert "ray (pid" in run.said
