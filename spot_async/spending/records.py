"""What a run spent, in its files: per iteration, at its end, and as one line for people.

`spending.jsonl` has a row for each endpoint of each account, cumulative, written after every iteration, after the start
and every RESPONSES of an evaluation by itself, and when the run ends, however it does: what was spent is known after a
kill, but for what came since.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from spot_async.errors import DataError, RequestError
from spot_async.orchestrator import IterationResult
from spot_async.run_directory import RunDirectory
from spot_async.spending.account import FREE, Account, SpendingLedger
from spot_async.text import first_line
from spot_async.types import Prompt

FILE = "spending.jsonl"
RESPONSES = 64  # between two rows of an evaluation by itself
# Of `SpendingLedger`, what is written to metrics.jsonl: the rest is in `traffic/<role>/...`.
METRICS = ("requests", "answered", "uncounted", "money", "unknown", "unknown_tokens", "unknown_money")


class _Row(SpendingLedger, kw_only=True):
    role: str
    server: str
    currency: str = FREE.currency


class SpendingLog:
    """`RunObserver` that keeps `spending.jsonl`."""

    def __init__(self, directory: RunDirectory, accounts: Mapping[str, Account]) -> None:
        self._directory = directory
        self._accounts = metered(accounts)

    def iteration_finished(self, result: IterationResult) -> None:
        self.write(result.iteration)

    def prompt_died(self, prompt: Prompt, error: RequestError) -> None:
        pass

    def response_judged(self, finished: int, total: int) -> None:
        """Told of every judged response of an evaluation by itself."""
        if finished % RESPONSES == 0:
            self.write(0)

    def go_on(self) -> None:
        """Continue the figures of a run that was stopped. Raises DataError for a damaged file."""
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
                    f"{path}:{number}: cannot go on with this ledger: {first_line(error)}: restore or remove it"
                ) from None
            if row.role in self._accounts:
                if row.money and row.currency != (now := self._accounts[row.role].currency):
                    raise DataError(
                        f"{path}:{number}: {row.money:g} {row.currency} are spent, and {row.role}.backend.prices are "
                        f"in {now} now: set currency back, or begin in another run.directory"
                    )
                found = {name: getattr(row, name) for name in SpendingLedger.__struct_fields__}
                self._accounts[row.role].ledgers[row.server] = SpendingLedger(**found)

    def write(self, iteration: int | None = None) -> None:
        """Write a row for each endpoint; an iteration of None stands for the end of the run."""
        rows = [
            {"time": time.time(), "iteration": iteration, "role": role, "server": server}
            | msgspec.structs.asdict(ledger)
            | {"currency": account.currency}
            for role, account in self._accounts.items()
            for server, ledger in account.ledgers.items()
        ]
        if rows:
            self._directory.append(FILE, rows)


class SpendingMetrics:
    """`spending/<role>/...` of an iteration, for accounts with prices or budgets."""

    def __init__(self, accounts: Mapping[str, Account]) -> None:
        self._accounts = metered(accounts)
        self._last = {role: account.total for role, account in self._accounts.items()}

    def take(self) -> dict[str, float]:
        """The metrics since they were last taken."""
        metrics: dict[str, float] = {}
        for role, account in self._accounts.items():
            now, last = account.total, self._last[role]
            self._last[role] = now
            for name in METRICS:
                metrics[f"spending/{role}/{name}"] = float(getattr(now, name) - getattr(last, name))
            metrics[f"spending/{role}/total_money"] = now.money
        return metrics


def metered(accounts: Mapping[str, Account]) -> dict[str, Account]:
    return {role: account for role, account in accounts.items() if account.is_metered}


def summarize_spending(accounts: Mapping[str, Account]) -> dict[str, Any]:
    """Part of `summary.json`: by role, the whole and each endpoint's share."""
    return {
        role: msgspec.structs.asdict(account.total)
        | {
            "currency": account.currency,
            "budget": account.budget,
            "token_budget": account.token_budget,
            "servers": {name: msgspec.structs.asdict(ledger) for name, ledger in account.ledgers.items()},
        }
        for role, account in metered(accounts).items()
    }


def spending_words(spent: Mapping[str, Any]) -> str:
    """One line about a role's part of `summarize_spending`."""
    of = "" if spent["budget"] is None else f" of {spent['budget']:g}"
    cached = f" ({spent['cached_tokens']:,} of them cached)" if spent["cached_tokens"] else ""
    line = (
        f"{spent['money']:.6g}{of} {spent['currency']} for {spent['answered']:,} answers: "
        f"{spent['prompt_tokens']:,} prompt tokens{cached}, {spent['completion_tokens']:,} generated"
    )
    if spent["unknown"]:
        line += f"; up to {spent['unknown_money']:.3g} more for {spent['unknown']:,} requests that were never answered"
    if spent["uncounted"]:
        line += f"; {spent['uncounted']:,} answers did not state their tokens"
    return line
