"""What a run spends and what it saves: the accounts of its roles, and the cache of its teacher's scores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from spot_async.config import ModelConfig, PluginSettings
from spot_async.spending.account import Account
from spot_async.spending.score_cache import CacheCounters, ScoreCache
from spot_async.spending.teacher_cache import KeptScores, ReplayedTeacher, TeacherCache
from spot_async.types import Capabilities

# Fields that become metrics. `traffic/<role>/...` has what the others count.
METRICS = ("requests", "answered", "uncounted", "money", "unknown", "unknown_tokens", "unknown_money")


class RunSpending:
    """The accounts and the teacher's cache of one run. `served` has the models by role.

    It is made before the backends, which charge the `accounts`, and so does the `verifier` where it asks a server.
    """

    def __init__(
        self,
        served: Mapping[str, ModelConfig],
        teacher_cache: TeacherCache | None = None,
        verifier: PluginSettings | None = None,
    ) -> None:
        opened = {role: model.backend.open_account(role) for role, model in served.items()}
        if verifier is not None:
            opened["verifier"] = verifier.open_account("verifier")
        self.accounts: dict[str, Account] = {role: each for role, each in opened.items() if each is not None}
        self.teacher_cache = teacher_cache

    @property
    def replayed_teacher(self) -> ReplayedTeacher | None:
        """The teacher's backend in a replay, where no server is asked; None outside replays."""
        cache = self.teacher_cache
        return ReplayedTeacher(cache) if cache is not None and cache.cache.is_replay else None

    @property
    def resources(self) -> tuple[AbstractAsyncContextManager[Any], ...]:
        """The context managers to enter for the run. (A replayed teacher enters its cache itself.)"""
        cache = self.teacher_cache
        return () if cache is None or cache.cache.is_replay else (cache,)

    async def kept_scores(self, found: Mapping[str, Capabilities]) -> KeptScores | None:
        """Return the teacher's kept scores; None if none are kept. `found`: what the servers offer, by role."""
        return None if self.teacher_cache is None else await self.teacher_cache.identify(found["teacher"])

    def metrics(self) -> RunSpendingMetrics:
        return RunSpendingMetrics(self.accounts, None if self.teacher_cache is None else self.teacher_cache.cache)

    def summary(self) -> dict[str, Any]:
        """Return the parts of `summary.json`; nothing for a run that spends and keeps nothing."""
        spent = summarize_spending(self.accounts)
        cache = None if self.teacher_cache is None else self.teacher_cache.cache
        kept = {} if cache is None else {"score_cache": vars(cache.counters) | {"size_bytes": cache.size_bytes}}
        return ({"spending": spent} if spent else {}) | kept


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

    def __init__(self, accounts: Mapping[str, Account], cache: ScoreCache | None) -> None:
        self._accounts, self._cache = metered(accounts), cache
        self._last = {role: account.total for role, account in self._accounts.items()}
        self._last_of_cache = CacheCounters()

    def take(self) -> dict[str, float]:
        """Return the metrics of the time since the last call."""
        metrics: dict[str, float] = {}
        for role, account in self._accounts.items():
            now, last = account.total, self._last[role]
            self._last[role] = now
            for name in METRICS:
                metrics[f"spending/{role}/{name}"] = float(getattr(now, name) - getattr(last, name))
            metrics[f"spending/{role}/total_money"] = now.money
        if self._cache is not None:
            counts, before = vars(self._cache.counters), vars(self._last_of_cache)
            self._last_of_cache = CacheCounters(**counts)
            metrics |= {f"score_cache/{name}": float(counts[name] - before[name]) for name in counts}
            metrics["score_cache/size_bytes"] = float(self._cache.size_bytes)
        return metrics
