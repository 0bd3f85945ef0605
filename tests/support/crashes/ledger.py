"""Keeps real SQLite files on a `CrashingDisk`: what a kill and a power cut leave of them.

SQLite flushes its log of writes where it is told to. Behind its last flush the log may be cut at any byte, and SQLite's
own recovery reads what is left.
"""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path
from typing import Any, Protocol

SQLITE_LOG = "-wal"  # behind the name of a ledger: the log of its writes


class Disk(Protocol):
    is_frozen: bool

    def change(self, *, grows: bool = False) -> None: ...


class LedgerFiles:
    """An SQLite file and its log of writes."""

    def __init__(self, path: Path) -> None:
        self._files = path, path.with_name(f"{path.name}{SQLITE_LOG}")
        self._flushed_bytes = 0  # of the log
        self._held: tuple[bytes | None, ...] | None = None  # what they were at a crash

    def flushed(self) -> None:
        self._flushed_bytes = self._files[1].stat().st_size

    def emptied(self) -> None:
        self._flushed_bytes = 0

    def hold(self) -> None:
        self._held = tuple(each.read_bytes() if each.exists() else None for each in self._files)

    def restore(self, power: random.Random | None) -> None:
        """Bring back what was there at a crash. `power` decides what a power cut leaves of it."""
        if self._held is None or not self._files[0].parent.is_dir():
            self._held = None
            return
        for path, contents in zip(self._files, self._held, strict=True):
            path.unlink(missing_ok=True)
            if contents is not None:
                path.write_bytes(contents)
        log, held = self._files[1], self._held[1]
        self._held = None
        if power is not None and held is not None:
            flushed = min(self._flushed_bytes, len(held))
            os.truncate(log, power.choice([flushed, len(held), power.randint(flushed, len(held))]))


class LedgerConnection(sqlite3.Connection):
    """An open ledger. Each statement is a change of the disk."""

    def __init__(self, disk: Disk, ledger: LedgerFiles, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._disk = disk
        self._ledger = ledger
        self._flushes = False

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._change(statement)
        done = super().execute(statement, *values)
        if statement.startswith("pragma synchronous") and not self.in_transaction:
            self._flushes = statement.endswith("full")
        elif self._flushes and not self.in_transaction:
            self._ledger.flushed()
        return done

    def executemany(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._change(statement)
        return super().executemany(statement, *values)

    def close(self) -> None:
        super().close()
        if not self._disk.is_frozen:  # otherwise what it was at the crash comes back
            self._ledger.emptied()

    def _change(self, statement: str) -> None:
        if statement.startswith(("select", "pragma", "rollback")):
            return
        try:
            self._disk.change(grows=True)
        except OSError:
            full = sqlite3.OperationalError("database or disk is full")
            full.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise full from None
