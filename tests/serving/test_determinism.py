"""Equal seeds give equal bits, whatever runs beside a request and in whichever order requests arrive.

Bits are compared, never closeness: a token sampled at the edge of its interval follows the last bit of its
probability, and everything after it follows the token.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from problem_files import FEW

import spot_async
from spot_async.serving.api import CandidateRequest, EngineRequest, GenerateRequest, ScoreRequest
from spot_async.serving.engine import model as serving_model
from spot_async.serving.engine.engine import Engine
from spot_async.serving.engine.fused import FusedModel, fused
from spot_async.serving.engine.model import load_model
from spot_async.serving.engine.requests import new_task
from spot_async.serving.settings import EngineSettings
from spot_async.types import Generation, SamplingSettings, WeightVersion

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"
ARRAYS = ("token_ids", "logprobs", "topk_ids", "topk_logprobs", "entropy")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def prompts() -> list[np.ndarray]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE / "student")
    lines = (EXAMPLE / "data" / "train.jsonl").read_text().splitlines()[:500]
    chats = [[{"role": "user", "content": json.loads(line)["problem"]}] for line in lines]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return [np.array(row, np.int32) for row in ids]


def served(fast: bool, directory: Path = EXAMPLE / "student", **settings: Any) -> Any:
    model = load_model(directory, EngineSettings(**settings))
    return fused(model) if fast else model


def rollouts(count: int, **sampling: float) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            prompt_ids=prompt,
            sampling=SamplingSettings(max_tokens=160, stop_token_ids=(1,), seed=seed, **sampling),  # type: ignore[arg-type]
            top_k=4 * (seed % 2),
            timeout_s=60.0,
        )
        for seed, prompt in enumerate(prompts()[:count])
    ]


def answers(model: Any, requests: Sequence[EngineRequest], concurrency: int, **at_once: int) -> list[Any]:
    """Replies in the requests' order; they arrive shuffled, in groups, at most `concurrency` at a time."""
    dice = random.Random(concurrency)
    engine = Engine(model, EngineSettings(slots=concurrency))
    vars(engine).update(at_once)
    arriving = dice.sample(range(len(requests)), len(requests))
    tasks = {}
    while arriving or engine.busy:
        room = concurrency - engine.active - engine.waiting - engine.scoring
        for _ in range(min(room, dice.randint(1, concurrency), len(arriving))):
            number = arriving.pop()
            tasks[number] = new_task(requests[number])
            engine.submit(tasks[number])
        engine.step()
    return [tasks[number].future.result(timeout=0) for number in range(len(requests))]


def differing(replies: Sequence[Any], expected: Sequence[Any]) -> list[int]:
    """Numbers of the replies of which an array differs in a bit."""
    return [
        number
        for number, (one, other) in enumerate(zip(replies, expected, strict=True))
        for name in ARRAYS
        if (array := getattr(one, name, None)) is not None and array.tobytes() != getattr(other, name).tobytes()
    ]


@pytest.mark.long
def test_a_hundred_thousand_tokens_have_the_same_bits_at_every_concurrency() -> None:
    model, requests = served(fast=True), rollouts(500)
    assert isinstance(model, FusedModel)
    expected: list[Generation] = answers(model, requests, 64)
    sampled = sum(len(reply.token_ids) for reply in expected)
    for concurrency in (1, 3, 8):
        replies = answers(model, requests, concurrency)
        assert differing(replies, expected) == []
        sampled += sum(len(reply.token_ids) for reply in replies)
    assert sampled >= 100_000


@pytest.mark.long
def test_the_general_path_has_the_same_bits_at_every_concurrency() -> None:
    model, requests = served(fast=False), rollouts(48, temperature=0.8, top_p=0.9)
    expected = answers(model, requests, 48)
    for concurrency in (1, 3, 8, 17):
        assert differing(answers(model, requests, concurrency), expected) == []


def of_any_length() -> list[GenerateRequest]:
    draw = np.random.default_rng(0)
    return [
        GenerateRequest(
            prompt_ids=draw.integers(0, 50, length).astype(np.int32),
            sampling=SamplingSettings(max_tokens=48, stop_token_ids=(), seed=seed),
            top_k=4,
            timeout_s=60.0,
        )
        for seed, length in enumerate((5, 12, 40, 150, 170, 185, 190, 220, 260, 330, 380, 405, 690, 725, 900))
    ]


@pytest.mark.parametrize(
    "heads", [(8, 2, 16), pytest.param((4, 4, 8), marks=pytest.mark.long)], ids=["4 queries a key", "1 query a key"]
)
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.long)])
def test_neighbours_of_any_length_leave_the_bits_alone(
    fast: bool, heads: tuple[int, int, int], random_model: Callable[..., Path]
) -> None:
    """Their lengths decide how wide a decode is, and libraries sum 30, 250 and 700 positions in different orders."""
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    directory = random_model(**sizes, initializer_range=0.1)  # attention to many positions
    model = served(fast, directory, max_context_tokens=960)
    assert isinstance(model, FusedModel) == fast
    requests = of_any_length()
    expected = answers(model, requests, len(requests))
    for concurrency in (1, 3):
        assert differing(answers(model, requests, concurrency), expected) == []
    low = served(fast, directory, max_context_tokens=250)  # decodes wider than any context
    assert differing(answers(low, requests[:7], 7), expected[:7]) == []


