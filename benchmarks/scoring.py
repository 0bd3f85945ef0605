"""Measures what scores of remote servers cost the orchestrator's process, by dialect. It is a part of `client.py`.

Each reply has 4,096 positions with 16 log-probabilities, in the server's own shape. The table has its bytes, the CPU
time to read and check it, and how long the event loop is held up while 32 of them arrive at once from another process.
The lag is wall time, to which other programs' load adds, so it is also given as this thread's CPU time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pipeline import EXAMPLE
from report import show

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.openai.dialect import COMPLETIONS
from spot_async.backends.openai.dialect import Dialect as OpenAIDialect
from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.sglang.weights import GENERATE
from spot_async.backends.shared.request_limits import RequestLimits
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.backends.vllm.discovery import Found
from spot_async.backends.vllm.replies import CompletionsRoute, GenerateRoute
from spot_async.protocols import Scorer
from spot_async.testing.services import capabilities
from spot_async.types import Capabilities, ScoreRequest, Traffic

VOCAB = 151_936
PROMPT_TOKENS = 512
POSITIONS = 4096
TOP_K = 16
AT_ONCE = 32
TICK_S = 0.001
DECODE_GOAL_MS = 25.0
LAG_GOAL_MS = 10.0

DRAW = np.random.default_rng(0)
PROMPT = DRAW.integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32)
RESPONSE = DRAW.integers(0, VOCAB, POSITIONS).astype(np.int32)

Backend = Any  # a backend that is entered, and has its connection at `_server.endpoint`


@dataclasses.dataclass(frozen=True)
class Dialect:
    """A kind of server: the reply that it gives, and a backend for a server at a URL, without discovery."""

    name: str
    path: str
    reply: Callable[[], bytes]
    connect: Callable[[AsyncExitStack, str], Any]  # returns an awaitable backend


class Canned:
    """An endpoint that answers without a network."""

    def __init__(self, reply: bytes) -> None:
        self.traffic = Traffic()
        self._reply = reply

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reading(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    async def post(self, path: str, body: bytes, **_: Any) -> bytes:
        return self._reply


def prompt_logprobs(decoded_token: Any) -> list[Any]:
    """Return vLLM's rows of the whole sequence: the token itself, then the likeliest others."""
    rows: list[Any] = [None]
    for token in [*PROMPT[1:].tolist(), *RESPONSE.tolist()]:
        others = (token + DRAW.choice(VOCAB // TOP_K - 1, 1) + 1 + np.arange(TOP_K) * (VOCAB // TOP_K)) % VOCAB
        logprobs = np.sort(-DRAW.exponential(4.0, TOP_K).astype(np.float32) - np.float32(3.0))[::-1]
        entries = [(token, float(logprobs[-1] - np.float32(1.5)), 99)]
        entries += [(int(v), float(x), rank) for rank, (v, x) in enumerate(zip(others, logprobs, strict=True), start=1)]
        rows.append({str(v): {"logprob": x, "rank": r, "decoded_token": decoded_token} for v, x, r in entries})
    return rows


def vllm_generate() -> bytes:
    choice = {"index": 0, "finish_reason": "length", "token_ids": [5], "logprobs": None}
    return msgspec.json.encode({"prompt_logprobs": prompt_logprobs(None), "choices": [choice]})


def vllm_completions() -> bytes:
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [5], "logprobs": None}
    return msgspec.json.encode({"choices": [{**choice, "prompt_logprobs": prompt_logprobs(" the")}]})


async def vllm(stack: AsyncExitStack, url: str, route: Any) -> Backend:
    settings = VllmBackend.Settings(url=url)
    backend = VllmBackend(settings, role="teacher", model=str(EXAMPLE / "student"), run_directory=Path())
    await stack.enter_async_context(backend._server)
    backend._server.files = dataclasses.replace(backend._server.files, vocab_size=VOCAB)
    backend._client.route = route
    context = PROMPT_TOKENS + POSITIONS + 1
    offers = capabilities(VOCAB, max_context_tokens=context, max_top_k=TOP_K, candidate_logprobs="single")
    backend._found = Found(offers, None)
    return backend


def echo(name: Callable[[int], str]) -> bytes:
    """Return the same rows in the shape of OpenAI's API."""
    rows = [
        {name(int(token)): entry["logprob"] for token, entry in row.items()} if row else None
        for row in prompt_logprobs(None)
    ]
    tokens = [*PROMPT.tolist(), *RESPONSE.tolist()]
    logprobs = {
        "text_offset": [4 * n for n in range(len(tokens))],
        "token_logprobs": [None if row is None else next(iter(row.values())) for row in rows],
        "tokens": [name(token) for token in tokens],
        "top_logprobs": rows,
    }
    return msgspec.json.encode({"choices": [{"index": 0, "finish_reason": "length", "logprobs": logprobs}]})


class Texts:
    """A vocabulary of texts that are all different. Looking them up costs as much as a real tokenizer's."""

    def __init__(self) -> None:
        self._ids = {f"{token:5d}": token for token in range(VOCAB)}

    def ids_of(self, texts: list[str]) -> list[int]:
        return [self._ids[text] for text in texts]


async def openai(stack: AsyncExitStack, url: str, *, by_text: bool) -> Backend:
    settings = OpenAIBackend.Settings(url=url)
    backend: Any = OpenAIBackend(settings, role="teacher", model=str(EXAMPLE / "student"), run_directory=Path())
    await stack.enter_async_context(backend._server)
    backend._files = dataclasses.replace(backend._files, vocab_size=VOCAB)
    backend._dialect = OpenAIDialect(
        model="m", token_id_prompts=True, scoring="echo", keyed_by_text=by_text, max_top_k=TOP_K
    )
    backend._texts = Texts() if by_text else None
    backend._found = Capabilities(
        model="m",
        vocab_size=VOCAB,
        vocab_fingerprint="",
        max_context_tokens=PROMPT_TOKENS + POSITIONS + 1,
        max_top_k=TOP_K,
        exact_entropy=False,
        candidate_logprobs="none",
        weight_update=False,
        score_temperature="one",
    )
    return backend


def sglang_rows() -> tuple[dict[str, Any], Any, Any]:
    """Return SGLang's reply without the top-K, and the top-K's ids and log-probabilities of the response's rows."""
    ids = (RESPONSE[:, None] + np.arange(TOP_K, dtype=np.int32) * (VOCAB // TOP_K)) % VOCAB
    spread = np.sort(DRAW.exponential(4.0, (POSITIONS, TOP_K)).astype(np.float32))
    logprobs = -spread - np.float32(np.log(TOP_K))  # (T, K); the probabilities sum to less than 1
    own = zip(logprobs[:, 0].tolist(), RESPONSE.tolist(), strict=True)
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": 0},
        "weight_version": "0.0",
        "weight_versions": [{"version": "0.0", "start": 0, "end": 0}],
        "input_token_logprobs": [(None, int(PROMPT[-1]), None), *((x, v, None) for x, v in own)],
        "output_token_logprobs": [],
    }
    return meta, ids, logprobs


def sglang_flat() -> bytes:
    meta, ids, logprobs = sglang_rows()
    meta |= {
        "input_top_logprobs_val_flat_b64": logprobs.tobytes(),
        "input_top_logprobs_idx_flat_b64": ids.tobytes(),
        "input_top_logprobs_val_flat_b64_dtype": "float32",
        "input_top_logprobs_idx_flat_b64_dtype": "int32",
        "input_top_logprobs_shape": ids.shape,
        "input_top_logprobs_null_prefix": 1,
    }
    return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})


