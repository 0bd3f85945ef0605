"""Holds places on a Ray cluster, for servers and the trainer's nodes, and runs shells there. Only this imports ray.

    python -m spot_async.base.processes.ray_helper REQUEST DIRECTORY

It makes one placement group with a bundle for each. It answers once, with a datagram to `DIRECTORY/placed`.
Then it listens at `DIRECTORY/shells`, where `ray_shell.py` asks for a shell in a place. Ray only runs that shell: all
else is as behind ssh (`far_side.py`). When this process ends, however it does, Ray ends its workers. Each shell's input
ends with its worker, so the far guards stop the servers.

What the run and this process say to each other (`Request`, `Placed`) is here too.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spot_async.base.processes.exits import exit_with_parent
from spot_async.base.processes.ray_shell import UNREACHED

REACH_TIMEOUT_S = 10.0  # for the head of the cluster to take a connection
WORKER_TIMEOUT_S = 100.0  # for Ray to start a worker in a place that it holds
LOOK_INTERVAL_S = 0.5
SHELLS_AT_ONCE = 8  # in one place: a server, and questions before its start
READ_BYTES = 1 << 16
LINE_CHARACTERS = 240  # of an error
# Runs between the worker and the shell, which becomes the far guard. A worker that ends kills its direct children by
# SIGKILL: then the guard could not stop what the server has started. The worker also blocks and ignores signals, and
# children would inherit that.
BETWEEN = """
import signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
code = subprocess.call(sys.argv[1:])
sys.exit(code if code >= 0 else 128 - code)
"""
ANSWER = "placed"  # sockets in the helper's directory
SHELLS = "shells"
_VERSIONS = re.compile(r"Ray: (\S+) Python: (\S+)")
_ALL_NODES_HAVE = ("node:", "memory", "object_store_memory", "accelerator_type:")  # resources that Ray adds by itself

Resources = Mapping[str, float]  # by Ray's names, such as CPU and GPU


class Request(msgspec.Struct):
    """The places to find."""

    address: str  # of the cluster
    servers: dict[str, dict[str, float]]  # what each server takes of a machine, by its name
    timeout_s: float
    nodes: dict[str, dict[str, float]] = {}  # the same of the trainer's nodes, which may move to another machine

    @property
    def asked(self) -> dict[str, dict[str, float]]:
        """Return all of it, in the order of places."""
        return {**self.servers, **self.nodes}


class Placed(msgspec.Struct):
    """The answer: either the address of each place, or why there is none, in one line."""

    addresses: dict[str, str] = {}
    problem: str | None = None


def refused(address: str, reason: str) -> str:
    """Say why Ray did not let us in."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    said = " ".join(lines)
    if "ersion mismatch" in said:
        found = _VERSIONS.findall(said)  # the cluster's come first
        if len(found) != 2:
            return f"cluster.address={address}: install the cluster's versions here: {said}"
        theirs, ours = (f"Ray {ray} and Python {python}" for ray, python in found)
        return f"cluster.address={address}: the cluster has {theirs}, here are {ours}: install the same here"
    return f"cluster.address={address}: no Ray cluster that this machine is a node of: {said or 'no answer'}"


def not_placed(request: Request, state: str, nodes: Mapping[str, Resources], free: Resources) -> str:
    """Say what was asked for in vain, what the nodes have, and what of that is free."""
    asked = "; ".join(f"{name} {shown(resources)}" for name, resources in request.asked.items())
    have = "; ".join(f"{address} {shown(resources)}" for address, resources in sorted(nodes.items()))
    why = "no node has what one of them takes" if state == "INFEASIBLE" else "not enough of it is free"
    return (
        f"cluster: Ray could not place all within cluster.join_timeout_s={request.timeout_s:g}: {why}: "
        f"asked: {asked}: nodes: {have}: free in all: {shown(free)}"
    )


def shown(resources: Resources) -> str:
    """Return resources as the configuration has them."""
    own = {name: value for name, value in sorted(resources.items()) if not name.startswith(_ALL_NODES_HAVE)}
    return "{" + ", ".join(f"{name}: {value:g}" for name, value in own.items()) + "}"


