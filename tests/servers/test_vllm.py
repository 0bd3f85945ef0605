"""The vLLM adapter against the real server, on a CPU."""

from __future__ import annotations

import httpx
from server_process import RunningServer


def test_the_server_answers(vllm_student: RunningServer) -> None:
    assert httpx.get(vllm_student.url + "/version").json()["version"].startswith("0.32")
