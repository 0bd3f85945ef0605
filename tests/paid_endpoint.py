"""An endpoint that costs money: OpenAI's completions over a tiny language model of its own, with limits and a bill.

    python tests/paid_endpoint.py --vocabulary 48 --requests-per-minute 3000 --tokens-per-minute 200000

Prints its URL and serves until it is killed. It counts and bills by itself, from the requests' token ids and the tokens
that it gives, and shares no code with the package. Each token is decided by the two before it. `GET /bill` gives the
bill so far, and how many requests were refused because they came too fast.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from decimal import Decimal

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PRICES = {"prompt": Decimal("3"), "cached": Decimal("0.75"), "completion": Decimal("12")}  # a million tokens
PRICE_OF_REQUEST = Decimal("0.0002")
BLOCK = 16  # tokens; prompts that begin with the same blocks are billed as cached
MAX_LOGPROBS = 8


class Allowance:
    """So much a minute, and no more than a second's worth at once."""

    def __init__(self, per_minute: float) -> None:
        self.rate = per_minute / 60
        self.most = max(1.0, self.rate)
        self.left = self.most
        self.at = time.monotonic()

    def missing_s(self, amount: float) -> float:
        """0 when it was granted."""
        now = time.monotonic()
        self.left, self.at = min(self.most, self.left + (now - self.at) * self.rate), now
        needed = min(amount, self.most)
        if self.left + 1e-9 < needed:
            return (needed - self.left) / self.rate
        self.left -= amount
        return 0.0


class Endpoint:
    def __init__(
        self, vocabulary: int, rpm: float, tpm: float, latency_s: float, throttled: range, retry_after_s: float | None
    ) -> None:
        draw = np.random.default_rng(7)
        self.tables = draw.normal(scale=2.0, size=(2, vocabulary, vocabulary))
        self.requests, self.tokens, self.latency_s = Allowance(rpm), Allowance(tpm), latency_s
        self.asked, self.throttled, self.retry_after_s = 0, throttled, retry_after_s
        self.seen: set[tuple[int, ...]] = set()
        self.money = Decimal(0)
        self.counts = {"answered": 0, "refused": 0, "invalid": 0, "prompt": 0, "cached": 0, "completion": 0}

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """(T, V): the distribution after each token."""
        previous = [0, *ids[:-1]]
        logits = self.tables[0][ids] + self.tables[1][previous]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big-teacher", "object": "model"}]})

    async def bill(self, request: Request) -> Response:
        return JSONResponse({**self.counts, "money": str(self.money)})

    async def completions(self, request: Request) -> Response:
        body = json.loads(await request.body())
        refusal = self.invalid(body)
        if refusal is not None:
            self.counts["invalid"] += 1
            return JSONResponse({"error": {"message": refusal, "type": "invalid_request_error"}}, 400)
        ids, wanted = body["prompt"], body["max_tokens"]
        self.asked += 1
        if self.asked in self.throttled:
            self.counts["refused"] += 1
            headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
            return JSONResponse({"error": {"message": "no room", "type": "requests"}}, 429, headers)
        wait_s = self.requests.missing_s(1) or self.tokens.missing_s(len(ids) + wanted)
        if wait_s:
            self.counts["refused"] += 1
            headers = {"retry-after": f"{wait_s:.3f}"}
            return JSONResponse({"error": {"message": "rate limit reached", "type": "requests"}}, 429, headers)
        cached = self.cached(ids)
        given = self.continuation(ids, wanted)
        self.charge(len(ids), cached, len(given))
        await asyncio.sleep(self.latency_s)
        return JSONResponse(self.reply(body, ids, given, cached))

    def invalid(self, body: dict) -> str | None:
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not all(isinstance(each, int) for each in prompt):
            return "prompts are token ids here"
        if (body.get("logprobs") or 0) > MAX_LOGPROBS:
            return f"logprobs may be {MAX_LOGPROBS} at most"
        unknown = {"prompt_logprobs", "min_p", "repetition_penalty"} & body.keys()
        return f"unknown field {sorted(unknown)[0]}" if unknown else None

    def cached(self, ids: list[int]) -> int:
        """Tokens of the longest beginning, in whole blocks, that another prompt had; remembers this one's."""
        prefixes = [tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        known = max((len(each) for each in prefixes if each in self.seen), default=0)
        self.seen.update(prefixes)
        return known

    def continuation(self, ids: list[int], wanted: int) -> list[int]:
        given: list[int] = []
        while len(given) < wanted:
            given.append(int(self.logprobs([*ids, *given])[-1].argmax()))
        return given

    def charge(self, prompt: int, cached: int, completion: int) -> None:
        self.counts["answered"] += 1
        for name, count in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            self.counts[name] += count
        million = Decimal(1_000_000)
        self.money += (
            PRICE_OF_REQUEST
            + ((prompt - cached) * PRICES["prompt"] + cached * PRICES["cached"] + completion * PRICES["completion"])
            / million
        )

    def reply(self, body: dict, ids: list[int], given: list[int], cached: int) -> dict:
        choice: dict = {"index": 0, "text": " ".join(map(str, given)), "finish_reason": "length", "token_ids": given}
        k = body.get("logprobs")
        if k is not None:
            everything = [*ids, *given]
            rows = self.logprobs(everything)
            first = 0 if body.get("echo") else len(ids)
            columns: dict = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
            for place in range(first, len(everything)):
                row = rows[place - 1] if place else None
                columns["tokens"].append(f"token_id:{everything[place]}")
                columns["token_logprobs"].append(None if row is None else float(row[everything[place]]))
                best = [] if row is None else np.argsort(-row)[:k].tolist()
                top = {f"token_id:{each}": float(row[each]) for each in {*best, everything[place]}} if place else None
                columns["top_logprobs"].append(top)
            choice["logprobs"] = columns
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(given),
            "total_tokens": len(ids) + len(given),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return {"id": "c", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--requests-per-minute", type=float, default=1e9)
    parser.add_argument("--tokens-per-minute", type=float, default=1e12)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--throttled", type=int, nargs=2, default=(0, -1), help="the first of these requests, the last")
    parser.add_argument("--throttled-every", type=int, default=1, help="2: every other one of them")
    parser.add_argument("--retry-after-s", type=float)
    asked = parser.parse_args()
    first, last = asked.throttled
    endpoint = Endpoint(
        asked.vocabulary,
        asked.requests_per_minute,
        asked.tokens_per_minute,
        asked.latency_s,
        range(first, last + 1, asked.throttled_every),
        asked.retry_after_s,
    )
    routes = [
        Route("/v1/models", endpoint.models),
        Route("/v1/completions", endpoint.completions, methods=["POST"]),
        Route("/bill", endpoint.bill),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)  # noqa: T201
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off"))
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
