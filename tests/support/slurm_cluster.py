"""A real Slurm of three nodes on this machine: namespaces with addresses and host names of their own, and fake GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from network_namespaces import Machine, machines

START_S = 60.0
CONFIGURATION = """
ClusterName=spot
SlurmctldHost=node1({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool-%n
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=node[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 "
    "RealMemory=1000 Gres=gpu:1"
)


@dataclass(frozen=True)
class Slurm:
    """A cluster whose clients run on its first node."""

    place: list[Machine]
    directory: Path

    def call(self, *words: str, env: dict[str, str] | None = None) -> str:
        """Run a client; return what it printed."""
        done = subprocess.run(
            _on(self.place[0], 0, self.directory, words),
            env=os.environ | {"SLURM_CONF": f"{self.directory}/slurm.conf"} | (env or {}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def pids(self) -> set[str]:
        """Return the processes of all nodes."""
        found = [["ip", "netns", "pids", each.name] for each in self.place]
        return {pid for each in found for pid in subprocess.check_output(each, text=True).split()}


@contextlib.contextmanager
def slurm(directory: Path, count: int = 3) -> Iterator[Slurm]:
    """Start a cluster; yield it. Skips where there is no Slurm, or no right to make namespaces."""
    if None in map(shutil.which, ("slurmctld", "slurmd", "munged", "nsenter", "unshare")):
        pytest.skip("needs slurmctld, slurmd and munge")
    with machines(count) as place, contextlib.ExitStack() as stack:
        _write(directory, place)
        key = [f"--{name}={directory}/munge.{name.removesuffix('-file')}" for name in ("key-file", "pid-file")]
        files = [*key, f"--log-file={directory}/munge.log", f"--seed-file={directory}/munge.seed"]
        stack.enter_context(_running(["munged", "-F", "--force", f"--socket={directory}/munge.socket", *files]))
        conf = f"{directory}/slurm.conf"
        stack.enter_context(_running(_on(place[0], 0, directory, ["slurmctld", "-D", "-f", conf, "-c"])))
        for number, machine in enumerate(place):
            words = ["slurmd", "-D", "-f", conf, "-N", f"node{number + 1}"]
            stack.enter_context(_running(_on(machine, number, directory, words)))
        cluster = Slurm(place, directory)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(AssertionError):
                if cluster.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == _names(count):
                    break
            assert time.monotonic() < deadline, (directory / "slurmctld.log").read_text()
            time.sleep(0.5)
        yield cluster


def _write(directory: Path, place: list[Machine]) -> None:
    for name in ("state", *(f"spool-{node}" for node in _names(len(place)))):
        (directory / name).mkdir()
    named = list(zip(_names(len(place)), place, strict=True))
    nodes = "\n".join(NODE.format(name=name, address=each.address) for name, each in named)
    text = CONFIGURATION.format(address=place[0].address, directory=directory, nodes=nodes, count=len(place))
    (directory / "slurm.conf").write_text(text)
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
    subprocess.run(["mknod", directory / "gpu0", "c", "1", "3"], check=True)
    (directory / "gres.conf").write_text(f"NodeName=node[1-{len(place)}] Name=gpu File={directory}/gpu0\n")
    hosts = [f"{each.address} {name}" for name, each in named]
    (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    (directory / "munge.key").write_bytes(os.urandom(1024))
    (directory / "munge.key").chmod(0o600)


def _names(count: int) -> list[str]:
    return [f"node{number + 1}" for number in range(count)]


def _on(machine: Machine, number: int, directory: Path, words: object) -> list[str]:
    """`ip netns exec` would mount /sys anew, without the cgroups that slurmd wants."""
    script = f'hostname node{number + 1} && mount --bind {directory}/hosts /etc/hosts && exec "$@"'
    inside = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", *map(str, words)]  # type: ignore[call-overload]
    return ["nsenter", f"--net=/run/netns/{machine.name}", *inside]


@contextlib.contextmanager
def _running(words: list[str]) -> Iterator[None]:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