def sglang_nested() -> bytes:
    meta, ids, logprobs = sglang_rows()
    rows = zip(logprobs.tolist(), ids.tolist(), strict=True)
    meta["input_top_logprobs"] = [None, *([(x, v, None) for x, v in zip(*row, strict=True)] for row in rows)]
    return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})


async def sglang(stack: AsyncExitStack, url: str) -> Backend:
    settings = SglangBackend.Settings(url=url)
    backend: Any = SglangBackend(settings, role="teacher", model=str(EXAMPLE / "student"), run_directory=Path())
    await stack.enter_async_context(backend._server)
    backend._vocab_size = VOCAB
    backend._requests.limits = RequestLimits("teacher", VOCAB, PROMPT_TOKENS + POSITIONS + 1, VOCAB, "")
    backend._capabilities = Capabilities(
        model="",
        vocab_size=VOCAB,
        vocab_fingerprint="",
        max_context_tokens=PROMPT_TOKENS + POSITIONS,
        max_top_k=VOCAB,
        exact_entropy=False,
        candidate_logprobs="single",
        weight_update=False,
    )
    return backend


DIALECTS = (
    Dialect("vllm", GenerateRoute.path, vllm_generate, lambda stack, url: vllm(stack, url, GenerateRoute())),
    Dialect(
        "vllm, /v1/completions",
        CompletionsRoute.path,
        vllm_completions,
        lambda stack, url: vllm(stack, url, CompletionsRoute()),
    ),
    Dialect(
        "openai, echo by id",
        COMPLETIONS,
        lambda: echo(lambda token: f"token_id:{token}"),
        lambda stack, url: openai(stack, url, by_text=False),
    ),
    Dialect(
        "openai, echo by text",
        COMPLETIONS,
        lambda: echo(lambda token: f"{token:5d}"),
        lambda stack, url: openai(stack, url, by_text=True),
    ),
    Dialect("sglang", GENERATE, sglang_flat, sglang),
    Dialect("sglang through a router", GENERATE, sglang_nested, sglang),
)


