"""Servers started as a run starts them: what they offer, how failures are explained, and that they end completely."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import SGLANG_LAUNCHER, TinyModels
from parity import soon
from server_process import command_line, expect_gone

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.base.processes.guard import process_tree
from spot_async.errors import ConfigError, ProcessDiedError
from spot_async.types import SamplingSettings, WeightSnapshot, WeightVersion

PROMPT = np.arange(10, 30, dtype=np.int32)
SAMPLING = SamplingSettings(temperature=1e-3, max_tokens=12, stop_token_ids=(2,), seed=3)  # SGLang ignores seeds


def vllm(launch: LaunchSettings, model: Path, run_directory: Path) -> VllmBackend:
    return VllmBackend(
        VllmBackend.Settings(launch=launch), role="student", model=str(model), run_directory=run_directory
    )


def changed(launch: LaunchSettings, *arguments: str, **settings: object) -> LaunchSettings:
    return launch.model_copy(update={"arguments": [*launch.arguments, *arguments], **settings})


def children_of_this_test() -> set[int]:
    return process_tree(os.getpid()).keys() - {os.getpid()}


async def follow(backend: VllmBackend | SglangBackend, other: Path) -> None:
    """A student's life on the trainer's devices. On a CPU servers take these calls and keep their memory, so what is
    proven is that the order works: asleep, awake with the weights they had, and with new ones, which came before caches
    woke."""
    assert (await backend.capabilities(deadline=soon())).version == WeightVersion(0, 0)
    first = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert {span.version for span in first.version_spans} == {WeightVersion(0, 0)}

    await backend.sleep(deadline=soon())
    await backend.wake(deadline=soon())
    again = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert again.token_ids.tolist() == first.token_ids.tolist()

    await backend.sleep(deadline=soon())
    await backend.wake_weights(deadline=soon())
    await backend.update_weights(WeightSnapshot(directory=str(other), version=WeightVersion(0, 1)), deadline=soon())
    await backend.wake(deadline=soon())
    new = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert {span.version for span in new.version_spans} == {WeightVersion(0, 1)}
    assert new.token_ids.tolist() != first.token_ids.tolist()


async def kill_and_watch(backend: VllmBackend | SglangBackend, started: set[int], main_program: str) -> None:
    """The server's first process is killed, which alone would leave the others running or in doubt."""
    # What the interpreter was told to run. Servers rename some of their processes, which then have none.
    [server] = [pid for pid in started if main_program in command_line(pid)[1:3]]
    os.kill(server, signal.SIGKILL)
    with pytest.raises(ProcessDiedError, match=r"student \(pid \d+\) was killed by SIGKILL \(log: ") as raised:
        await backend.watch()
    assert raised.value.__notes__[0].strip()
    assert not children_of_this_test() & started


async def test_a_vllm_student_from_start_to_a_sudden_end(
    vllm_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    # `vllm serve` starts where this is the distribution's name. The one for CPUs has another.
    named = tmp_path / "packages" / "vllm-0.32.0+cpu.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    path = f"{vllm_launch.environment['PYTHONPATH']}:{named.parent}"
    launch = changed(vllm_launch, environment={**vllm_launch.environment, "PYTHONPATH": path})
    before = children_of_this_test()
    async with vllm(launch, models.student, tmp_path) as backend:
        started = children_of_this_test() - before
        assert len(started) >= 3  # the guard, the API server, its engine
        await follow(backend, models.other)
        await kill_and_watch(backend, started, "vllm.entrypoints.cli.main")


async def test_an_sglang_student_from_start_to_a_sudden_end(
    sglang_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    before = children_of_this_test()
    settings = SglangBackend.Settings(launch=sglang_launch)
    async with SglangBackend(settings, role="student", model=str(models.student), run_directory=tmp_path) as backend:
        started = children_of_this_test() - before
        assert len(started) >= 4  # the guard, the HTTP server, scheduler and detokeniser
        await follow(backend, models.other)
        await kill_and_watch(backend, started, str(SGLANG_LAUNCHER))


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
