"""Keeps `ledger.sqlite`: what became of every prompt of a run, so that a run that was killed can continue.

A row is a prompt, by its ordinal. Its state is that of the admission book, with one difference: nothing here says that
a prompt is trained. That follows from the newest manifest (`manifest.py`): batches before its step are trained. So one
write commits a checkpoint, and no two files have to agree.

Each row of an ended prompt has the spending so far. So a kill loses only the spending of what was running.

Only one fact of a prompt is written once and never changed in a lineage: the number of its batch. It is on disk before
the batch is trained on. Everything else may be lost with the power, and is then done again.

SQLite takes its locks in the exclusive mode. So write-ahead logging needs no shared memory, which network file systems
do not have.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import msgspec

from spot_async.base import wire
from spot_async.base.files import check_format, open_regular
from spot_async.errors import DataError, StorageError
from spot_async.run_directory.layout import row_bytes
from spot_async.spending.account import Account, Spending
from spot_async.spending.run_spending import metered
from spot_async.types import Sample

FILE = "ledger.sqlite"
# 2: a sum of pulls and targets; 3: targets with baselines; 4: a bonus; 5: notes, accuracy, chunks; 6: tokens only read
FORMAT = 6
MAX_CELL_BYTES, MAX_COPIED_BYTES = 1 << 20, 4 << 30  # of what is read only: of a prompt's row, and of a whole file
PLAIN_TABLE = re.compile(r"create table prompts \([^()]*\)", re.IGNORECASE)  # no view, no column that is computed
NAMED = 5  # ordinals that a line about prompts names
STATES = {True: "batched", False: "left_out", None: "in_vain"}  # of prompts in a batch, by whether they are trained on
TABLES = """
create table if not exists about (name text primary key, value integer not null) without rowid;
create table if not exists prompts (
    ordinal integer primary key,
    problem text not null,
    attempt integer not null,  -- how often it was begun
    state text not null,  -- running, queued, batched, left_out, in_vain, dead, unpaid
    reason text,  -- of dead ones, and of those that there was no money for at first
    batch integer,  -- the first one is 0
    lineage integer,  -- of the weights that the batch made
    samples blob,  -- of queued and batched ones
    accuracy text  -- JSON: of what the student wrote, as metrics
);
create table if not exists spending (
    role text not null,
    server text not null,
    settled text not null,  -- JSON: of the requests that have ended
    in_flight text not null,  -- JSON: the worst case of those that have not
    primary key (role, server)
) without rowid;
"""


class PromptRow(NamedTuple):
    """What the ledger says of a prompt. Its samples are asked for one by one."""

    ordinal: int
    problem_id: str
    attempt: int
    state: str
    reason: str | None
    batch: int | None
    lineage: int | None


class SpendingRow(NamedTuple):
    """What was sent to a server of a role when a prompt last ended."""

    role: str
    server: str
    settled: Spending
    in_flight: Spending


class _Kept(msgspec.Struct, frozen=True):
    """A sample as it is kept. Arrays of its record, which only people read, have become lists."""

    sample: Sample  # with no record
    record: bytes  # JSON


class Ledger:
    """An open ledger. Close it at the end. Every method is one transaction, and raises StorageError if it fails."""

    def __init__(self, connection: sqlite3.Connection, path: Path, accounts: Mapping[str, Account]) -> None:
        self._connection = connection
        self._path = path
        self._accounts = accounts

    @classmethod
    def open(cls, directory: Path, accounts: Mapping[str, Account] | None = None) -> Self:
        """Open the ledger of a run directory, and make it if there is none.

        What is spent on the `accounts`, by role, is kept with each prompt that ends.

        Raises DataError for one that another process holds, that is damaged, or that a newer program wrote.
        """
        path = directory / FILE
        try:
            connection = sqlite3.connect(path, timeout=0.0, isolation_level=None)
        except sqlite3.Error as error:
            raise DataError(f"{path}: cannot be opened: {error}") from None
        try:
            connection.execute("pragma locking_mode = exclusive")  # before the next line, or that makes shared memory
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = normal")
            connection.executescript(TABLES)
            connection.execute("insert or ignore into about values ('format', ?)", (FORMAT,))
            (found,) = connection.execute("select value from about where name = 'format'").fetchone()
        except sqlite3.Error as error:
            connection.close()
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise DataError(f"{path} is in use by another process: wait for its end, or stop it first") from None
            raise DataError(f"{path}: cannot be read: {error}") from None
        if found != FORMAT:
            connection.close()
            check_format(path, found, FORMAT, continues=True)
        return cls(connection, path, metered(accounts or {}))

    @classmethod
    @contextmanager
    def read_only(cls, directory: Path) -> Iterator[Self]:
        """Open the ledger of a run directory, of anybody's run, to read it. Nothing in the directory is written.

        To read what is in the write-ahead log only, SQLite would write, so it gets a copy. Raises DataError for one
        that cannot be read, or whose rows would be computed while they are read.
        """
        path, log = directory / FILE, directory / f"{FILE}-wal"
        try:
            with ExitStack() as stack:
                if log.exists() and log.stat().st_size:
                    place = Path(stack.enter_context(TemporaryDirectory(prefix="spot-async-")))
                    for each in (path, log):
                        _copy(each, place / each.name)
                    address = (place / FILE).as_uri()
                else:
                    open_regular(path).close()
                    address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
                connection = stack.enter_context(closing(sqlite3.connect(address, uri=True, isolation_level=None)))
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
                connection.execute("pragma trusted_schema = off")
                made_by = connection.execute("select sql from sqlite_master where name = 'prompts'").fetchone()
                if made_by is None or not PLAIN_TABLE.fullmatch(str(made_by[0])):
                    raise DataError(f"{path}: is no ledger of spot-async")
                (found,) = connection.execute("select value from about where name = 'format'").fetchone() or (None,)
                check_format(path, found, FORMAT)
                yield cls(connection, path, {})
        except (sqlite3.Error, StorageError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None

    def close(self) -> None:
        self._connection.close()

    # What happens to prompts

    def admit(self, ordinal: int, problem_id: str) -> None:
        """Note that a prompt is begun, for the first time or once more.

        Of one that there was no money for the reason is kept: it comes behind prompts that were admitted after it.
        """
        self._do(
            "insert into prompts (ordinal, problem, attempt, state) values (?, ?, 1, 'running') "
            "on conflict do update set attempt = attempt + 1, state = 'running', samples = null, "
            "reason = case state when 'dead' then null else reason end",
            (ordinal, problem_id),
        )

    def finish(self, ordinal: int, samples: Sequence[Sample], accuracy: Mapping[str, float]) -> None:
        """Keep a prompt's samples, which wait for their batch, and how much of what the student wrote was right."""
        kept = [_Kept(msgspec.structs.replace(each, record={}), row_bytes(each.record)) for each in samples]
        statement = "update prompts set state = 'queued', samples = ?, accuracy = ? where ordinal = ?"
        self._end(statement, (wire.encode(kept), msgspec.json.encode(accuracy).decode(), ordinal))

    def give_up(self, ordinal: int, state: str, reason: str) -> None:
        """Note that a prompt is dead, or that there was no money for it."""
        statement = "update prompts set state = ?, reason = ?, samples = null where ordinal = ?"
        self._end(statement, (state, reason, ordinal))

    def cut(self, batch: int, lineage: int, prompts: Mapping[int, bool | None]) -> None:
        """Note which prompts make a batch, and whether any of its samples is trained on.

        None: the prompt taught nothing and lies in the batch, which others fill.

        It is on disk when this returns, also after a power cut.
        """
        with self._transaction("pragma synchronous = full"):
            self._connection.executemany(
                "update prompts set state = ?, batch = ?, lineage = ? where ordinal = ?",
                [(STATES[is_trained], batch, lineage, ordinal) for ordinal, is_trained in prompts.items()],
            )

    def forget_samples(self, step: int) -> None:
        """Delete the samples of batches before `step`, once a manifest of that step is written."""
        self._do("update prompts set samples = null where batch < ? and samples is not null", (step,))

    def roll_back(self, step: int) -> None:
        """Go back to a manifest's step: batches from there on were never cut, and what ran is not running."""
        with self._transaction():
            self._connection.execute(
                "update prompts set state = 'queued', batch = null, lineage = null where batch >= ?", (step,)
            )
            self._connection.execute("update prompts set state = 'lost' where state = 'running'")

    def drop_samples(self, ordinals: Iterable[int]) -> None:
        """Delete the samples of prompts that a run that continues supervises once more."""
        with self._transaction():
            self._connection.executemany(
                "update prompts set state = 'lost', samples = null where ordinal = ?", [(each,) for each in ordinals]
            )

    # What it says

    def prompts(self) -> Iterator[PromptRow]:
        """Return all prompts in the order of their ordinals."""
        with self._failing():
            for row in self._connection.execute(
                "select ordinal, problem, attempt, state, reason, batch, lineage from prompts order by ordinal"
            ):
                yield msgspec.convert(row, PromptRow)  # SQLite keeps a text in a column of integers

    def samples(self, ordinal: int) -> list[Sample] | None:
        """Return the samples that are kept of a prompt; None if none are, or they cannot be read any more."""
        with self._failing():
            row = self._connection.execute("select samples from prompts where ordinal = ?", (ordinal,)).fetchone()
        if row is None or row[0] is None:
            return None
        try:
            kept = wire.decode(row[0], list[_Kept])
            return [msgspec.structs.replace(each.sample, record=msgspec.json.decode(each.record)) for each in kept]
        except (msgspec.MsgspecError, ValueError):
            return None

    def accuracy(self, ordinal: int) -> dict[str, float]:
        """Return the metrics that `finish` was given of a prompt."""
        with self._failing():
            (text,) = self._connection.execute("select accuracy from prompts where ordinal = ?", (ordinal,)).fetchone()
        return msgspec.json.decode(text, type=dict[str, float])

    def spending(self) -> list[SpendingRow]:
        """Return what was spent, as it was when a prompt last ended."""
        with self._failing():
            rows = self._connection.execute("select role, server, settled, in_flight from spending").fetchall()
        return [
            SpendingRow(role, server, *(msgspec.json.decode(each, type=Spending) for each in amounts))
            for role, server, *amounts in rows
        ]

    def _end(self, statement: str, values: Sequence[Any]) -> None:
        """Note the end of a prompt, and what was spent until then."""
        with self._transaction():
            self._connection.execute(statement, values)
            for role, account in self._accounts.items():
                in_flight = account.in_flight
                for server, settled in account.spending.items():
                    amounts = [msgspec.json.encode(each).decode() for each in (settled, in_flight[server])]
                    self._connection.execute(
                        "insert or replace into spending values (?, ?, ?, ?)", (role, server, *amounts)
                    )

    def _do(self, statement: str, values: Sequence[Any]) -> None:
        with self._failing():
            self._connection.execute(statement, values)

    @contextmanager
    def _transaction(self, pragma: str = "pragma synchronous = normal") -> Iterator[None]:
        with self._failing():
            self._connection.execute(pragma)
            try:
                self._connection.execute("begin immediate")
                yield
                self._connection.execute("commit")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                raise
            finally:
                self._connection.execute("pragma synchronous = normal")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(f"cannot write {self._path}: {error}") from None
        except msgspec.ValidationError as error:
            raise DataError(f"{self._path}: cannot be read: {error}") from None


