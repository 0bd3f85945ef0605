"""Servers started as a run starts them: what they offer, how failures are explained, and that they end completely.

Another user of the machine can neither replace a student on them, nor see their key.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
from conftest import SGLANG_LAUNCHER, TinyModels
from parity import soon
from server_process import command_line, expect_gone

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.launch import LaunchedServer
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.base.processes.guard import process_tree
from spot_async.errors import ConfigError, ProcessDiedError
from spot_async.types import SamplingSettings, WeightSnapshot, WeightVersion

PROMPT = np.arange(10, 30, dtype=np.int32)
SAMPLING = SamplingSettings(temperature=1e-3, max_tokens=12, stop_token_ids=(2,), seed=3)  # SGLang ignores seeds
NOBODY = 65534
TOP_K = 80
FIRST = WeightVersion(0, 0)

# What gives SGLang weights, stops it, has it work, and tells of it.
UPDATES = [
    ("GET", "/model_info", None),
    ("GET", "/server_info", None),
    ("POST", "/pause_generation", {"mode": "abort"}),
    ("POST", "/update_weights_from_disk", {"model_path": "{evil}", "weight_version": "0.0"}),
    ("POST", "/update_weight_version", {"new_version": "0.7"}),
    ("POST", "/init_weights_update_group", {}),
    ("POST", "/flush_cache", {}),
    ("POST", "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}),
    ("POST", "/v1/completions", {"prompt": "x"}),
]

KNOCK = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[2])
except OSError as error:
    sys.exit(type(error).__name__)
"""


def vllm(launch: LaunchSettings, model: Path, run_directory: Path) -> VllmBackend:
    settings = VllmBackend.Settings(launch=launch, top_k=TOP_K)
    return VllmBackend(settings, role="student", model=str(model), run_directory=run_directory)


def changed(launch: LaunchSettings, *arguments: str, **settings: object) -> LaunchSettings:
    return launch.model_copy(update={"arguments": [*launch.arguments, *arguments], **settings})


def children_of_this_test() -> set[int]:
    return process_tree(os.getpid()).keys() - {os.getpid()}


def listening_ports(pids: set[int]) -> set[int]:
    """TCP ports at which any of these processes accepts connections."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(str(descriptor.readlink()))
            except OSError:
                continue  # closed meanwhile
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


async def expect_no_http(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=2.0) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health")


def filled(body: object, evil: Path) -> object:
    if isinstance(body, dict):
        return {name: filled(each, evil) for name, each in body.items()}
    return str(evil) if body == "{evil}" else body


async def refusals(client: httpx.AsyncClient, evil: Path) -> list[int]:
    """Statuses of everything that may give the server weights or tell of it, without its key and with another."""
    found = []
    for method, path, body in UPDATES:
        for headers in ({}, {"Authorization": "Bearer " + 64 * "0"}, {"Authorization": "Bearer None"}):
            reply = await client.request(method, path, json=filled(body, evil), headers=headers)
            found.append(reply.status_code)
    return found


def expect_hidden(key: str, started: set[int], run_directory: Path) -> None:
    """In no command line, however its processes are called by now, and in no file of the run."""
    assert len(key) == 64
    for pid in started:
        assert not any(key in word for word in command_line(pid))
    files = [path for path in run_directory.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if key in path.read_text(errors="replace")] == []


with_ours = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Ours:
    """A student's server that was started for the tests of this file, with its processes and the weights it has."""

    backend: VllmBackend | SglangBackend
    processes: set[int]
    directory: Path
    version: WeightVersion = FIRST

    @property
    def launched(self) -> LaunchedServer:
        assert self.backend._server._launched is not None
        return self.backend._server._launched

    async def update(self, model: Path) -> None:
        self.version = WeightVersion(0, self.version.step + 1)
        snapshot = WeightSnapshot(directory=str(model), version=self.version)
        await self.backend.update_weights(snapshot, deadline=soon())


