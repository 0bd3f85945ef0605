"""Tests of InlineTeacher on the shipped teacher, against torch in float64."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from inline_teacher import InlineTeacher
from transformers import AutoModelForCausalLM

from spot_async import ScoreRequest
from spot_async.errors import PermanentError

TEACHER = Path(__file__).parents[1] / "running_sum" / "teacher"  # in a copy: the directory of your model
PROMPT, RESPONSE = np.arange(5, 12, dtype=np.int32), np.arange(6, 20, dtype=np.int32)


def scored(*, top_k, temperature=1.0, response_ids=RESPONSE):
    async def score():
        teacher = InlineTeacher(
            InlineTeacher.Settings(kind="inline_teacher"), role="teacher", model=str(TEACHER), run_directory=Path()
        )
        async with teacher:
            deadline = asyncio.get_running_loop().time() + 60
            return await teacher.score(ScoreRequest(PROMPT, response_ids, temperature, deadline), top_k=top_k)

    return asyncio.run(score())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_of_the_whole_softmax(temperature: float) -> None:
    found = scored(top_k=5, temperature=temperature)
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float64, trust_remote_code=False)
    ids = torch.from_numpy(np.concatenate([PROMPT, RESPONSE]).astype(np.int64))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, len(PROMPT) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    nats = 16 * torch.finfo(torch.float32).eps * float((logits / temperature).abs().max())  # float32 rounds by size
    np.testing.assert_allclose(found.logprobs, logprobs.gather(-1, ids[len(PROMPT) :, None])[:, 0], atol=nats)
    np.testing.assert_allclose(found.topk_logprobs, logprobs.topk(5).values, atol=nats)
    np.testing.assert_array_equal(found.topk_ids, logprobs.topk(5).indices)
    np.testing.assert_allclose(found.entropy, -(logprobs.exp() * logprobs).sum(-1), atol=nats)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"response_ids": np.ones(100_000, np.int32), "top_k": 1}, r"teacher: \d+ tokens, and \d+ have room"),
        ({"response_ids": np.full(3, 100_000, np.int32), "top_k": 1}, r"teacher: ids 5 to 100000, and the model has"),
        ({"top_k": 100_000}, "teacher: top_k=100000, and the model knows"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_not_cut(request_: dict, words: str) -> None:
    with pytest.raises(PermanentError, match=words):
        scored(**request_)