def _copy(path: Path, copy: Path) -> None:
    """Copy a file for `read_only`. Raises OSError, also for what is no regular file."""
    with open_regular(path) as source, copy.open("xb") as target:
        if os.fstat(source.fileno()).st_size > MAX_COPIED_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_COPIED_BYTES:,} bytes")
        shutil.copyfileobj(source, target)


def state_of(row: PromptRow, step: int) -> str:
    """Return a prompt's state at a checkpoint."""
    if row.batch is not None and row.batch < step:
        return {"left_out": "left out", "in_vain": "in vain"}.get(row.state, "trained")
    return row.state if row.state in ("dead", "unpaid") else "pending"


def batch_faults(rows: Sequence[PromptRow], step: int, batch_size: int) -> Iterator[str]:
    """Yield what is wrong with the batches before a step: too few or too many prompts, or prompts passed over.

    Those that taught nothing and were refilled for lie between the prompts of a batch, and do not count in its size.

    A prompt that there was no money for at first is not passed over: later ones may well be trained before it.
    """
    sizes = Counter(row.batch for row in rows if row.batch is not None and row.batch < step and row.state != "in_vain")
    for batch in range(step):
        if sizes[batch] != batch_size:
            yield f"batch {batch + 1} has {sizes[batch]} prompts in place of {batch_size}"
    last = max((row.ordinal for row in rows if row.batch is not None and row.batch < step), default=-1)
    passed = [
        row.ordinal for row in rows if row.ordinal <= last and state_of(row, step) == "pending" and row.reason is None
    ]
    known = {row.ordinal for row in rows if row.ordinal <= last}
    lost = itertools.islice((ordinal for ordinal in range(last + 1) if ordinal not in known), NAMED)
    for what, count, ordinals in (
        ("were passed over", len(passed), passed[:NAMED]),
        ("are in no ledger", last + 1 - len(known), lost),
    ):
        if count > 0:
            yield f"{count} prompts {what}: {', '.join(map(str, ordinals))}"
