"""Another user of the machine can neither replace a student on servers that we start, nor see their key."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from conftest import TinyModels
from parity import soon
from server_process import command_line

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.base.processes.guard import process_tree
from spot_async.types import SamplingSettings, WeightSnapshot, WeightVersion

PROMPT = np.arange(10, 30, dtype=np.int32)
SAMPLING = SamplingSettings(temperature=1e-3, max_tokens=12, stop_token_ids=(2,), seed=3)  # SGLang ignores seeds
NOBODY = 65534

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


def own_processes() -> set[int]:
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


async def expect_the_runs_own(backend: VllmBackend | SglangBackend, before: list[int], other: Path) -> None:
    """It serves what it served, under the name that it had, and takes weights of the run."""
    again = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert again.token_ids.tolist() == before
    assert {span.version for span in again.version_spans} == {WeightVersion(0, 0)}
    await backend.update_weights(WeightSnapshot(directory=str(other), version=WeightVersion(0, 1)), deadline=soon())
    new = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert new.token_ids.tolist() != before
    assert {span.version for span in new.version_spans} == {WeightVersion(0, 1)}


def expect_hidden(key: str, started: set[int], run_directory: Path) -> None:
    """In no command line, however its processes are called by now, and in no file of the run."""
    assert len(key) == 64
    for pid in started:
        assert not any(key in word for word in command_line(pid))
    files = [path for path in run_directory.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if key in path.read_text(errors="replace")] == []


async def test_nobody_without_the_runs_key_replaces_an_sglang_student(
    sglang_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    settings, others = SglangBackend.Settings(launch=sglang_launch), own_processes()
    backend = SglangBackend(settings, role="student", model=str(models.student), run_directory=tmp_path)
    async with backend:
        launched = backend._server._launched
        assert launched is not None
        before = (await backend.generate(PROMPT, SAMPLING, deadline=soon())).token_ids.tolist()
        async with httpx.AsyncClient(base_url=launched.url, timeout=60.0) as client:
            assert set(await refusals(client, models.other)) == {401}
            shown = {"Authorization": f"Bearer {launched.key}"}
            assert (await client.get("/model_info", headers=shown)).status_code == 200
        await expect_the_runs_own(backend, before, models.other)
        expect_hidden(launched.key, own_processes() - others, tmp_path)
    expect_hidden(launched.key, set(), tmp_path)
    assert "'***'" in (tmp_path / "logs" / "student.log").read_text()  # SGLang says all of its settings


async def test_nobody_but_the_runs_user_reaches_a_vllm_student(
    vllm_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    settings, others = VllmBackend.Settings(launch=vllm_launch), own_processes()
    backend = VllmBackend(settings, role="student", model=str(models.student), run_directory=tmp_path)
    async with backend:
        launched = backend._server._launched
        assert launched is not None
        assert launched.uds is not None
        before = (await backend.generate(PROMPT, SAMPLING, deadline=soon())).token_ids.tolist()
        started = own_processes() - others
        for port in listening_ports(started):  # torch's own store; none speaks HTTP
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=2.0) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health")
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
        await expect_the_runs_own(backend, before, models.other)
        expect_hidden(launched.key, started, tmp_path)
    expect_hidden(launched.key, set(), tmp_path)
