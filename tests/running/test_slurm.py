"""`deploy/slurm.sbatch` on a real Slurm: out of time it is requeued and continues, and `scancel` leaves nothing.

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
from kill_drill import ROOT, SHORT, command, rows
from slurm_cluster import Slurm, slurm

pytestmark = pytest.mark.nightly
PATIENCE_S = 400.0  # with a job that shows no progress; Slurm itself waits two minutes before it starts one again
MANY = 10_000
KEYS = (
    *SHORT,
    "training.checkpoint_every=2",
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

    def __init__(self, cluster: Slurm, directory: Path, *options: str) -> None:
        self.cluster, self.run, self._log = cluster, directory / "run", directory / "job.log"
        config = directory / "my.yaml"
        config.write_text(f"base: {ROOT / 'configs' / 'quickstart.yaml'}\ntraining: {{iterations: {MANY}}}\n")
        asked = ["--parsable", "--nodes=3", "--gpus-per-node=1", f"--output={self._log}", f"--chdir={ROOT}", *options]
        script = str(ROOT / "deploy" / "slurm.sbatch")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = ["sbatch", *asked, script, str(config), *KEYS]
        self.id = cluster.call(*words, env={"PATH": path, "RUN": str(self.run)})

    def shorten(self, iterations: int) -> None:
        """Change the configuration that the run began with. The next start of the job reads it on each node."""
        path = self.run / "config.yaml"
        path.write_text(path.read_text().replace(f"iterations: {MANY}", f"iterations: {iterations}"))

    @property
    def state(self) -> str:
        return self.cluster.call("squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T")

    @property
    def iterations(self) -> int:
        return rows(self.run)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        seen, deadline = None, 0.0
        while not is_so():
            if (found := (self.state, self.iterations, self.said)) != seen:
                seen, deadline = found, time.monotonic() + PATIENCE_S
            assert time.monotonic() < deadline, f"{self.state}\n{self.said}"
            assert self.state not in {"FAILED", "TIMEOUT", "NODE_FAIL"}, self.said
            time.sleep(0.5)


def test_a_job_that_comes_to_its_time_limit_saves_is_requeued_and_goes_on_to_its_end(cluster, tmp_path):
    # Slurm looks every 30 seconds, and gives the signal up to a minute early: 90 to 120 seconds after the start.
    job = Job(cluster, tmp_path, "--time=3", "--signal=USR1@60")
    job.wait_until(lambda: job.iterations >= 1)
    job.wait_until(lambda: job.state == "PENDING")
    assert "stopped by SIGUSR1; saved" in job.said
    iterations = job.iterations + 2
    job.shorten(iterations)
    # Slurm waits two minutes, until the credential of the first start is out of date.
    job.wait_until(lambda: job.state == "COMPLETED" or job.iterations > iterations)
    assert "continuing after iteration" in job.said
    assert (job.state, job.iterations) == ("COMPLETED", iterations)
    checked = subprocess.run(command("verify-run", str(job.run)), cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_a_cancelled_job_leaves_no_process(cluster, tmp_path):
    before = cluster.pids()
    job = Job(cluster, tmp_path)
    job.wait_until(lambda: job.iterations >= 1)
    assert cluster.pids() - before
    cluster.call("scancel", job.id)
    job.wait_until(lambda: job.state == "CANCELLED" and not cluster.pids() - before)
