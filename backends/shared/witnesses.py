"""Whether a server holds the weights that it was told to load, by the digests that it reports of its tensors.

A server reports what is in its memory: tensors that it may have joined, padded, split over devices, quantised or
converted. So while its weights are still known, we find which digests match tensors in the files. These tensors are the
*witnesses*: after each later update their digests must be those of the new files. What is joined or split has none. A
small model has all its other tensors as witnesses. A large one has its small tensors, such as norms, and of each larger
kind the first layer's.

Digests are found by trying: SHA-256 (vLLM; SGLang on a CPU: its first 8 bytes), and SGLang's own on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from spot_async.base.text import first_line
from spot_async.errors import DataError, PoisonedReplyError, RequestError
from spot_async.models.weight_files import Header, file_headers, names_in_model, weight_files
from spot_async.types import WeightSnapshot

SMALL_BYTES = 32 << 20  # of the small tensors together
LARGEST_BYTES = 128 << 20  # a larger tensor is no witness
ALIKE = re.compile(r"\d+")  # tensors whose names differ in numbers alone are of one kind

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Digest: TypeAlias = Callable[[Bytes], str]
Ask: TypeAlias = Callable[[float], Awaitable[Mapping[str, str]]]  # by a deadline: of all tensors, or the witnesses


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    header: Header

    def read(self, dtype: str) -> Bytes | None:
        """Return the tensor's bytes as numbers of a type, or None if they cannot be converted to it."""
        with self.path.open("rb") as file:
            file.seek(self.header.begin)
            data = np.frombuffer(file.read(self.header.size_bytes), np.uint8)
        if dtype == self.header.dtype:
            return data
        if (self.header.dtype, dtype) == ("BF16", "F32"):
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
        if (self.header.dtype, dtype) == ("F32", "BF16"):  # to the nearest, and to the even one between two
            words = data.view(np.uint32)
            return ((words + ((words >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16).view(np.uint8)
        return None


class Witness(NamedTuple):
    """How a server reports a tensor."""

    name: str  # in the model
    dtype: str
    digest: Digest


class Witnesses:
    """Those of one server. Reports have digests by names, which end with `:` and a tensor's name."""

    def __init__(self, server: str, ask: Ask) -> None:
        self._server = server
        self._ask = ask
        self._known: dict[str, Witness] | None = None  # by the report's names; None: not looked at

    @property
    def are_there(self) -> bool | None:
        """Whether later updates are checked; None: not known yet."""
        return None if self._known is None else bool(self._known)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.name for each in (self._known or {}).values())

    def have_none(self, reason: str) -> None:
        """Note, and say once, that this server is not checked."""
        self._known = {}
        structlog.get_logger().warning("what the server has loaded is not checked", server=self._server, reason=reason)

    async def learn(self, directory: Path, *, deadline: float) -> None:
        """Find the witnesses of a server that holds the weights of `directory`, in a report of all tensors."""
        try:
            report = await self._ask(deadline)
        except RequestError as error:
            self.have_none(first_line(error))
            return
        self._known = await asyncio.to_thread(lambda: dict(_found(report, directory)))
        if not self._known:
            self.have_none("none of the digests that it reports is that of a tensor in the files")

    async def check(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Raise `PoisonedReplyError`, in one line, unless the server holds the weights of `snapshot`.

        The first report of a server that was running already only tells which tensors can be witnesses.
        """
        if self._known is None:
            await self.learn(Path(snapshot.directory), deadline=deadline)
        elif self._known:
            report = await self._ask(deadline)
            await asyncio.to_thread(self._compare, report, snapshot)

    def _compare(self, report: Mapping[str, str], snapshot: WeightSnapshot) -> None:
        known = self._known or {}
        wrong = list(self._wrong(report, Path(snapshot.directory)))
        if wrong:
            raise PoisonedReplyError(
                f"{self._server}: does not hold weights {snapshot.version} after loading them: {len(wrong)} of "
                f"{len(known)} tensors that it reports on are not those of {snapshot.directory} (the first: "
                f"{wrong[0]}): look whether it sees that directory, and whether something else writes there"
            )

    def _wrong(self, report: Mapping[str, str], directory: Path) -> Iterator[str]:
        known = self._known or {}
        stored = _in_model(_stored(directory), self.names)
        for key, (name, dtype, digest) in sorted(known.items()):
            data = stored[name].read(dtype) if name in stored else None
            if data is not None and digest(data) != report.get(key):
                yield name


def file_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of the tensors that would be witnesses if a server had all of them as they are in the files.

    Of a directory that cannot be read here there are none: the server says what is wrong with it.
    """
    with contextlib.suppress(DataError):
        chosen = _chosen(_stored(directory))
        return {name: sha256(data) for name, each in chosen if (data := each.read(each.header.dtype)) is not None}
    return {}


def _found(report: Mapping[str, str], directory: Path) -> Iterator[tuple[str, Witness]]:
    """Yield which names of a report are witnesses."""
    keys: dict[str, list[str]] = {}
    for key in report:
        keys.setdefault(key.rpartition(":")[2], []).append(key)
    for name, tensor in _chosen(_in_model(_stored(directory), keys.keys())):
        for dtype in dict.fromkeys((tensor.header.dtype, "F32", "BF16")):
            data = tensor.read(dtype)
            if data is None:
                continue
            digests = {digest(data): digest for digest in (sha256, sha256_begin, sglang_on_gpu)}
            for key in keys[name]:
                if (digest := digests.get(report[key])) is not None:
                    yield key, Witness(name, dtype, digest)


def _chosen(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the small tensors, and the first of each larger kind."""
    kinds: set[str] = set()
    total = 0
    for name, tensor in sorted(stored.items(), key=lambda each: (each[1].header.size_bytes, len(each[0]), each[0])):
        total += tensor.header.size_bytes
        kind = ALIKE.sub("#", name)
        if total <= SMALL_BYTES or (kind not in kinds and tensor.header.size_bytes <= LARGEST_BYTES):
            kinds.add(kind)
            yield name, tensor


def _stored(directory: Path) -> dict[str, StoredTensor]:
    """Return where a directory's files have its tensors. Raises `DataError`."""
    files = weight_files(directory)
    return {name: StoredTensor(path, header) for path in files for name, header in file_headers(path).items()}


def _in_model(stored: Mapping[str, StoredTensor], names: Collection[str]) -> dict[str, StoredTensor]:
    """Return those of the tensors that a model with these names has."""
    found = names_in_model(stored, names)
    return {name: stored[found[name]] for name in names if name in found}


def sha256(data: Bytes) -> str:
    return hashlib.sha256(data.data).hexdigest()


def sha256_begin(data: Bytes) -> str:
    return sha256(data)[:16]


# SGLang's `gpu_tensor_hash`: MurmurHash3's finaliser of each 32-bit word and its place, twice, summed over tiles.
SEED = 0x243F6A88
SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor and rotation
TILE_WORDS = 8192


def sglang_on_gpu(data: Bytes) -> str:
    words = np.concatenate([data, np.zeros(-len(data) % 4, np.uint8)]).view(np.uint32)
    total = 0
    for begin in range(0, len(words), TILE_WORDS):
        tile = words[begin : begin + TILE_WORDS]
        places = np.arange(begin, begin + len(tile), dtype=np.uint32)
        high, low = (
            _finalised(tile ^ _place(places, seed, *mixing)) for seed, mixing in zip(SEEDS, PLACES, strict=True)
        )
        sums = np.array([high.sum(dtype=np.uint64), low.sum(dtype=np.uint64)]).astype(np.uint32)
        first, second = _finalised(sums ^ np.uint32(4 * len(words) & 0xFFFFFFFF)).tolist()
        total += (first << 32) | second
    mask = (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):  # splitmix64's finaliser
        total &= mask
        total = (total ^ (total >> shift)) * factor
    return f"{total & mask:016x}"


def _place(places: Words, seed: int, factor: int, rotation: int) -> Words:
    rotated = (places << np.uint32(rotation)) | (places >> np.uint32(32 - rotation))
    return (places * np.uint32(factor) + np.uint32(seed)) ^ rotated


def _finalised(words: Words) -> Words:
    words = words ^ (words >> np.uint32(16))
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0xC2B2AE35)
    words ^= words >> np.uint32(16)
    return words
