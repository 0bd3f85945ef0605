"""Students that ssh starts where no file of the run can be seen: weights by broadcast, and nothing left at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VLLM_ENVIRONMENT, TinyModels
from parity import soon
from server_process import expect_gone
from ssh_server import ssh_server

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.launch import LaunchSettings, free_port
from spot_async.backends.shared.weight_transport import WeightSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.errors import ConfigError
from spot_async.types import SamplingSettings, VersionSpan, WeightSnapshot, WeightVersion

PROMPT = np.arange(10, 30, dtype=np.int32)
SAMPLING = SamplingSettings(temperature=1e-3, max_tokens=12, stop_token_ids=(2,), seed=3)
UPDATED = WeightVersion(0, 1)
PLUGINS = {"VLLM_PLUGINS": VLLM_ENVIRONMENT["VLLM_PLUGINS"] + ",gloo_weight_transfer"}


def servers_of(model: Path) -> set[int]:
    """Return the processes that name the model: the far guard, and the server."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_text()
        except OSError:  # it ended meanwhile
            continue
        if str(model) in line:
            found.add(int(entry.parent.name))
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a directory needs root")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_student_behind_ssh_with_no_common_directory_gets_weights_by_broadcast(
    kind: str, request: Any, models: TinyModels, tmp_path: Path
) -> None:
    launch: LaunchSettings = request.getfixturevalue(f"{kind}_launch")
    make: Callable[..., Any] = {"vllm": VllmBackend, "sglang": SglangBackend}[kind]
    run, keys = tmp_path / "run", tmp_path / "keys"
    # Its own, since other tests' servers may run with that one.
    model = shutil.copytree(models.student, tmp_path / "model")
    shutil.copytree(models.other, run / "new")
    keys.mkdir()
    with ssh_server(keys, free_port()) as client:
        hidden = f"unshare --mount sh -c 'mount -t tmpfs none {run} && exec sh'"
        environment = {**launch.environment, **(PLUGINS if kind == "vllm" else {})}
        changes = {"prefix": ["ssh", "-F", str(client), "there", hidden], "environment": environment}
        far = launch.model_copy(update=changes)

        def backend(transport: str) -> Any:
            weights = WeightSettings(transport=transport, backend="gloo")
            settings = make.Settings(launch=far, weights=weights)
            return make(settings, role="student", model=str(model), run_directory=run)

        with pytest.raises(ConfigError, match=rf"launch\.prefix: the far side does not see {run}, where new weights"):
            await backend("disk").__aenter__()
        async with backend("distributed") as student:
            started = servers_of(model)
            assert len(started) >= 2
            await student.update_weights(WeightSnapshot(directory=str(run / "new"), version=UPDATED), deadline=soon())
            reply = await student.generate(PROMPT, SAMPLING, deadline=soon())
            assert reply.version_spans == (VersionSpan(0, len(reply.token_ids), UPDATED),)
        expect_gone(started)
        assert not servers_of(model)
