"""Lists the replies to fuzz: recorded ones of each dialect, the backend that reads them, and a second reader.

Backends and HTTP endpoint are the real ones. Only the transport below is a stand-in, which answers with whatever it is
given. `said` reads a reply once more in plain Python, and shares no code with the package.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from multidict import CIMultiDict

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.local.server import read_error
from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.openai.dialect import Dialect
from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.held_weights import HeldWeights
from spot_async.backends.shared.http import HttpEndpoint
from spot_async.backends.shared.request_limits import RequestLimits
from spot_async.backends.shared.token_texts import TokenTexts
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.backends.vllm.discovery import Found
from spot_async.base import wire
from spot_async.serving import api
from spot_async.types import (
    Capabilities,
    Generation,
    IntArray,
    SamplingSettings,
    ScoreRequest,
    TokenScores,
    VersionSpan,
    WeightVersion,
)

DATA = Path(__file__).parents[1] / "tests" / "recorded"
VOCAB = 512
V0 = WeightVersion(0, 0)
ABORTED = "TransientError"  # the error for a reply that ended before it was whole
UNUSED = frozenset(  # parts of recorded replies that no adapter reads
    {"id", "created", "object", "model", "request_id", "e2e_latency", "system_fingerprint", "service_tier", "rank",
     "kv_transfer_params", "prompt_tokens_details", "decoded_token", "routed_experts", "text_offset"}
)  # fmt: skip

Said = dict[str, Any]  # "tokens", "logprobs", "top" (one mapping of id to log-probability per row), "versions"


@dataclass
class Wire:
    """An aiohttp session that answers every request with the same reply."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    closed: bool = False

    async def request(self, *question: object, **more: object) -> AbstractAsyncContextManager[Any]:
        content = SimpleNamespace(iter_chunked=self._parts, total_bytes=len(self.body))
        headers = CIMultiDict(self.headers)
        return nullcontext(SimpleNamespace(status=self.status, headers=headers, content=content))

    async def _parts(self, size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(self.body), size):
            yield self.body[start : start + size]


@dataclass(frozen=True)
class Case:
    """One request, its honest reply, and what that reply says."""

    name: str
    reply: bytes
    ask: Callable[[], Awaitable[Any]]
    said: Callable[[Any], Said] | None = None  # returns what a parsed reply says
    fails: str | None = None  # the class of error that the honest reply is read as, if it is one


def endpoint(wire: Wire) -> HttpEndpoint:
    made = HttpEndpoint("server", "http://server")
    made._session = wire  # type: ignore[assignment]
    return made


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


def soon() -> float:
    return asyncio.get_running_loop().time() + 600.0


def sampling(max_tokens: int, *stops: int) -> SamplingSettings:
    return SamplingSettings(max_tokens=max_tokens, stop_token_ids=stops, seed=1)


