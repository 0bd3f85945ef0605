"""A student of our own behind ssh, in a pool: given new weights, killed at either end of the link, and brought back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deadlines import soon
from process_trees import gone
from ssh_server import ssh_client, ssh_server

from spot_async.backends.local import LocalBackend
from spot_async.backends.shared.launch import free_port
from spot_async.base.processes.guard import process_tree
from spot_async.config import ServingConfig
from spot_async.replicas.pool import ReplicaPool
from spot_async.types import SamplingSettings, VersionSpan, WeightSnapshot, WeightVersion

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = SamplingSettings(max_tokens=4, stop_token_ids=(), seed=1)
UPDATED = WeightVersion(0, 7)


def running(word: str, model: Path) -> set[int]:
    """Return the processes whose command lines have the word and the model: the test is not their ancestor."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_text(errors="replace")  # others' may be of any bytes
        except OSError:  # it ended meanwhile
            continue
        if word in line and str(model) in line:
            found.add(int(entry.parent.name))
    return found


@pytest.mark.long
async def test_a_student_behind_ssh_comes_back_with_its_weights_whichever_end_is_killed(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, keys = random_model(), tmp_path / "keys"
    keys.mkdir()
    with ssh_server(keys, free_port()) as client:
        launch = {"prefix": ["ssh", "-F", str(client), "there"], "host": "127.0.0.2"}
        settings = LocalBackend.Settings(launch=launch)

        def make() -> LocalBackend:
            return LocalBackend(settings, role="student", model=str(model), run_directory=tmp_path)

        pool = ReplicaPool("student", {"student": make}, ServingConfig(stall_s=20.0))
        async with pool, asyncio.TaskGroup() as group:
            watching = group.create_task(pool.watch())
            await pool.update_weights(WeightSnapshot(directory=str(model), version=UPDATED), deadline=soon())
            for kills, victim in enumerate(["server", "ssh"], 1):
                servers = running("spot_async.serving", model)
                assert len(servers) == 2  # the far guard and the server
                server = next(pid for pid in servers if process_tree(pid).keys() == {pid})
                os.kill(server if victim == "server" else ssh_client(), signal.SIGKILL)
                while [(each.restarts, each.state) for each in pool.replicas] != [(kills, "serving")]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # a status tells nobody that it changed
                assert await gone(servers)
                backend = pool.backends["student"]
                reply = await backend.generate(PROMPT, SAMPLING, deadline=soon())
                assert reply.version_spans == (VersionSpan(0, 4, UPDATED),)
            watching.cancel()
        assert not running("spot_async.serving", model)
    events = (tmp_path / "logs" / "student.log").read_text()
    assert "error: the server was killed by SIGKILL" in events
