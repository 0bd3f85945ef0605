"""What the tests of vLLM's backend share: a model, and a stand-in that serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_stand_in import Connect, connecting


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> Path:
    return random_model()


@pytest.fixture
def connect(model: Path, tmp_path: Path) -> Connect:
    return connecting(model, tmp_path)