class Worker:
    """The actor in a place. Ray sends its class by value, so the node needs nothing of ours."""

    def __init__(self, resources: Mapping[str, float], between: str) -> None:
        import os

        import ray

        ours = ("RAY_", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES")
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))
        if resources.get("CPU", 0) >= 1:
            self._environment["OMP_NUM_THREADS"] = str(int(resources["CPU"]))
        self._between = between
        self._shells: dict[int, Any] = {}

    def start(self) -> tuple[int, str, int]:
        """Start a shell. Return its number, the node's address, and this process's number."""
        import os
        import subprocess
        import sys

        import ray

        shell = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._between, "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=self._environment,
            start_new_session=True,
        )
        self._shells[shell.pid] = shell
        return shell.pid, ray.util.get_node_ip_address(), os.getpid()

    def write(self, number: int, data: bytes) -> None:
        """Pass on input; none ends it."""
        shell = self._shells.get(number)
        if shell is None:
            return
        try:
            while data:
                data = data[shell.stdin.write(data) :]
                if not data:
                    return
            shell.stdin.close()
        except (OSError, ValueError):  # it has ended, or its input has
            pass

    def read(self, number: int, stream: str, size: int) -> bytes:
        """Wait for output and return it; b"" at its end."""
        data: bytes = getattr(self._shells[number], stream).read(size)
        return data

    def end(self, number: int) -> int:
        """Wait for the shell's end. Return its exit code."""
        code: int = self._shells[number].wait()
        shell = self._shells.pop(number)
        for stream in (shell.stdin, shell.stdout, shell.stderr):
            stream.close()
        return code


