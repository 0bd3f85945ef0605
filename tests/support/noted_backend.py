"""A backend that notes what is done with it, in `NOTED`, for tests of how services are opened."""

from __future__ import annotations

import asyncio
from pathlib import Path

from spot_async.config import BackendSettings
from spot_async.errors import ProcessDiedError
from spot_async.types import Capabilities, WeightSnapshot

NOTED: list[str] = []


class Noted:
    """One server. It serves no requests."""

    class Settings(BackendSettings):
        fails: str = ""  # what goes wrong: "entering", "asking", or "living", once weights have come

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        self._fails = settings.fails
        self._role = role
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Noted:
        await asyncio.sleep(0.1 if self._fails == "entering" else 0.0)  # after the others
        self._fail_at("entering")
        NOTED.append(f"{self._role} entered")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        NOTED.append(f"{self._role} left")

    async def capabilities(self, *, deadline: float) -> Capabilities:
        self._fail_at("asking")
        return Capabilities(
            model="m",
            vocab_size=8,
            vocab_fingerprint="f",
            max_context_tokens=64,
            max_top_k=8,
            exact_entropy=True,
            candidate_logprobs="batched",
            weight_update=True,
            version=None,  # it may hold any weights
        )

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        NOTED.append(f"{self._role} sent {snapshot.version}")
        self._ended.set()

    async def watch(self) -> None:
        await (self._ended.wait() if self._fails == "living" else asyncio.Event().wait())
        raise ProcessDiedError(f"{self._role} ended")

    def _fail_at(self, moment: str) -> None:
        if self._fails == moment:
            raise ProcessDiedError(f"{self._role} ended")