@asynccontextmanager
async def started(backend: VllmBackend | SglangBackend, directory: Path) -> AsyncIterator[Ours]:
    before = children_of_this_test()
    async with backend:
        ours = Ours(backend, children_of_this_test() - before, directory)
        key = ours.launched.key
        assert (await backend.capabilities(deadline=soon())).version == ours.version
        yield ours
    expect_hidden(key, set(), directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def our_vllm(
    vllm_launch: LaunchSettings, models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ours]:
    # `vllm serve` starts where this is the distribution's name. The one for CPUs has another.
    named = tmp_path_factory.mktemp("packages") / "vllm-0.32.0+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    path = f"{vllm_launch.environment['PYTHONPATH']}:{named.parent}"
    launch = changed(vllm_launch, environment={**vllm_launch.environment, "PYTHONPATH": path})
    directory = tmp_path_factory.mktemp("run")
    async with started(vllm(launch, models.student, directory), directory) as ours:
        yield ours


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def our_sglang(
    sglang_launch: LaunchSettings, models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ours]:
    settings, directory = SglangBackend.Settings(launch=sglang_launch), tmp_path_factory.mktemp("run")
    backend = SglangBackend(settings, role="student", model=str(models.student), run_directory=directory)
    async with started(backend, directory) as ours:
        yield ours


async def expect_the_runs_own(ours: Ours, before: list[int], other: Path) -> None:
    """It serves what it served, under the name that it had, and takes weights of the run."""
    again = await ours.backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert again.token_ids.tolist() == before
    assert {span.version for span in again.version_spans} == {FIRST}
    await ours.update(other)
    new = await ours.backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert new.token_ids.tolist() != before
    assert {span.version for span in new.version_spans} == {ours.version}


async def follow(ours: Ours, other: Path) -> None:
    """A student's life on the trainer's devices. On a CPU servers take these calls and keep their memory, so what is
    proven is that the order works: asleep, awake with the weights they had, and with new ones, which came before caches
    woke."""
    backend = ours.backend
    first = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert {span.version for span in first.version_spans} == {ours.version}

    await backend.sleep(deadline=soon())
    await backend.wake(deadline=soon())
    again = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert again.token_ids.tolist() == first.token_ids.tolist()

    await backend.sleep(deadline=soon())
    await backend.wake_weights(deadline=soon())
    await ours.update(other)
    await backend.wake(deadline=soon())
    new = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert {span.version for span in new.version_spans} == {ours.version}
    assert new.token_ids.tolist() != first.token_ids.tolist()


async def kill_and_watch(ours: Ours, main_program: str) -> None:
    """The server's first process is killed, which alone would leave the others running or in doubt."""
    # What the interpreter was told to run. Servers rename some of their processes, which then have none.
    [server] = [pid for pid in ours.processes if main_program in command_line(pid)[1:3]]
    os.kill(server, signal.SIGKILL)
    with pytest.raises(ProcessDiedError, match=r"student \(pid \d+\) was killed by SIGKILL \(log: ") as raised:
        await ours.backend.watch()
    assert raised.value.__notes__[0].strip()
    assert not children_of_this_test() & ours.processes


# The last test of a server ends it.


@with_ours
async def test_nobody_but_the_runs_user_reaches_a_vllm_student(our_vllm: Ours, models: TinyModels) -> None:
    launched = our_vllm.launched
    assert launched.uds is not None
    before = (await our_vllm.backend.generate(PROMPT, SAMPLING, deadline=soon())).token_ids.tolist()
    await asyncio.gather(*map(expect_no_http, listening_ports(our_vllm.processes)))  # torch's own stores
    if os.geteuid() == 0:
        knocking = [sys.executable, "-c", KNOCK, str(NOBODY), launched.uds]
        asked = await asyncio.to_thread(subprocess.run, knocking, capture_output=True, text=True, timeout=60.0)
        assert asked.stderr == "PermissionError\n"
    async with httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=launched.uds), base_url="http://localhost"
    ) as client:  # of the same user: its key opens what vLLM guards with one
        assert (await client.get("/v1/models")).status_code == 401
        shown = {"Authorization": f"Bearer {launched.key}"}
        assert (await client.get("/v1/models", headers=shown)).status_code == 200
    await expect_the_runs_own(our_vllm, before, models.other)
    expect_hidden(launched.key, our_vllm.processes, our_vllm.directory)


