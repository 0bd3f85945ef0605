"""Writes `spending.jsonl`: what a run was billed so far, by endpoint.

Rows are cumulative, one for each endpoint of each account. They are written after the start, after every iteration,
after every `RESPONSES` of a stand-alone evaluation, and when the run ends, however it ends. A training run's ledger has
newer counts, so after a kill only what was running is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

import msgspec

from spot_async.base.events import Event
from spot_async.base.text import first_line
from spot_async.errors import DataError
from spot_async.loop.events import IterationFinished, ResponseJudged
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import SpendingRow
from spot_async.spending.account import FREE, Account, Spending
from spot_async.spending.records import metered

FILE = "spending.jsonl"
RESPONSES = 64  # between two rows of a stand-alone evaluation


class _Row(Spending, kw_only=True):
    role: str
    server: str
    currency: str = FREE.currency


class SpendingLog:
    """The listener that keeps `spending.jsonl`."""

    def __init__(self, directory: RunDirectory, accounts: Mapping[str, Account], *, trains: bool = True) -> None:
        """`trains`: whether it is a training run, and not a stand-alone evaluation."""
        self._trains = trains
        self._directory = directory
        self._accounts = metered(accounts)

    def on(self, event: Event) -> None:
        match event:
            case IterationFinished(iteration=iteration):
                self.write(iteration)
            case ResponseJudged(finished=finished) if not self._trains and finished % RESPONSES == 0:
                self.write(0)

    def go_on(self, kept: Iterable[SpendingRow] = ()) -> None:
        """Continue the counts of a run that was stopped. Raises DataError for a damaged file.

        `kept` is what the ledger has. Where it is newer, what was under way then counts as sent and never answered.
        """
        path = self._directory.path / FILE
        data = path.read_bytes() if self._accounts and path.exists() else b""
        whole_bytes = data.rfind(b"\n") + 1
        if whole_bytes < len(data):  # a torn last line
            os.truncate(path, whole_bytes)
        for number, line in enumerate(data[:whole_bytes].splitlines(), start=1):
            try:
                row = msgspec.json.decode(line, type=_Row)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{path}:{number}: cannot go on with this file: {first_line(error)}: restore or remove it"
                ) from None
            if row.role in self._accounts:
                if row.money and row.currency != (now := self._accounts[row.role].currency):
                    raise DataError(
                        f"{path}:{number}: {row.money:g} {row.currency} are spent, and {row.role}.backend.prices are "
                        f"in {now} now: set currency back, or begin in another run.directory"
                    )
                found = {name: getattr(row, name) for name in Spending.__struct_fields__}
                self._accounts[row.role].spending[row.server] = Spending(**found)
        for role, server, settled, in_flight in kept:
            if role in self._accounts:
                counted = self._accounts[role].spending.get(server, Spending())
                if settled.requests >= counted.requests:
                    settled.add(in_flight)
                    self._accounts[role].spending[server] = settled

    def write(self, iteration: int | None = None) -> None:
        """Write a row for each endpoint. An iteration of None stands for the end of the run."""
        rows = [
            {"time": time.time(), "iteration": iteration, "role": role, "server": server}
            | msgspec.structs.asdict(spending)
            | {"currency": account.currency}
            for role, account in self._accounts.items()
            for server, spending in account.spending.items()
        ]
        if rows:
            self._directory.append(FILE, rows)