class Place:
    """A bundle, and the actor in it, which is made when it is needed, and again when it was lost."""

    def __init__(self, ray: Any, group: Any, number: int, resources: Mapping[str, float], address: str | None) -> None:
        """`address` is where it must be; None: it may move."""
        self._ray, self._group, self._number, self._resources = ray, group, number, resources
        self._address = address
        self._lock = threading.Lock()
        self._worker: Any = None

    def run(self, connection: socket.socket, given: int, output: int, errors: int) -> None:
        """Run a shell with this input and these outputs, close them, and tell its exit code to `connection`."""
        with connection:
            worker = self._get_worker()
            try:
                number = self._start(worker)
            except (self._ray.exceptions.RayError, RuntimeError) as error:
                self._lose(worker)
                _say(errors, f"error: Ray: {_line(error)}")
                code = UNREACHED
                os.close(given)
            else:
                code = self._copy(worker, number, given, output, errors)
            os.close(output)
            os.close(errors)
            with contextlib.suppress(OSError):
                connection.sendall(str(code).encode())

    def _start(self, worker: Any) -> int:
        number, address, pid = self._ray.get(worker.start.remote(), timeout=WORKER_TIMEOUT_S)
        if self._address not in (address, None):
            raise RuntimeError(f"the place at {self._address} has moved to {address}: end the run, and resume it")
        print(f"shell {number} of worker {pid} at {address}", flush=True)  # noqa: T201 - this process's log
        return int(number)

    def _copy(self, worker: Any, number: int, given: int, output: int, errors: int) -> int:
        ray, lost = self._ray, []

        def copy_input() -> None:
            try:
                while data := os.read(given, READ_BYTES):
                    ray.get(worker.write.remote(number, data))
                ray.get(worker.write.remote(number, b""))
            except ray.exceptions.RayError:
                pass  # those that read the outputs say it
            finally:
                os.close(given)

        def copy_output(stream: str, target: int) -> None:
            try:
                while data := ray.get(worker.read.remote(number, stream, READ_BYTES)):
                    with contextlib.suppress(OSError):  # nobody reads any more: the shell's end is still waited for
                        _write(target, data)
            except ray.exceptions.RayError as error:
                lost.append(error)

        threading.Thread(target=copy_input, daemon=True).start()
        copies = [
            threading.Thread(target=copy_output, args=given, daemon=True)
            for given in (("stdout", output), ("stderr", errors))
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.join()
        try:
            if not lost:
                return int(ray.get(worker.end.remote(number)))
        except ray.exceptions.RayError as error:
            lost.append(error)
        self._lose(worker)
        where = "" if self._address is None else f" at {self._address}"
        _say(errors, f"error: Ray lost the worker{where}: {_line(lost[0])}")
        return UNREACHED

    def _get_worker(self) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with self._lock:
            if self._worker is None:
                resources = dict(self._resources)
                self._worker = (
                    self._ray.remote(Worker)
                    .options(
                        num_cpus=resources.pop("CPU", 0),
                        num_gpus=resources.pop("GPU", 0),
                        resources=resources,
                        max_restarts=0,
                        max_concurrency=4 * SHELLS_AT_ONCE,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(
                            placement_group=self._group, placement_group_bundle_index=self._number
                        ),
                    )
                    .remote(self._resources, BETWEEN)
                )
            return self._worker

    def _lose(self, worker: Any) -> None:
        """Forget a worker. What it may still run is ended."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(worker)
        with self._lock:
            if self._worker is worker:
                self._worker = None


def connect(request: Request) -> Any:
    """Return ray, connected to the cluster. Raises `RuntimeError` with what keeps us from it, in one line."""
    try:
        import ray
    except ImportError:
        raise RuntimeError(
            "cluster.kind=ray: ray is not installed here (pip install ray, in the version of the cluster)"
        ) from None
    host, _, port = request.address.rpartition(":")
    try:
        if port.isdecimal():  # ray itself takes minutes to say that nobody is there
            socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S).close()
        ray.init(address=request.address, log_to_driver=False, logging_level="error", include_dashboard=False)
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        raise RuntimeError(refused(request.address, str(error))) from None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ray's own handler would only add a trace to the log
    return ray


def place(ray: Any, request: Request) -> tuple[Any, list[str]]:
    """Return the placement group and each bundle's address. Raises `RuntimeError` if there is no room in time."""
    from ray.util.placement_group import placement_group, placement_group_table

    bundles = list(request.asked.values())
    group = placement_group(bundles, strategy="PACK")
    deadline = time.monotonic() + request.timeout_s
    while not group.wait(LOOK_INTERVAL_S):
        if time.monotonic() > deadline:
            state = placement_group_table(group)["stats"]["scheduling_state"]
            nodes = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
            raise RuntimeError(not_placed(request, state, nodes, ray.available_resources()))
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    where = placement_group_table(group)["bundles_to_node_id"]
    return group, [addresses[where[number]] for number in range(len(bundles))]


def main(request: Request, directory: Path) -> None:
    """Find the places, say where they are, and then run shells until we are ended."""
    exit_with_parent()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as answering:
        listener.bind(str(directory / SHELLS))
        listener.listen()
        answering.connect(str(directory / ANSWER))
        try:
            ray = connect(request)
            group, addresses = place(ray, request)
        except RuntimeError as error:
            answering.send(msgspec.json.encode(Placed(problem=str(error))))
            signal.pause()  # we are ended once that was read; our own end would be told in its place
            return
        places = [
            Place(ray, group, number, resources, addresses[number] if name in request.servers else None)
            for number, (name, resources) in enumerate(request.asked.items())
        ]
        answering.send(msgspec.json.encode(Placed(addresses=dict(zip(request.asked, addresses, strict=True)))))
        serve(listener, places)


def serve(listener: socket.socket, places: Sequence[Place]) -> None:
    """Run a shell for each connection, for ever."""
    while True:
        connection, _ = listener.accept()
        number, descriptors, _, _ = socket.recv_fds(connection, 16, 3)
        if len(descriptors) == 3:
            run = places[int(number)].run
            threading.Thread(target=run, args=(connection, *descriptors), daemon=True).start()


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def _say(target: int, line: str) -> None:
    with contextlib.suppress(OSError):
        _write(target, f"{line}\n".encode())


def _line(error: Exception) -> str:
    """Return an error of Ray in one line, without the pages that some have."""
    text = " ".join(str(error).split())
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]} ..."


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Request), Path(sys.argv[2]))
