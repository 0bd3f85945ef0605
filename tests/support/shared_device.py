"""A GPU that several servers and a trainer share, and stand-ins that take of it what the real ones take.

They account memory as the sources say: vLLM 0.32 (`v1/worker/gpu_worker.py`, `v1/worker/utils.py`), which measures the
whole device, and SGLang 0.5.23 (`mem_cache/kv_cache_configurator.py`), which takes a share of what is free. They are
started by the commands that real ones are started by. Between two steps of a start anything else may happen.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from replica_incidents import Server

from spot_async.backends.sglang.sglang_discovery import check_cache
from spot_async.backends.sglang.weights import ServerInfo
from spot_async.errors import Exchange, ProcessDiedError, TransientError

GIB = 1 << 30
CONTEXT_GIB, GRAPHS_GIB, ACTIVATIONS_GIB = 0.7, 1.0, 0.9


class Device:
    """The memory of one GPU, by who has it. Whoever takes more than is free dies of it."""

    def __init__(self, total_gib: float) -> None:
        self.total_gib = total_gib
        self.held: Counter[object] = Counter()
        self.most_gib = 0.0  # that was taken at once

    @property
    def free_gib(self) -> float:
        return self.total_gib - sum(self.held.values())

    def take(self, who: object, gib: float) -> None:
        if gib > self.free_gib:
            raise ProcessDiedError(f"CUDA out of memory: {gib:.1f} GiB asked, {self.free_gib:.1f} free")
        self.held[who] += gib
        self.most_gib = max(self.most_gib, self.total_gib - self.free_gib)


class _OnDevice(Server):
    """A server that takes of a device when it is entered, and frees it when it is left, killed, or sent to sleep."""

    sleeps_while_training = True

    def __init__(
        self, device: Device, argv: Sequence[str], weights_gib: float, token_bytes: int, rng: random.Random
    ) -> None:
        super().__init__()
        self.device, self.weights_gib, self.token_bytes = device, weights_gib, token_bytes
        self.flags = dict(pairwise(argv))
        self.cache_gib = 0.0
        self._asleep: list[float] = []  # its parts, in the order in which they wake
        self._rng = rng

    async def _step(self, gib: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, 20.0))
        self.device.take(self, gib)

    async def __aenter__(self):
        try:
            await self._start()
        except BaseException:
            self._free()
            raise
        return self

    async def _start(self) -> None:
        raise NotImplementedError

    async def __aexit__(self, *exc_info):
        self._free()
        await super().__aexit__(*exc_info)

    def _free(self) -> None:
        self.device.held.pop(self, None)

    def kill(self) -> None:
        self._free()
        super().kill()

    async def sleep(self, *, deadline):
        self._answer()
        self.device.held[self] -= self.weights_gib + self.cache_gib
        self._asleep = [self.weights_gib, self.cache_gib]

    async def wake_weights(self, *, deadline):
        self._answer()
        self._wake(1)

    async def wake(self, *, deadline):
        self._answer()
        self._wake(2)

    def _wake(self, parts: int) -> None:
        while len(self._asleep) > 2 - parts:
            self.device.take(self, self._asleep.pop(0))

    def _answer(self) -> None:
        if self.ended.done():
            error = TransientError("connection refused")
            error.exchange = Exchange("http://a", "POST", "/", 2, {})
            raise error


class Vllm(_OnDevice):
    async def _start(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, 5.0))
        before = self.device.free_gib
        requested = float(self.flags["--gpu-memory-utilization"]) * self.device.total_gib
        if before < requested:
            raise ProcessDiedError(f"Free memory on device ({before:.1f}) is less than desired ({requested:.1f})")
        await self._step(CONTEXT_GIB)
        await self._step(self.weights_gib)
        self.cache_gib = requested - (before - self.device.free_gib) - ACTIVATIONS_GIB
        if (given := self.flags.get("--kv-cache-memory-bytes")) is not None:
            self.cache_gib = int(given) / GIB
        if self.cache_gib <= 0:
            raise ProcessDiedError("No available memory for the cache blocks")
        await self._step(self.cache_gib)
        await self._step(GRAPHS_GIB + ACTIVATIONS_GIB)


class Sglang(_OnDevice):
    async def _start(self) -> None:
        await self._step(CONTEXT_GIB)
        before = self.device.free_gib
        await self._step(self.weights_gib)
        rest = self.device.free_gib - before * (1 - float(self.flags["--mem-fraction-static"]))
        asked = self.flags.get("--max-total-tokens")
        tokens = int(rest * GIB / self.token_bytes)
        if tokens <= 0:
            raise ProcessDiedError("Not enough memory. Please try to increase --mem-fraction-static.")
        tokens = tokens if asked is None else min(tokens, int(asked))
        self.cache_gib = tokens * self.token_bytes / GIB
        await self._step(self.cache_gib)
        await self._step(GRAPHS_GIB + ACTIVATIONS_GIB)
        info = ServerInfo(max_total_tokens=None if asked is None else int(asked), max_total_num_tokens=tokens)
        check_cache(self, info)

    section = "teacher.backend"


class Trainer:
    """One rank: it loads, rests, and takes more while it trains."""

    def __init__(self, device: Device, resting_gib: float, training_gib: float, rng: random.Random) -> None:
        self.device, self.resting_gib, self.more_gib, self._rng = device, resting_gib, training_gib - resting_gib, rng

    async def __aenter__(self):
        for _ in range(2):
            await asyncio.sleep(self._rng.uniform(0.1, 20.0))
            self.device.take(self, self.resting_gib / 2)
        return self

    async def __aexit__(self, *exc_info):
        self.device.held.pop(self, None)

    async def train(self) -> None:
        self.device.take(self, self.more_gib)
        await asyncio.sleep(30.0)
        self.device.held[self] -= self.more_gib
