"""Students that ssh starts where no file of the run can be seen: weights by broadcast, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VLLM_ENVIRONMENT, TinyModels
from network_namespaces import linked, namespace
from parity import Dense, soon
from server_process import expect_gone
from ssh_server import ssh_client, ssh_server
from under_load import expect_rounding, nats_off_spans

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.launch import free_port
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.shared.weight_transport import WeightSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.base.retry import RetryPolicy
from spot_async.base.tasks import watched
from spot_async.errors import ConfigError
from spot_async.replicas.pool import ReplicaPool
from spot_async.stages.stage import Stage, StageLimits
from spot_async.types import SamplingSettings, VersionSpan, WeightSnapshot, WeightVersion

PROMPT = np.arange(10, 30, dtype=np.int32)
SAMPLING = SamplingSettings(temperature=1e-3, max_tokens=12, stop_token_ids=(2,), seed=3)
UPDATED = WeightVersion(0, 1)
FREELY = SamplingSettings(max_tokens=12, stop_token_ids=(2,), seed=3)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="hiding a directory, and another network, need root")
PLUGINS = {"VLLM_PLUGINS": VLLM_ENVIRONMENT["VLLM_PLUGINS"] + ",gloo_weight_transfer"}


class Elsewhere:
    """A student whose server ssh starts, where the run's directory is an empty one."""

    def __init__(self, kind: str, launch: LaunchSettings, models: TinyModels, directory: Path) -> None:
        self._make: Callable[..., Any] = {"vllm": VllmBackend, "sglang": SglangBackend}[kind]
        environment = {**launch.environment, **(PLUGINS if kind == "vllm" else {})}
        self._launch = launch.model_copy(update={"environment": environment})
        self.run = directory / "run"
        # Its own, since other tests' servers may run with that one.
        self.model = shutil.copytree(models.student, directory / "model")
        new = shutil.copytree(models.other, self.run / "new")
        self.update = WeightSnapshot(directory=str(new), version=UPDATED)

    def backend(self, client: Path, host: str = "127.0.0.1", **weights: Any) -> Any:
        """Return a backend whose server `ssh -F client there` starts. It listens on `host`."""
        hidden = f"unshare --mount sh -c 'mount -t tmpfs none {self.run} && exec sh'"
        changes = {"prefix": ["ssh", "-F", str(client), "there", hidden], "host": host}
        settings = self._make.Settings(
            launch=self._launch.model_copy(update=changes), weights=WeightSettings(device="cpu", **weights)
        )
        return self._make(settings, role="student", model=str(self.model), run_directory=self.run)

    def set_variable(self, name: str, value: str) -> None:
        environment = {**self._launch.environment, name: value}
        self._launch = self._launch.model_copy(update={"environment": environment})

    def processes(self) -> set[int]:
        """Return the processes that name the model: the far guard, and the server."""
        return {pid for pid, line in command_lines() if str(self.model) in line}

    def server(self) -> int:
        """Return the process of the server without its guard."""
        return min(pid for pid, line in command_lines() if str(self.model) in line and "guard" not in line)


@pytest.fixture
def elsewhere(kind: str, request: pytest.FixtureRequest, models: TinyModels, tmp_path: Path) -> Elsewhere:
    return Elsewhere(kind, request.getfixturevalue(f"{kind}_launch"), models, tmp_path)


def interface_within(namespace: str, address: str) -> str:
    shown = subprocess.run(["ip", "-n", namespace, "-o", "addr"], capture_output=True, text=True, check=True).stdout
    return next(line.split()[1] for line in shown.splitlines() if f" {address}/" in line)


def command_lines() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield int(entry.parent.name), entry.read_text(errors="replace")


@needs_root
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_student_behind_ssh_with_no_common_directory_gets_weights_by_broadcast(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    (keys := tmp_path / "keys").mkdir()
    with ssh_server(keys, free_port()) as client:
        with pytest.raises(ConfigError, match=rf"far side does not see {elsewhere.run}, where new weights"):
            await elsewhere.backend(client, transport="disk").__aenter__()
        async with elsewhere.backend(client, transport="distributed") as student:
            started = elsewhere.processes()
            assert len(started) >= 2
            await student.update_weights(elsewhere.update, deadline=soon())
            reply = await student.generate(PROMPT, SAMPLING, deadline=soon())
            assert reply.version_spans == (VersionSpan(0, len(reply.token_ids), UPDATED),)
        expect_gone(started)
        assert not elsewhere.processes()


@needs_root
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_student_on_another_machine_comes_back_with_its_weights_whichever_end_is_killed(
    elsewhere: Elsewhere, models: TinyModels, dense_logprobs: Dense, tmp_path: Path
) -> None:
    (keys := tmp_path / "keys").mkdir()
    with (
        namespace("far") as name,
        linked(name) as (_, there),
        ssh_server(keys, 2222, address=there, within=["ip", "netns", "exec", name]) as client,
    ):
        here = there.rpartition(".")[0] + ".1"
        elsewhere.set_variable("GLOO_SOCKET_IFNAME", interface_within(name, there))
        make = partial(elsewhere.backend, client, there, transport="distributed", address=here)
        pool: ReplicaPool[Any] = ReplicaPool("student", {"student": make}, are_ours=True)
        stage: Stage[Any] = Stage(
            "rollout",
            pool,
            StageLimits(concurrency=1, timeout_s=300.0, retry=RetryPolicy(8), waiting_capacity=1),
            jitter=lambda: 0.5,
        )

        async def answers() -> None:
            reply = await stage.ask((0,), lambda student, deadline: student.generate(PROMPT, FREELY, deadline=deadline))
            assert {span.version for span in reply.version_spans} == {UPDATED}
            expect_rounding(nats_off_spans(PROMPT, reply, {UPDATED: models.other}, dense_logprobs))

        async def outlive() -> None:
            await pool.update_weights(elsewhere.update, deadline=soon())
            await answers()
            for victim in (elsewhere.server, ssh_client):
                before = elsewhere.processes()
                os.kill(victim(), signal.SIGKILL)
                await answers()
                assert not before & elsewhere.processes()
            assert pool.replicas[0].restarts == 2

        async with pool:
            await watched(outlive(), [pool.watch])
        assert not elsewhere.processes()