@with_ours
async def test_a_vllm_student_from_start_to_a_sudden_end(our_vllm: Ours, models: TinyModels) -> None:
    assert len(our_vllm.processes) >= 3  # the guard, the API server, its engine
    offered = await our_vllm.backend.capabilities(deadline=soon())
    assert (offered.weight_update, offered.max_generation_top_k) == (True, TOP_K)
    await follow(our_vllm, models.teacher)
    assert our_vllm.backend.traffic.requests
    await kill_and_watch(our_vllm, "vllm.entrypoints.cli.main")


@with_ours
async def test_nobody_without_the_runs_key_replaces_an_sglang_student(our_sglang: Ours, models: TinyModels) -> None:
    launched = our_sglang.launched
    before = (await our_sglang.backend.generate(PROMPT, SAMPLING, deadline=soon())).token_ids.tolist()
    async with httpx.AsyncClient(base_url=launched.url, timeout=60.0) as client:
        assert set(await refusals(client, models.other)) == {401}
        shown = {"Authorization": f"Bearer {launched.key}"}
        assert (await client.get("/model_info", headers=shown)).status_code == 200
    await expect_the_runs_own(our_sglang, before, models.other)
    expect_hidden(launched.key, our_sglang.processes, our_sglang.directory)
    # SGLang says all of its settings.
    assert "'***'" in (our_sglang.directory / "logs" / "student.log").read_text()


@with_ours
async def test_an_sglang_student_from_start_to_a_sudden_end(our_sglang: Ours, models: TinyModels) -> None:
    assert len(our_sglang.processes) >= 4  # the guard, the HTTP server, scheduler and detokeniser
    await follow(our_sglang, models.teacher)
    await kill_and_watch(our_sglang, str(SGLANG_LAUNCHER))


async def test_a_server_that_cannot_start_shows_what_its_engine_said(
    vllm_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    launch = changed(vllm_launch, "--kv-cache-memory-bytes", "1000")
    with pytest.raises(ProcessDiedError, match=r"exited with code 1: RuntimeError: Engine core init") as raised:
        await vllm(launch, models.student, tmp_path).__aenter__()
    assert "ValueError: No available memory for the cache blocks" in raised.value.__notes__[0]
    assert (tmp_path / "logs" / "student.log").exists()


async def test_an_environment_without_vllm_is_refused_before_anything_starts(
    vllm_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    launch = changed(vllm_launch, python=sys.executable)
    with pytest.raises(ConfigError, match=r"student\.backend\.launch\.python: no vllm in .*: install it there"):
        await vllm(launch, models.student, tmp_path).__aenter__()


ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.sglang import SglangBackend
from spot_async.backends.vllm import VllmBackend

async def main(launch, model, directory):
    settings = VllmBackend.Settings(launch=LaunchSettings.model_validate_json(launch))
    backend = VllmBackend(settings, role="student", model=model, run_directory=Path(directory))
    async with backend:
        print("ready", flush=True)
        await backend.watch()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.nightly  # `base/test_guard.py` kills the orchestrator of a stubborn tree of processes every time
def test_nothing_is_left_of_a_server_when_its_orchestrator_is_killed(
    vllm_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, vllm_launch.model_dump_json(), str(models.student), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with orchestrator:
        try:
            assert orchestrator.stdout is not None
            said = iter(orchestrator.stdout.readline, "")
            assert any(line == "ready\n" for line in said)
            tree = process_tree(orchestrator.pid).keys() - {orchestrator.pid}
            assert len(tree) >= 3
        finally:
            orchestrator.kill()
    expect_gone(tree)