@contextmanager
def model_directory() -> Iterator[Path]:
    """Make a directory with the files that adapters read of the model whose replies were recorded."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 4096}))
        (path / "tokenizer.json").write_bytes((DATA / "openai" / "tokenizer.json").read_bytes())
        (path / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
        )
        yield path


def recorded(*names: str) -> dict[str, Any]:
    return json.loads(DATA.joinpath(*names).read_text())  # type: ignore[no-any-return]


def vllm_cases(wire: Wire, model: Path) -> Iterator[Case]:
    replies = recorded("vllm_0.32.0", "replies.json")

    def asked() -> ScoreRequest:
        return ScoreRequest(ids(5, 6), ids(7, 300, 301, 17), 1.0, soon())

    def backend(*, completions: bool = False, chosen_tokens: bool = False) -> VllmBackend:
        made = VllmBackend(
            VllmBackend.Settings(url="http://server"), role="student", model=str(model), run_directory=model
        )
        made._server.endpoint = endpoint(wire)
        made._client.model = "m"
        if completions:
            made._client.use_completions()
        support = "batched" if chosen_tokens else "single"
        made._found = Found(capabilities(max_top_k=64, candidate_logprobs=support), "default")
        made._names.start("default")
        return made

    for name, completions in (("generate", False), ("completions", True)):
        generate = backend(completions=completions).generate
        yield Case(
            name,
            json.dumps(replies[name]["reply"]).encode(),
            lambda generate=generate: generate(ids(5, 6, 7, 300, 301, 17), sampling(4, 2), top_k=2, deadline=soon()),
            _vllm_completion if completions else _vllm_generation,
        )
    for name, completions in (("score", False), ("score_completions", True)):
        score = backend(completions=completions).score
        yield Case(
            name,
            json.dumps(replies[name]["reply"]).encode(),
            lambda score=score: score(asked(), top_k=2),
            lambda reply: _prompt_rows(
                reply["prompt_logprobs"] if "prompt_logprobs" in reply else reply["choices"][0]["prompt_logprobs"]
            ),
        )
    client = backend()._client
    yield Case(
        "one candidate",
        json.dumps(replies["candidate"]["reply"]).encode(),
        lambda: client.next_token(np.array([5, 6, 7, 300, 301, 17]), 511, deadline=soon()),
        lambda reply: {"tokens": reply["choices"][0]["token_ids"]},
    )
    chosen = backend(chosen_tokens=True)
    reply = replies["score"]["reply"] | {"prompt_logprobs": None, "prompt_token_id_logprobs": _npy([[-1.0, -2.5]] * 2)}
    yield Case(
        "chosen candidates",
        json.dumps(reply).encode(),
        lambda: chosen.candidate_logprobs(
            asked(), ids(1, 2), np.array([[1, 2], [3, 4]], np.int32), expected_version=V0
        ),
    )
    aborted = backend().generate
    yield Case(
        "aborted",
        json.dumps(replies["aborted"]["reply"]).encode(),
        lambda: aborted(ids(5, 6), sampling(2000), deadline=soon()),
        fails=ABORTED,
    )


def sglang_cases(wire: Wire, model: Path) -> Iterator[Case]:
    replies = recorded("sglang_0.5.23", "replies.json")
    prompt, response = ids(263, 301, 88, 17, 402), ids(511, 88, 83, 300, 511)
    backend = SglangBackend(
        SglangBackend.Settings(url="http://server"), role="student", model=str(model), run_directory=model
    )
    backend._server.endpoint = endpoint(wire)
    backend._limits = RequestLimits("student", VOCAB, 2048, VOCAB, "--context-length")
    backend._capabilities = capabilities()

    def case(name: str, ask: Callable[[], Awaitable[Any]], said: Any = None, fails: str | None = None) -> Case:
        return Case(name, json.dumps(replies[name]["reply"]).encode(), ask, said, fails)

    def generate(max_tokens: int, *stops: int, top_k: int = 0) -> Callable[[], Awaitable[Any]]:
        return lambda: backend.generate(prompt, sampling(max_tokens, *stops), top_k=top_k, deadline=soon())

    def score() -> Awaitable[Any]:
        return backend.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=4)

    yield case("generate", generate(6, top_k=3), _sglang_generation)
    yield case("generate nested", generate(3, top_k=3), _sglang_generation)
    yield case("generate stopped", generate(30, 26), _sglang_generation)
    yield case("score", score, _sglang_scores)
    yield case("score nested", score, _sglang_scores)
    yield case(
        "candidates",
        lambda: backend.candidate_logprobs(
            ScoreRequest(prompt, response, 0.7, soon()),
            ids(2),
            np.array([[9, 400, 83]], np.int32),
            expected_version=V0,
        ),
    )
    yield case(
        "position",
        lambda: backend.score_at(ScoreRequest(prompt, response, 1.0, soon()), ids(2), top_k=3),
    )
    yield Case("score aborted", json.dumps(replies["aborted in the queue"]["reply"]).encode(), score, fails=ABORTED)
    yield case("aborted", generate(1500), fails=ABORTED)
    yield case("aborted in the queue", generate(15), fails=ABORTED)


def openai_cases(wire: Wire, model: Path) -> Iterator[Case]:
    vllm, sglang = recorded("openai", "vllm_0.32.0.json"), recorded("openai", "sglang_0.5.23.json")
    tokens = ids(*vllm["ids_echo"]["request"]["prompt"])
    dialect = Dialect(model="m", token_id_prompts=True, extensions=True, sampled_token_ids=True, max_top_k=3)

    def backend(**changes: Any) -> OpenAIBackend:
        made = OpenAIBackend(
            OpenAIBackend.Settings(url="http://server"), role="teacher", model=str(model), run_directory=model
        )
        made._server.endpoint = endpoint(wire)
        made._dialect = replace(dialect, **changes)
        made._found = capabilities(max_top_k=3, max_generation_top_k=3)
        if made._dialect.keyed_by_text or not made._dialect.token_id_prompts:
            made._texts = TokenTexts(made._tokenizer, VOCAB)
        return made

    for source in (vllm, sglang):
        for name in ("generate", "generate_stopped"):
            made, stops = backend(), source[name]["request"]["stop_token_ids"]
            yield Case(
                f"{name}, {'vllm' if source is vllm else 'sglang'}",
                json.dumps(source[name]["reply"]).encode(),
                lambda made=made, stops=stops: made.generate(tokens, sampling(4, *stops), deadline=soon()),
                _openai_generation,
            )
    by_text = {"token_id_prompts": False, "extensions": False, "sampled_token_ids": False, "keyed_by_text": True}
    forms: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("ids_prompt_logprobs", vllm, {"scoring": "prompt_logprobs"}),
        ("ids_echo", vllm, {"scoring": "echo"}),
        ("ids_echo_and_generate", vllm, {"scoring": "echo_and_generate"}),
        ("ids_echo_and_generate", sglang, {"scoring": "echo_and_generate", "keyed_by_text": True}),
        ("text_echo_plain", vllm, {"scoring": "echo_and_generate", **by_text}),
        ("text_echo_plain", sglang, {"scoring": "echo_and_generate", **by_text}),
    )
    for name, source, changes in forms:
        made = backend(**changes)
        is_plain = changes["scoring"] == "prompt_logprobs"
        yield Case(
            f"{name}, {'vllm' if source is vllm else 'sglang'}",
            json.dumps(source[name]["reply"]).encode(),
            lambda made=made: made.score(ScoreRequest(tokens[:4], tokens[4:], 1.0, soon()), top_k=1),
            (lambda reply: _prompt_rows(reply["choices"][0]["prompt_logprobs"], first=4)) if is_plain else None,
        )
    for ask in (
        lambda: made.score(ScoreRequest(tokens[:4], tokens[4:], 1.0, soon()), top_k=1),
        lambda: made.generate(tokens, sampling(4, 2), deadline=soon()),
    ):
        yield Case(
            "aborted", b'{"choices": [{"text": "", "token_ids": [], "finish_reason": "abort"}]}', ask, fails=ABORTED
        )
    writes = backend(token_id_prompts=False, sampled_token_ids=False, extensions=False)
    yield Case(
        "text",
        b'{"choices": [{"text": " one half", "finish_reason": "stop"}], "usage": {"prompt_tokens": 5}}',
        lambda: writes.generate(tokens[1:5], sampling(9, 2), deadline=soon()),
    )


def local_cases(wire_: Wire, model: Path) -> Iterator[Case]:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(6, VOCAB)) * 3
    rows = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)  # (6, V)
    best = np.argsort(-rows, axis=1)[:, :3].astype(np.int32)
    response = ids(5, 6, 7, 8, 9, 2)
    own = rows[np.arange(6), response]
    top = np.take_along_axis(rows, best, axis=1)
    entropy = -(np.exp(rows) * rows).sum(1)
    tails = np.log1p(-np.exp(top).sum(1))
    generation = Generation(
        token_ids=response, logprobs=own, finish_reason="stop", version_spans=(VersionSpan(0, 6, V0),), topk_ids=best,
        topk_logprobs=top,
    )  # fmt: skip
    scores = TokenScores(
        logprobs=own, topk_ids=best, topk_logprobs=top, entropy=entropy, entropy_lower=entropy, entropy_upper=entropy,
        version=V0, tail_logprobs=tails,
    )  # fmt: skip
    backend = LocalBackend(LocalBackend.Settings(), role="student", model=str(model), run_directory=model)
    reads = functools.partial(read_error, "server")
    backend._server.endpoint = HttpEndpoint("server", "http://server", read_error=reads)
    backend._server.endpoint._session = wire_  # type: ignore[assignment]
    backend._held = HeldWeights("student", V0)
    backend._capabilities = capabilities()

    def generate(session: str | None = None) -> Awaitable[Any]:
        top_k = 3 if session is None else 0  # requests with a top-k leave alone
        return backend.generate(ids(1, 3), sampling(6, 2), top_k=top_k, session=session, deadline=soon())

    async def several() -> Any:
        outcomes = await asyncio.gather(generate("s"), generate("s"), return_exceptions=True)
        failed = [each for each in outcomes if isinstance(each, BaseException)]
        if len(failed) == len(outcomes):
            raise failed[0]
        return outcomes

    plain = msgspec.structs.replace(generation, topk_ids=None, topk_logprobs=None)
    reply = msgspec.Raw(wire.encode(plain))
    frames = [wire.encode(api.ManyReply(index=index, reply=reply)) for index in (1, 0)]
    yield Case("generate", wire.encode(generation), generate, _local_generation)
    yield Case("several", b"".join(api.frame(frame) for frame in frames), several)
    yield Case(
        "score",
        wire.encode(scores),
        lambda: backend.score(ScoreRequest(ids(1, 3), response, 1.0, soon()), top_k=3),
        _local_scores,
    )
    yield Case(
        "candidates",
        wire.encode(api.CandidateReply(logprobs=rows[:2, :3], version=V0)),
        lambda: backend.candidate_logprobs(
            ScoreRequest(ids(1, 3), response, 1.0, soon()), ids(0, 1), best[:2], expected_version=V0
        ),
    )


DIALECTS: Mapping[str, Callable[[Wire, Path], Iterator[Case]]] = {
    "vllm": vllm_cases,
    "sglang": sglang_cases,
    "openai": openai_cases,
    "local": local_cases,
}


def capabilities(**changes: Any) -> Capabilities:
    given = {"max_top_k": VOCAB, "max_generation_top_k": VOCAB, "candidate_logprobs": "single", **changes}
    return Capabilities(
        model="m", vocab_size=VOCAB, vocab_fingerprint="", max_context_tokens=2048, exact_entropy=False,
        weight_update=True, **given,
    )  # fmt: skip


def _npy(rows: list[list[float]]) -> str:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(rows)}, {len(rows[0])}), }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    flat = [value for row in rows for value in row]
    return base64.b64encode(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + struct.pack(f"<{len(flat)}f", *flat)
    ).decode()


def _vllm_generation(reply: Any) -> Said:
    [choice] = reply["choices"]
    rows = [each["top_logprobs"] for each in choice["logprobs"]["content"]]
    top = [{each["token_id"]: each["logprob"] for each in row} for row in rows]
    own = [row[token] for row, token in zip(top, choice["token_ids"], strict=True)]
    return {"tokens": choice["token_ids"], "logprobs": own, "top": top}


def _vllm_completion(reply: Any) -> Said:
    [choice] = reply["choices"]
    rows = choice["logprobs"]["top_logprobs"]
    return {
        "tokens": choice["token_ids"],
        "top": [{int(name.removeprefix("token_id:")): value for name, value in row.items()} for row in rows],
    }


def _prompt_rows(rows: Any, first: int = 2) -> Said:
    return {"top": [{int(token): entry["logprob"] for token, entry in row.items()} for row in rows[first:]]}


def _sglang_generation(reply: Any) -> Said:
    entries = reply["meta_info"]["output_token_logprobs"]
    return {"tokens": reply["output_ids"], "logprobs": [entry[0] for entry in entries]}


def _sglang_scores(reply: Any) -> Said:
    return {"logprobs": [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]}


def _openai_generation(reply: Any) -> Said:
    [choice] = reply["choices"]
    tokens = choice.get("token_ids")
    if tokens is None:  # then the reply names them in the other place
        tokens = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    return {"tokens": tokens, "logprobs": choice["logprobs"]["token_logprobs"]}


def _local_generation(reply: Any) -> Said:
    return {"tokens": _unpacked(reply["token_ids"]), "logprobs": _unpacked(reply["logprobs"])}


def _local_scores(reply: Any) -> Said:
    return {"logprobs": _unpacked(reply["logprobs"])}


def _unpacked(array: Any) -> list[Any]:
    kind, shape, data = array
    code = {"<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}[kind]
    values = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    assert len(values) == shape[0]
    return list(values)
