"""A short run of the reply fuzzer: every damaged reply is read rightly or refused with its class."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spot_async.backends.shared.bodies import ANSWER_BYTES
from spot_async.backends.shared.http import HttpEndpoint
from spot_async.errors import RequestError

ROOT = Path(__file__).parents[2]
ENVELOPE_BYTES = 1000  # of a reply, whatever is in it


@pytest.fixture(scope="module")
def fuzzer() -> Any:
    """`benchmarks/fuzz_replies.py`, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import fuzz_replies

        yield fuzz_replies
        for name in ("fuzz_replies", "reply_cases", "reply_mutations", "report"):
            sys.modules.pop(name, None)


@pytest.mark.long
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai", "local"])
async def test_damaged_replies_are_read_rightly_or_refused_with_their_class(fuzzer: Any, dialect: str) -> None:
    with fuzzer.model_directory() as model, np.errstate(all="ignore"):
        outcome = await fuzzer.fuzz(dialect, 800, 7, model)
    assert not outcome.findings, outcome.findings[0]
    assert sum(outcome.ends.values()) == 800
    assert set(outcome.ends) >= {"read", "PoisonedReplyError", "TransientError", "ThrottledError", "PermanentError"}


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai", "local"])
async def test_recorded_replies_are_well_below_what_their_requests_allow(
    fuzzer: Any, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not counting what every answer may have beside its tokens: so long replies are too."""
    allowed: list[int] = []
    request = HttpEndpoint._request

    async def noted(self: HttpEndpoint, *args: Any, largest: int, **more: Any) -> None:
        allowed.append(largest - ANSWER_BYTES)
        await request(self, *args, largest=largest, **more)

    monkeypatch.setattr(HttpEndpoint, "_request", noted)
    transport = fuzzer.Wire()
    with fuzzer.model_directory() as model:
        for case in fuzzer.DIALECTS[dialect](transport, model):
            allowed.clear()
            transport.body = case.reply
            with contextlib.suppress(RequestError):
                await case.ask()
            assert sum(allowed) > 2 * len(case.reply) - ENVELOPE_BYTES, case.name
