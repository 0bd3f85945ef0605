"""Gives tests a running `spot-async serve`, through OpenAI's client and through its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from spot_async.base import wire
from spot_async.serving import api

KEY = "a-secret"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
ENDLESS = 19000  # so many tokens take longer than any test waits


@dataclass(frozen=True)
class ServedModel:
    """A server that was started with `KEY`."""

    url: str
    model: Path

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, *, content_type: str = "application/json", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, headers={**AUTHORIZATION, "Content-Type": content_type}, **body)

    def stats(self) -> api.Stats:
        return wire.decode(httpx.get(self.url + api.STATS, headers=AUTHORIZATION).content, api.Stats)

    def until(self, reached: Callable[[api.Stats], bool]) -> api.Stats:
        """Ask for statistics until `reached`, and return them. The server notices a hang-up only after a while."""
        for _ in range(2000):
            found = self.stats()
            if reached(found):
                return found
        raise AssertionError(found)

    def until_idle(self) -> api.Stats:
        return self.until(lambda found: found.active == 0 and found.waiting == 0)


def completing(served: ServedModel, client: openai.OpenAI, default_prompt: str) -> Callable[..., Any]:
    """Return a function that asks for a completion. Fields that OpenAI's client does not know go to `more`."""

    def complete(prompt: Any = default_prompt, more: dict[str, Any] | None = None, **fields: Any) -> Any:
        return client.completions.create(model=served.model.name, prompt=prompt, extra_body=more, **fields)

    return complete
