"""`deploy/slurm.sbatch` on a real Slurm: requeued at its warning it goes on, and `scancel` leaves nothing.

`make test-slurm`. Two nodes train, and the third has both servers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kill_drill import ROOT, command
from slurm_cluster import Slurm, slurm

pytestmark = pytest.mark.nightly
PATIENCE_S = 400.0
ITERATIONS = 8
KEYS = (
    "training.checkpoint_every=2",
    "training.batch_size=8",
    "training.mini_batch_size=8",
    "training.warmup_iterations=0",
    f"training.iterations={ITERATIONS}",
    "sampling.max_response_tokens=64",
    "evaluation=null",
    "student.serving.own_cores=0",
    f"student.backend.launch.python={sys.executable}",
    f"teacher.backend.launch.python={sys.executable}",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


class Job:
    """A batch job of the template."""

    def __init__(self, cluster: Slurm, directory: Path) -> None:
        self.cluster, self.run, self._log = cluster, directory / "run", directory / "job.log"
        asked = ["--parsable", "--nodes=3", "--gpus-per-node=1", f"--output={self._log}", f"--chdir={ROOT}"]
        script = str(ROOT / "deploy" / "slurm.sbatch")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = ["sbatch", *asked, script, "configs/quickstart.yaml", *KEYS]
        self.id = cluster.call(*words, env={"PATH": path, "RUN": str(self.run)})

    @property
    def state(self) -> str:
        return self.cluster.call("squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T")

    @property
    def iterations(self) -> int:
        rows = self.run / "metrics.jsonl"
        return len(rows.read_text().splitlines()) if rows.exists() else 0

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"{self.state}\n{self.said}"
            assert self.state not in {"FAILED", "TIMEOUT", "NODE_FAIL"}, self.said
            time.sleep(0.5)


def test_a_warned_job_saves_is_requeued_and_goes_on_to_its_end(cluster, tmp_path):
    job = Job(cluster, tmp_path)
    job.wait_until(lambda: job.iterations >= 3)
    cluster.call("scancel", "--signal=USR1", job.id)  # to all steps, as --signal does before the limit
    job.wait_until(lambda: job.state == "PENDING")
    assert "stopped by SIGUSR1; saved" in job.said
    # Slurm waits two minutes, until the credential of the first start is out of date.
    job.wait_until(lambda: job.state == "COMPLETED")
    assert "going on after iteration" in job.said
    assert job.iterations == ITERATIONS
    checked = subprocess.run(command("verify-run", str(job.run)), cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_a_cancelled_job_leaves_no_process(cluster, tmp_path):
    before = cluster.pids()
    job = Job(cluster, tmp_path)
    job.wait_until(lambda: job.iterations >= 1)
    assert cluster.pids() - before
    cluster.call("scancel", job.id)
    job.wait_until(lambda: job.state == "CANCELLED" and not cluster.pids() - before)
