"""Stands in for vLLM: replies recorded from 0.32.0, and a small server for what vLLM cannot run on a CPU.

The server answers as vLLM 0.32 with the V2 model runner or as vLLM 0.25, by their sources. Its model is a table of
next-token distributions.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from spot_async.backends.vllm.backend import VllmBackend
from spot_async.models.vocabulary import load_tokenizer
from spot_async.types import WeightVersion

RECORDED = Path(__file__).parents[1] / "recorded" / "vllm_0.32.0" / "replies.json"
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
VOCAB = 50
PROMPT = np.array([3, 9, 27], np.int32)
RESPONSE = np.array([31, 4, 4, 40, 12], np.int32)


def recorded(name: str) -> Any:
    return json.loads(RECORDED.read_text())[name]["reply"]


class Raw(str):
    """A reply that is not JSON."""


def as_before_0_32(reply: Any) -> Any:
    """Return the same reply in the shape of versions up to 0.31."""
    for entry in reply["choices"][0]["logprobs"]["content"]:
        for token in (entry, *entry["top_logprobs"]):
            token["token"] = f"token_id:{token.pop('token_id')}"
            token["bytes"] = None
    return reply


def checksums(directory: Path) -> dict[str, str]:
    """Return what vLLM reports of a model with one worker: three products are one, and rows of the embedding padded."""
    tensors = load_file(directory / "model.safetensors")
    joined = {name: tensor for name, tensor in tensors.items() if not re.search("[qkv]_proj|gate_proj|up_proj", name)}
    joined["model.embed_tokens.weight"] = np.pad(joined["model.embed_tokens.weight"], ((0, 11), (0, 0)))
    joined["model.layers.0.self_attn.qkv_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"]
    return {f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in joined.items()}


class StandIn:
    """A server whose next token depends only on the last one: row `i` of its table (V, V) follows token `i`."""

    def __init__(
        self,
        model: Path,
        tokenizer: Any,
        *,
        version: str = "0.32.0",
        chosen_tokens: bool = True,
        paused: bool = False,
        developer_mode: bool = True,
        device: str = "cuda",
        compute: Callable[[np.ndarray, str], np.ndarray] = lambda table, _: table,
    ) -> None:
        self.model, self.tokenizer, self.version, self.chosen_tokens = model, tokenizer, version, chosen_tokens
        logits = np.random.default_rng(0).normal(0.0, 2.0, (VOCAB, VOCAB))
        self.table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        # How it computes the table for what it samples, for what it scores, and for chosen tokens, in each reply anew.
        self.compute = compute
        self.weights = "default"
        self.directory = model
        self.planted: Path | None = None  # what it loads whatever it is told
        self.reports_digests = version >= "0.32" and developer_mode
        self.names_weights = version >= "0.27"
        self.paused = paused
        self.developer_mode = developer_mode
        self.device = device
        self.finish_reason = "length"
        self.calls: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        self.adapter_flags: dict[str, Any] | None = None
        self.failing: dict[str, tuple[int, Any]] = {}  # the next answer
        self.broken: set[str] = set()  # every answer
        self.held = asyncio.Event()
        self.hold: str | None = None
        self.delay: str | None = None  # the next request of this path is answered once `go_on` is set
        self.go_on = asyncio.Event()
        self.answers_developers = True
        self.metrics: list[str] = []

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        missing = (404, {"detail": "Not Found"})
        routes: dict[str, Callable[[], tuple[int, Any]]] = {
            "/version": lambda: (200, {"version": self.version}),
            "/v1/models": lambda: (200, {"data": [{"id": "m", "max_model_len": 64}]}),
            "/tokenize": lambda: (200, {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}),
            "/inference/v1/generate": lambda: self.generate(body["token_ids"], body["sampling_params"]),
            "/weight_info": lambda: (
                (200, {"weight_version": self.weights}) if self.names_weights and self.developer_mode else missing
            ),
            "/server_info": lambda: (200, {"vllm_config": f"model='m', device_config={self.device}, seed=0"}),
            "/server_info?config_format=json": lambda: (
                (200, {"vllm_config": {"lora_config": self.adapter_flags}}) if self.developer_mode else missing
            ),
            "/update_weight_version": lambda: self.rename(body["new_version"]),
            "/reset_prefix_cache": lambda: (200, {"success": True}),
            "/is_paused": lambda: (200, {"is_paused": self.paused}) if self.answers_developers else missing,
            "/metrics": lambda: (200, Raw(self.metrics.pop(0) if self.metrics else "")),
            "/health": lambda: (200, {}),
            "/pause?mode=keep": lambda: self.pause(True),
            "/collective_rpc": lambda: self.load(body),
            "/weight_checker": lambda: (
                (200, {"checksums": checksums(self.planted or self.directory)}) if self.reports_digests else missing
            ),
            "/resume": lambda: self.pause(False),
        }
        self.calls.append(path)
        self.bodies.append((path, body))
        if path in self.broken:
            return 500, {"error": {"message": "broken"}}
        return self.failing.pop(path, None) or routes.get(path, lambda: missing)()

    def load(self, body: Any) -> tuple[int, Any]:
        self.directory = Path(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def pause(self, paused: bool) -> tuple[int, Any]:
        self.paused = paused
        return 200, {"status": "paused" if paused else "resumed"}

    def rename(self, name: str) -> tuple[int, Any]:
        self.weights = name
        return 200, {"success": True, "new_version": name}

    def generate(self, tokens: list[int], asked: dict[str, Any]) -> tuple[int, Any]:
        def refuse(message: str) -> tuple[int, Any]:
            return 400, {"error": {"message": message, "type": "BadRequestError"}}

        if max(tokens) >= VOCAB:
            return refuse(f"Token id {max(tokens)} is out of vocabulary")
        if (asked.get("prompt_logprobs") or 0) > 20:
            return refuse("Requested prompt logprobs of 50, which is greater than max allowed: 20")
        reply: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_id_logprobs": None}
        rows = asked.get("prompt_logprob_token_ids")
        if rows is not None and self.version >= "0.31":
            if not self.chosen_tokens:
                return refuse("prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1).")
            start = asked["prompt_logprob_start"]
            if len(rows) != len(tokens) - 1 - start:
                return refuse(f"prompt_logprob_token_ids has {len(rows)} rows")
            chosen = self.compute(self.table, "chosen")
            values = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
            for i, row in enumerate(rows):
                values[i, : len(row)] = chosen[tokens[start + i], row]
            file = io.BytesIO()
            np.save(file, values)
            reply["prompt_token_id_logprobs"] = base64.b64encode(file.getvalue()).decode()
        if asked.get("prompt_logprobs") is not None:
            scored = self.compute(self.table, "scored")
            reply["prompt_logprobs"] = [None] + [
                {str(v): {"logprob": x} for v, x in self.entries(scored[before], token, asked["prompt_logprobs"])}
                for before, token in itertools.pairwise(tokens)
            ]
        sampled, content = [], []
        table = self.compute(self.table, "sampled")
        for _ in range(asked["max_tokens"]):
            row = table[(tokens + sampled)[-1]]
            token = asked.get("allowed_token_ids", [int(row.argmax())])[0]
            entries = self.entries(row, token, asked.get("logprobs") or 0)
            shown = [self.entry(*entry) for entry in entries[: max(1, asked.get("logprobs") or 0)]]
            content.append({**shown[0], "top_logprobs": shown})
            sampled.append(token)
        choice: dict[str, Any] = {"token_ids": sampled, "finish_reason": self.finish_reason}
        if asked.get("logprobs") is not None:
            choice["logprobs"] = {"content": content}
        if self.names_weights:
            choice["weight_versions"] = [{"version": self.weights, "start": 0, "end": len(sampled)}]
        return 200, {**reply, "choices": [choice]}

    def entries(self, row: np.ndarray, token: int, count: int) -> list[tuple[int, float]]:
        """Return the token itself, then the likeliest others."""
        best = [int(v) for v in np.argsort(-row)[:count] if v != token]
        return [(v, float(np.float32(row[v]))) for v in (token, *best)]

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = {"token_id": token} if self.version >= "0.32" else {"token": f"token_id:{token}"}
        return {**name, "logprob": logprob}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [line.split(":")[1] for line in head.splitlines() if line.startswith("content-length")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                path = head.split()[1]
                if path == self.delay:
                    self.delay = None
                    self.held.set()
                    await self.go_on.wait()
                status, reply = self.answer(path, json.loads(body) if body and body != b"null" else None)
                if path == self.hold:  # the work is done, but the answer never comes
                    self.held.set()
                    await asyncio.sleep(3600.0)
                content = reply.encode() if isinstance(reply, Raw) else json.dumps(reply).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


Connect = Callable[..., Any]


def connecting(model: Path, run_directory: Path) -> Connect:
    """Return `connect(role, **stand_in)`, which enters a stand-in and a backend on it."""
    tokenizer = load_tokenizer(model)

    @asynccontextmanager
    async def enter(role: str = "student", **changes: Any) -> AsyncIterator[tuple[VllmBackend, StandIn]]:
        stand_in = StandIn(model, tokenizer, **changes)
        with closing(await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)) as server:
            settings = VllmBackend.Settings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with VllmBackend(settings, role=role, model=str(model), run_directory=run_directory) as backend:
                stand_in.calls.clear()
                yield backend, stand_in

    return enter