def test_without_row_padding_bits_follow_the_company(
    random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the padding is for; should this fail, the tests of equal bits no longer show that it works.

    A row of this model does not fill a vector.
    """
    model, requests = served(False, random_model(hidden_size=36, intermediate_size=44)), rollouts(16)
    assert differing(answers(model, requests, 1), answers(model, requests, 16)) == []
    monkeypatch.setattr(serving_model, "ROW_MULTIPLE", 1)
    assert differing(answers(model, requests, 1), answers(model, requests, 16))


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.long)])
def test_bits_follow_the_company_where_nobody_wants_them_equal(fast: bool, random_model: Callable[..., Path]) -> None:
    """Else `deterministic: false` would save nothing, and nothing would show what the widths of a decode are for."""
    directory = random_model(num_attention_heads=8, head_dim=16, initializer_range=0.1)
    model, requests = served(fast, directory, deterministic=False, max_context_tokens=960), of_any_length()
    assert differing(answers(model, requests, 1), answers(model, requests, len(requests)))


ROWS_OF_A_PRODUCT = """
import sys
from pathlib import Path
import torch
from spot_async.serving.engine.model import load_model
from spot_async.serving.settings import EngineSettings
torch.set_num_threads(1)
model = load_model(Path(sys.argv[1]), EngineSettings())
hidden = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
expected = model.logits(hidden)
for rows in range(1, 200):
    assert torch.equal(model.logits(hidden[:rows]), expected[:rows]), rows
"""


@pytest.mark.long
def test_a_process_that_serves_a_wide_model_multiplies_a_row_alike_in_every_company(
    random_model: Callable[..., Path],
) -> None:
    """Nobody asks MKL for that but the engine, and before the first product of its process."""
    directory = random_model(hidden_size=256, vocab_size=512)
    plain = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    subprocess.run([sys.executable, "-c", ROWS_OF_A_PRODUCT, str(directory)], env=plain, check=True)


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.long)])
def test_scores_and_candidates_have_the_same_bits_in_every_company(fast: bool) -> None:
    model = served(fast)
    requests = rollouts(120)
    sampled: list[Generation] = answers(model, requests, 64)
    pairs = [(request.prompt_ids, reply.token_ids) for request, reply in zip(requests, sampled, strict=True)]
    scores = [ScoreRequest(prompt_ids=p, response_ids=r, top_k=16, timeout_s=60.0) for p, r in pairs]
    expected = answers(model, scores, 120)
    assert differing(answers(model, scores, 1), expected) == []
    assert differing(answers(model, scores, 7, score_tokens=300, score_logits=48 * 5), expected) == []
    candidates = [
        CandidateRequest(
            prompt_ids=prompt,
            response_ids=response,
            positions=np.arange(0, len(response), 3, dtype=np.int32),
            candidate_ids=score.topk_ids[::3],
            expected_version=WeightVersion(0, 0),
            timeout_s=60.0,
        )
        for (prompt, response), score in zip(pairs, expected, strict=True)
    ]
    # The same rows of the same forward: what a candidate gets is what scoring said of it.
    for score, reply in zip(expected, answers(model, candidates, 11), strict=True):
        assert reply.logprobs.tobytes() == score.topk_logprobs[::3].tobytes()


@pytest.mark.long
def test_strict_runs_end_with_the_same_weights_at_every_concurrency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers_on_threads: None, trainer_on_thread: None
) -> None:
    runs = {
        "narrow": ["student.backend.slots=3", *few_at_once(2)],
        "wide": ["student.backend.slots=64", *few_at_once(200)],
    }
    monkeypatch.chdir(ROOT)
    for name, overrides in runs.items():
        monkeypatch.setattr(Engine, "score_tokens", 1 if name == "narrow" else 8192)
        spot_async.run(
            "configs/quickstart.yaml",
            [FEW, f"run.directory={tmp_path / name}", "evaluation=null", "training.iterations=2",
             "training.batch_size=12", "training.mini_batch_size=4", "training.warmup_iterations=0", *overrides],
        )  # fmt: skip
    narrow, wide = (tmp_path / name / "student" / "model.safetensors" for name in runs)
    assert narrow.read_bytes() == wide.read_bytes()
    assert narrow.read_bytes() != (EXAMPLE / "student" / "model.safetensors").read_bytes()
    for name in runs:
        samples = [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        assert any(sample["branches"] for sample in samples)  # probes were part of it


def few_at_once(concurrency: int) -> list[str]:
    return [f"stages.{stage}.concurrency={concurrency}" for stage in ("rollout", "score", "candidates", "probe")]
