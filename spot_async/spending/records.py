"""Says what a run spent: metrics of each iteration, its part of `summary.json`, and one line for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spot_async.spending.account import Account

# Fields that become metrics. `traffic/<role>/...` has what the others count.
METRICS = ("requests", "answered", "uncounted", "money", "unknown", "unknown_tokens", "unknown_money")


class SpendingMetrics:
    """Makes the metrics `spending/<role>/...` of an iteration, for accounts with prices or budgets."""

    def __init__(self, accounts: Mapping[str, Account]) -> None:
        self._accounts = metered(accounts)
        self._last = {role: account.total for role, account in self._accounts.items()}

    def take(self) -> dict[str, float]:
        """Return the metrics of the time since the last call."""
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
    """Return a part of `summary.json`: by role, what was spent in all and at each endpoint."""
    return {
        role: msgspec.structs.asdict(account.total)
        | {
            "currency": account.currency,
            "budget": account.budget,
            "token_budget": account.token_budget,
            "servers": {name: msgspec.structs.asdict(spending) for name, spending in account.spending.items()},
        }
        for role, account in metered(accounts).items()
    }


def spending_words(spent: Mapping[str, Any]) -> str:
    """Return one line for people about a role's part of `summarize_spending`."""
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
