"""Our own server as one that sleeps: it frees nothing, and refuses to be asked in its sleep or beside another."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import ClassVar

from pydantic import Field

from spot_async.backends.local import LocalBackend


class SleepyLocal(LocalBackend):
    """A local engine of one card, on which one such server may be awake."""

    awake: ClassVar[set[str]] = set()
    woken: ClassVar[list[str]] = []  # the servers, in the order in which they woke

    class Settings(LocalBackend.Settings):
        kind: str = "sleepy_local:SleepyLocal"
        sleep_while_training: bool = Field(False, description="as vLLM's")
        sleep_while_others_answer: bool = Field(False, description="as vLLM's")

    @property
    def sleeps_while_training(self) -> bool:
        return self._settings.sleep_while_training

    async def __aenter__(self):
        self._wake()
        return await super().__aenter__()

    def _wake(self) -> None:
        assert not self.awake, f"{self._name} wakes beside {self.awake}"
        self.awake.add(self._name)

    async def sleep(self, *, deadline):
        self.awake.remove(self._name)

    async def wake_weights(self, *, deadline):
        pass

    async def wake(self, *, deadline):
        self._wake()
        self.woken.append(self._name)

    @asynccontextmanager
    async def _awake(self):
        assert self._name in self.awake, f"{self._name} is asked in its sleep"
        yield
        assert self._name in self.awake, f"{self._name} was put to sleep with a request in flight"

    async def score(self, *args, **rest):
        async with self._awake():
            return await super().score(*args, **rest)

    async def generate(self, *args, **rest):
        async with self._awake():
            return await super().generate(*args, **rest)
