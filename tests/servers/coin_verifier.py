"""A verifier for random models: it finds some responses correct, whatever they say."""

from __future__ import annotations

from typing import Self

from spot_async.config import PluginSettings
from spot_async.types import Problem, Verdict


class CoinVerifier:
    class Settings(PluginSettings):
        pass

    def __init__(self, settings: Settings) -> None:
        pass

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        return Verdict.CORRECT if len(response_text) % 2 else Verdict.WRONG

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass
