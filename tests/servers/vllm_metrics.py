"""Reads what a vLLM server counts, for tests that wait until it is in some state."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import httpx
import pytest
from server_process import WAIT_S, RunningServer

UNDER_WAY = "num_requests_(?:running|waiting)"  # requests
WAITING = "num_requests_waiting"
SAMPLED = "generation_tokens_total"  # tokens since the server started
ENDED_BY_LENGTH = 'request_success_total(?=.*finished_reason="length")'  # requests since the server started


async def metric(server: RunningServer, names: str) -> float:
    """The sum of all metrics of these names, a pattern."""
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        text = (await client.get(server.url + "/metrics")).text
    values = re.findall(rf"^vllm:{names}\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert values, f"the server has no metric {names}"
    return sum(map(float, values))


async def until_metric(server: RunningServer, names: str, expected: Callable[[float], bool]) -> None:
    """Until it is as expected."""
    seen = float("nan")
    try:
        async with asyncio.timeout(WAIT_S):
            while not expected(seen):
                seen = await metric(server, names)
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"after {WAIT_S:g} s {names} is still {seen:g}")