async def score(backend: Scorer) -> None:
    deadline = asyncio.get_running_loop().time() + 600.0
    await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, deadline), top_k=TOP_K)


async def cpu_ms_to_read(backend: Backend, reply: bytes, rounds: int) -> float:
    """Return the CPU milliseconds between a reply's bytes and checked scores, in the best of the rounds."""
    endpoint, backend._server.endpoint = backend._server.endpoint, Canned(reply)
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        await score(backend)
        best = min(best, time.process_time() - started)
    backend._server.endpoint = endpoint
    return best * 1e3


async def loop_lags_ms(backend: Backend) -> tuple[list[float], list[float]]:
    """Return how late the loop wakes a sleeper while replies arrive, as wall time and as this thread's CPU time."""
    wall, cpu = [], []
    async with asyncio.TaskGroup() as group:
        scores = []
        for _ in range(AT_ONCE):
            scores.append(group.create_task(score(backend)))
            await asyncio.sleep(0)
        while not all(each.done() for each in scores):
            started, cpu_started = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            wall.append((time.perf_counter() - started - TICK_S) * 1e3)
            cpu.append(max(0.0, time.thread_time() - cpu_started - TICK_S) * 1e3)
    return wall, cpu


@contextmanager
def fixed_replies(directory: Path) -> Iterator[str]:
    argv = [sys.executable, str(Path(__file__).parent / "fixed_replies.py"), str(directory)]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    finally:
        server.terminate()
        server.wait()


async def measure(rounds: int, directory: Path, url: str) -> None:
    rows = []
    for dialect in DIALECTS:
        reply = dialect.reply()
        place = directory / dialect.path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(reply)
        async with AsyncExitStack() as stack:
            backend = await dialect.connect(stack, url)
            gc.collect()
            gc.freeze()  # as a run does
            read_ms = await cpu_ms_to_read(backend, reply, rounds)
            measured = [await loop_lags_ms(backend) for _ in range(rounds)]
        wall, cpu = min(measured, key=lambda lags: np.percentile(lags[0], 99))
        lags = (f"{np.percentile(each, 99):.1f} ({max(each):.1f})" for each in (wall, cpu))
        rows.append([dialect.name, f"{len(reply) / POSITIONS:.0f}", f"{read_ms:.1f}", *lags])
    columns = ["dialect", "bytes a position", "CPU ms to read", "lag ms: p99 (max)", "as CPU: p99 (max)"]
    title = (
        f"a score of {POSITIONS} positions x {TOP_K} after {PROMPT_TOKENS} prompt tokens; lag while {AT_ONCE} arrive; "
        f"best of {rounds} rounds; goals: {DECODE_GOAL_MS:g} ms to read, {LAG_GOAL_MS:g} ms of lag"
    )
    show(title, columns, rows)


def measure_scoring(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory, fixed_replies(Path(directory)) as url:
        asyncio.run(measure(rounds, Path(directory), url))


if __name__ == "__main__":
    measure_scoring(rounds=5)
