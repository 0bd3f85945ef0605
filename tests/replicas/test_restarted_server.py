"""A real server that its operator restarts behind our back, or freezes.

The same for vLLM and SGLang is in `tests/backends/` and `tests/servers/`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import soon

from spot_async.backends.local.backend import LocalBackend
from spot_async.errors import DeadlineExceededError, RequestError, ServerRestartedError
from spot_async.types import SamplingSettings, ScoreRequest, VersionSpan, WeightSnapshot, WeightVersion

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = SamplingSettings(max_tokens=4, stop_token_ids=(), seed=1)
V7 = WeightVersion(0, 7)


@contextmanager
def serving(model: Path, port: int) -> Iterator[tuple[int, int]]:
    """The process and its port."""
    environment = {name: value for name, value in os.environ.items() if name != "SPOT_ASYNC_API_KEY"}
    command = [sys.executable, "-m", "spot_async", "serve", str(model), "--port", str(port)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            first = process.stderr.readline()
            assert first.startswith("serving "), first
            yield process.pid, int(first.split()[-1])
        finally:
            process.kill()


def generated(backend: LocalBackend) -> Any:
    return backend.generate(PROMPT, SAMPLING, deadline=soon())


@pytest.mark.long
async def test_a_server_that_was_restarted_or_is_frozen_is_recognised(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = random_model()

    def attached(role: str, port: int) -> LocalBackend:
        settings = LocalBackend.Settings(url=f"http://127.0.0.1:{port}")
        return LocalBackend(settings, role=role, model=str(model), run_directory=tmp_path)

    weights = WeightSnapshot(directory=str(model), version=V7)
    with serving(model, 0) as (pid, port):
        student, teacher = attached("student", port), attached("teacher", port)
        async with student, teacher:
            assert (await student.capabilities(deadline=soon())).version is None  # it may hold any
            await student.ping(deadline=soon())
            await student.update_weights(weights, deadline=soon())
            assert (await generated(student)).version_spans == (VersionSpan(0, 4, V7),)
            with pytest.raises(ServerRestartedError, match=r"teacher: the server holds weights 0\.7"):
                await generated(teacher)  # whose weights nobody was to change

            await student.ping(deadline=soon())
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(DeadlineExceededError):
                await student.ping(deadline=soon(0.3))
            os.kill(pid, signal.SIGCONT)
            await student.ping(deadline=soon())

            os.kill(pid, signal.SIGKILL)
            with pytest.raises(RequestError):
                await student.ping(deadline=soon())
            with serving(model, port):  # the same model at the same address, so also the version would be the first
                for backend in (student, teacher):
                    with pytest.raises(ServerRestartedError, match=f"{backend._name}: the server was restarted"):
                        await generated(backend)
                    with pytest.raises(ServerRestartedError):
                        await backend.score(ScoreRequest(PROMPT, PROMPT, 1.0, soon()), top_k=1)
                    with pytest.raises(ServerRestartedError):
                        await backend.ping(deadline=soon())
                async with attached("student", port) as again:
                    await again.update_weights(weights, deadline=soon())
                    assert (await generated(again)).version_spans == (VersionSpan(0, 4, V7),)
