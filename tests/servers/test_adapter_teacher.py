"""A LoRA adapter beside its base on one vLLM: each is a teacher, by the name under which the server has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from conftest import StartServer, TinyModels
from random_adapters import merged_model, random_adapter

from spot_async.backends.vllm.backend import VllmBackend
from spot_async.config import LoraConfig
from spot_async.types import ScoreRequest

LORA = LoraConfig(rank=4)
TOKENS = [5, 6, 7, 8, 9]
READ = 2  # of them


@pytest.mark.nightly
async def test_an_adapter_of_a_base_that_is_served_scores_as_the_merged_model_does(
    models: TinyModels,
    tmp_path: Path,
    start_vllm: StartServer,
    dense_logprobs: Callable[[Path, Sequence[int]], npt.NDArray[np.float32]],
) -> None:
    adapter = random_adapter(tmp_path / "adapter", models.teacher, LORA, seed=1)
    merged = merged_model(tmp_path / "merged", models.teacher, adapter, LORA)
    with start_vllm(models.teacher, "--lora-modules", f"math={adapter}", adapters=LORA) as server:
        for served, model in (("math", merged), (str(models.teacher), models.teacher)):
            settings = VllmBackend.Settings(kind="vllm", url=server.url, served_model=served)
            backend = VllmBackend(settings, role="teachers.math", model=str(models.teacher), run_directory=tmp_path)
            async with backend:
                until = asyncio.get_running_loop().time() + 60
                given, asked = np.array(TOKENS[:READ], np.int32), np.array(TOKENS[READ:], np.int32)
                scores = await backend.score(ScoreRequest(given, asked, 1.0, until), top_k=1)
            rows = dense_logprobs(model, TOKENS)
            wanted = [rows[READ - 1 + place][token] for place, token in enumerate(TOKENS[READ:])]
            np.testing.assert_allclose(scores.logprobs, wanted, atol=1e-3)
