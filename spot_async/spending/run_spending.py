"""What a run spends and what it saves: the accounts of its roles, and the caches of its teachers' answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from spot_async.config import ModelConfig, PluginSettings, teacher_name
from spot_async.spending.account import Account
from spot_async.spending.score_cache import CacheCounters, ScoreCache
from spot_async.spending.teacher_cache import KeptScores, ReplayedTeacher, TeacherCache
from spot_async.types import Capabilities

# Fields that become metrics. `traffic/<role>/...` has what the others count.
METRICS = ("requests", "answered", "uncounted", "money", "unknown", "unknown_tokens", "unknown_money")


class RunSpending:
    """The accounts and the teachers' caches of one run. `served` has the models by role, and so are the caches.

    It is made before the backends, which charge the `accounts`, and so does the `verifier` where it asks a server.
    """

    def __init__(
        self,
        served: Mapping[str, ModelConfig],
        teacher_caches: Mapping[str, TeacherCache] | None = None,
        verifier: PluginSettings | None = None,
    ) -> None:
        opened = {role: model.backend.open_account(role) for role, model in served.items()}
        if verifier is not None:
            opened["verifier"] = verifier.open_account("verifier")
        self.accounts: dict[str, Account] = {role: each for role, each in opened.items() if each is not None}
        self._caches = teacher_caches or {}

    @property
    def replayed_teachers(self) -> dict[str, ReplayedTeacher]:
        """The backends of teachers whose answers are replayed, by role. No server is asked for them."""
        return {role: ReplayedTeacher(each) for role, each in self._caches.items() if each.cache.is_replay}

    @property
    def resources(self) -> tuple[AbstractAsyncContextManager[Any], ...]:
        """The context managers to enter for the run. (A replayed teacher enters its cache itself.)"""
        return tuple(each for each in self._caches.values() if not each.cache.is_replay)

    async def kept_scores(self, found: Mapping[str, Capabilities]) -> dict[str, KeptScores]:
        """Return the kept scores of teachers that keep some, by role. `found`: what the servers offer, by role."""
        return {role: await each.identify(found[role]) for role, each in self._caches.items()}

    def metrics(self) -> RunSpendingMetrics:
        return RunSpendingMetrics(self.accounts, {role: each.cache for role, each in self._caches.items()})

    def summary(self) -> dict[str, Any]:
        """Return the parts of `summary.json`; nothing for a run that spends and keeps nothing."""
        spent = summarize_spending(self.accounts)
        kept = {
            cache_metrics(role): vars(each.cache.counters) | {"size_bytes": each.cache.size_bytes}
            for role, each in self._caches.items()
        }
        return ({"spending": spent} if spent else {}) | kept


def cache_metrics(role: str) -> str:
    """Return what the names of a teacher's `score_cache/...` metrics begin with: its name too, if it is of several."""
    name = teacher_name(role)
    return f"score_cache/{name}" if name else "score_cache"


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


class RunSpendingMetrics:
    """Makes the metrics `spending/<role>/...` and `score_cache/...` of an iteration.

    Accounts with prices or budgets have the former.
    """

    def __init__(self, accounts: Mapping[str, Account], caches: Mapping[str, ScoreCache]) -> None:
        self._accounts, self._caches = metered(accounts), caches
        self._last = {role: account.total for role, account in self._accounts.items()}
        self._last_of_caches = {role: CacheCounters() for role in caches}

    def take(self) -> dict[str, float]:
        """Return the metrics of the time since the last call."""
        metrics: dict[str, float] = {}
        for role, account in self._accounts.items():
            now, last = account.total, self._last[role]
            self._last[role] = now
            for name in METRICS:
                metrics[f"spending/{role}/{name}"] = float(getattr(now, name) - getattr(last, name))
            metrics[f"spending/{role}/total_money"] = now.money
        for role, cache in self._caches.items():
            counts, before = vars(cache.counters), vars(self._last_of_caches[role])
            self._last_of_caches[role] = CacheCounters(**counts)
            metrics |= {f"{cache_metrics(role)}/{name}": float(counts[name] - before[name]) for name in counts}
            metrics[f"{cache_metrics(role)}/size_bytes"] = float(cache.size_bytes)
        return metrics
