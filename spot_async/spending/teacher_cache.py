"""Keeps the answers of a run's teacher, scores and responses, under the right keys, and replays them without a teacher.

A score's key is a hash of the teacher, the tokens with the boundary of prompt and response, K, the temperature and the
format. A response's is one of the teacher, the tokens before it, its sample number, how it is sampled and the format.
The teacher is identified in one of two ways:

* A server that runs already: by its configured name, the name it gives itself, and the vocabulary.
* A server that we start: by the contents of its model directory and how it computes (type, the server's arguments).

Nobody can see how a provider serves a model under its name (quantised, say), so use another cache file for another
provider.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.base.files import open_regular, read_bounded
from spot_async.base.tasks import Opened
from spot_async.config import TeacherConfig
from spot_async.errors import ConfigError
from spot_async.models.files import ModelFiles
from spot_async.spending.score_cache import ScoreCache, digest
from spot_async.types import Capabilities, IntArray

T = TypeVar("T", bound=msgspec.Struct)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # of files that servers read weights from


class TeacherCache(Opened):
    """A run's view of a `ScoreCache`. The teacher is in every key, so `identify` comes before any scores."""

    def __init__(self, cache: ScoreCache, teacher: TeacherConfig, files: ModelFiles) -> None:
        self.cache = cache
        place = teacher.backend.servers()[0].place
        self._is_ours = place is None or not place.is_attached
        self._teacher = teacher
        self._files = files
        self._identity: bytes

    async def _open(self, stack: AsyncExitStack) -> None:
        weights = await asyncio.to_thread(weights_digest, self._files.directory) if self._is_ours else None
        self._identity = teacher_identity(self._teacher, self._files, weights)
        await stack.enter_async_context(self.cache)

    async def identify(self, said: Capabilities) -> KeptScores:
        """Return the teacher's kept scores. What it `said` of itself is part of the keys, and is kept for replays."""
        own_name = None if self._is_ours else said.model  # one of our servers gives a path, which may differ
        conventions = [said.logprob_convention, said.score_temperature]
        if not self.cache.is_replay:
            await self.cache.put(digest("capabilities", self._identity), said)
        return KeptScores(self.cache, digest(self._identity, own_name, said.vocab_fingerprint, conventions))

    async def recall(self) -> Capabilities:
        """Return what the teacher said of itself when it was last asked. Raises ConfigError when it never was."""
        said = await self.cache.get(digest("capabilities", self._identity), Capabilities)
        if said is None:
            raise ConfigError(
                f"{self.cache.role}.replay: {self.cache.path} knows nothing of this teacher (model, backend kind, "
                "served_model, top_k and request_fields must be as they were): run once with "
                f"{self.cache.role}.replay=false"
            )
        return said


class KeptScores:
    """The answers of one teacher, which its `fingerprint` tells from all others."""

    def __init__(self, cache: ScoreCache, fingerprint: bytes) -> None:
        self._cache = cache
        self._fingerprint = fingerprint

    async def fetch(
        self, kind: type[T], asked: Sequence[IntArray | float | None], ask: Callable[[], Awaitable[T]], *, what: str
    ) -> T:
        """Return the kept answer to `asked` (tokens, K, temperature). If there is none, call `ask` and keep its answer.

        `what` names the answer in messages. Raises as `ScoreCache.fetch`.
        """
        plain = [each.astype(np.int32) if isinstance(each, np.ndarray) else each for each in asked]
        return await self._cache.fetch(digest(kind.__name__, self._fingerprint, plain), kind, ask, what=what)


class ReplayedTeacher(Opened):
    """The teacher's backend in a replay. It starts nothing, and takes no request, since stages ask the cache."""

    def __init__(self, cache: TeacherCache) -> None:
        self._cache = cache

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._cache)

    async def capabilities(self, *, deadline: float) -> Capabilities:
        return await self._cache.recall()

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()


def teacher_identity(teacher: TeacherConfig, files: ModelFiles, weights: bytes | None) -> bytes:
    """Return a digest of what the configuration and the files say of the teacher, before any server is asked.

    `weights` is their digest, or None for a server that runs already.
    """
    backend = teacher.backend
    return digest(
        backend.kind,
        getattr(backend, "served_model", None),
        getattr(backend, "top_k", None),
        getattr(backend, "request_fields", None),
        files.vocabulary.fingerprint,
        files.vocab_size,
        weights,
        None if weights is None else _computation(teacher),
    )


def _computation(teacher: TeacherConfig) -> list[Any]:
    """Return the settings of a server of ours that change its scores, besides the weights."""
    server = teacher.backend.servers()[0]
    launch = getattr(server, "launch", None)
    names = ("dtype", "arguments", "environment")
    launched = None if launch is None else [getattr(launch, name, None) for name in names]
    has_own_forward = True if server.kind == "local" else None
    return [getattr(server, "dtype", None), has_own_forward, launched]


def weights_digest(directory: Path) -> bytes:
    """Return a digest of a model directory's configuration and whole weight files. Takes about a second per GB."""
    found = hashlib.blake2b(read_bounded(directory / "config.json"), digest_size=16)
    for path in sorted(each for each in directory.iterdir() if each.suffix in WEIGHT_SUFFIXES):
        with open_regular(path) as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return found.digest()
