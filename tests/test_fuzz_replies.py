"""A short run of the reply fuzzer: whatever a reply is damaged to, it is read rightly or refused with its class."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def fuzzer() -> Any:
    """`benchmarks/fuzz_replies.py`, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import fuzz_replies

        yield fuzz_replies
        for name in ("fuzz_replies", "reply_cases", "reply_mutations", "report"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai", "local"])
async def test_damaged_replies_are_read_rightly_or_refused_with_their_class(fuzzer: Any, dialect: str) -> None:
    with fuzzer.model_directory() as model, np.errstate(all="ignore"):
        outcome = await fuzzer.fuzz(dialect, 800, 7, model)
    assert not outcome.findings, outcome.findings[0]
    assert sum(outcome.ends.values()) == 800
    assert set(outcome.ends) >= {"read", "PoisonedReplyError", "TransientError", "ThrottledError", "PermanentError"}
