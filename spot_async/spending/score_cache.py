"""Keeps the teacher's answers in a file, so that none is asked for twice: by an ablation, a later epoch, another run.

It is one SQLite file, written by one thread beside the event loop. A key is a hash of everything that an answer depends
on, so no entry is ever out of date. Write-ahead logging and one transaction for each entry make it safe against a kill
at any point, and let several runs share it. An entry that does not match its checksum is dropped and asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from spot_async.base import wire
from spot_async.base.files import open_regular
from spot_async.base.writers import refuse_foreign_writers
from spot_async.errors import ConfigError, DataError, ReplayMissError, StorageError

FORMAT = 1  # of keys and values
APPLICATION_ID = int.from_bytes(b"spot", "big")  # older caches have none
TABLE = "CREATE TABLE entries (key BLOB PRIMARY KEY, checksum BLOB NOT NULL, value BLOB NOT NULL)"
BUSY_TIMEOUT_S = 60.0  # the longest wait for another run that is writing
KEY_BYTES = 32

T = TypeVar("T", bound=msgspec.Struct)
Result = TypeVar("Result")


def digest(*parts: Any) -> bytes:
    """Return the key that plain values and arrays make."""
    return hashlib.blake2b(wire.encode([FORMAT, *parts]), digest_size=KEY_BYTES).digest()


@dataclass
class CacheCounters:
    """What happened since the cache was opened."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0  # entries that were dropped


class ScoreCache:
    """A file of answers; enter it before use. A missing file is created, except in a replay, where nothing may miss."""

    def __init__(self, path: Path, *, is_replay: bool = False, role: str = "teacher") -> None:
        """`role` is the teacher's, for messages."""
        self.path = path
        self.role = role
        self.is_replay = is_replay
        self.counters = CacheCounters()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score cache")
        self._connection: sqlite3.Connection

    async def __aenter__(self) -> Self:
        await self._run(self._open)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with contextlib.suppress(StorageError):  # every entry is already on disk, so a failing close loses nothing
            await self._run(lambda: self._connection.close())
        self._thread.shutdown()

    @property
    def size_bytes(self) -> int:
        """The size of the cache's files."""
        names = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(each.stat().st_size for each in names if each.exists())

    async def fetch(self, key: bytes, kind: type[T], ask: Callable[[], Awaitable[T]], *, what: str) -> T:
        """Return the entry of `key`. If there is none, return what `ask` gives, and keep it.

        `what` names the entry in messages. Raises `ReplayMissError` for a missing entry of a replay, and `StorageError`
        when an answer cannot be kept.
        """
        found = await self.get(key, kind)
        if found is not None:
            self.counters.hits += 1
            return found
        self.counters.misses += 1
        if self.is_replay:
            raise ReplayMissError(
                f"{self.role}.replay: {self.path} has no answer about {what}: it was made by a run with other "
                f"settings, or by one that sampled otherwise; set {self.role}.replay=false to ask the teacher"
            )
        asked = await ask()
        await self.put(key, asked)
        return asked

    async def get(self, key: bytes, kind: type[T]) -> T | None:
        """Return the entry of `key`; None if there is none. A damaged entry is dropped and counts as none."""
        return await self._run(lambda: self._read(key, kind))

    async def put(self, key: bytes, value: msgspec.Struct) -> None:
        """Keep `value` under `key`, in place of an entry that is there."""
        await self._run(lambda: self._write(key, wire.encode(value)))

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the cache's thread, and return its result.

        A caller that is cancelled still waits for it: the thread cannot be stopped, and must not outlive the cache.
        """
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()
            raise
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"{self.role}.cache: {self.path}: {error}") from None

    def _open(self) -> None:
        if self.is_replay and not self.path.exists():
            raise ConfigError(
                f"{self.role}.replay: there is no {self.path}: run once with {self.role}.cache and without replay"
            )
        # Its answers are trained on, so nobody else may write them, nor the logs that SQLite reads them from.
        refuse_foreign_writers(self.path.with_name(f"{self.path.name}{end}") for end in ("", "-wal", "-shm"))
        try:
            if not self.path.exists():
                self._create()
            open_regular(self.path).close()
            self._connection = self._connect(self.path)
        except (sqlite3.Error, OSError) as error:
            raise DataError(
                f"teacher.cache: cannot use {self.path}: {error}; give another file in a directory that is there"
            ) from None

    def _create(self) -> None:
        """Make an empty cache elsewhere and link it to the path.

        Two runs that both created it in its place would find it locked by each other.
        """
        fresh = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            self._connect(fresh).close()
            # Another run was first, or the file system has no links. `_open` connects to whatever is there.
            with contextlib.suppress(OSError):
                os.link(fresh, self.path)
        finally:
            fresh.unlink(missing_ok=True)

    def _connect(self, path: Path) -> sqlite3.Connection:
        """Connect to a cache, or to an empty file, which becomes one. A replay writes nothing.

        Raises DataError for another database, and for a cache with more than its table: a view might never end.
        """
        # Where nothing can be written, SQLite cannot share the file with a run that writes to it.
        mode = "rwc" if not self.is_replay else "ro" if os.access(path.parent, os.W_OK) else "ro&immutable=1"
        address = f"{path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        (made_by,) = connection.execute("PRAGMA application_id").fetchone()
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        content = connection.execute("SELECT sql FROM sqlite_master WHERE name NOT GLOB 'sqlite_*'").fetchall()
        if made_by not in (0, APPLICATION_ID) or content not in ([], [(TABLE,)]):
            raise DataError(f"{self.role}.cache: {path} is no cache of spot-async, or was changed: give another file")
        if found not in (0, FORMAT):
            raise DataError(f"{self.role}.cache: {path} has format {found}, this version reads {FORMAT}")
        if not self.is_replay:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(TABLE.replace("TABLE", "TABLE IF NOT EXISTS"))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        return connection

    def _read(self, key: bytes, kind: type[T]) -> T | None:
        row = self._connection.execute("SELECT checksum, value FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        checksum, value = row
        if checksum == _checksum(key, value):
            with contextlib.suppress(msgspec.DecodeError, ValueError, TypeError):
                return wire.decode(value, kind)
        self.counters.corrupt += 1
        if not self.is_replay:
            self._connection.execute("DELETE FROM entries WHERE key = ? AND checksum = ?", (key, checksum))
        return None

    def _write(self, key: bytes, value: bytes) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO entries (key, checksum, value) VALUES (?, ?, ?)",
            (key, _checksum(key, value), value),
        )


def _checksum(key: bytes, value: bytes) -> bytes:
    """Return a checksum of value and key together: an entry under another's key is as wrong as a damaged one."""
    return hashlib.blake2b(key + value, digest_size=16).digest()
