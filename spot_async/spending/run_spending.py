"""What a run spends and what it saves: the accounts of its roles, and the cache of its teacher's scores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from spot_async.config import ModelConfig
from spot_async.spending.account import Account
from spot_async.spending.records import SpendingMetrics, summarize_spending
from spot_async.spending.score_cache import CacheCounters, ScoreCache
from spot_async.spending.teacher_cache import KeptScores, ReplayedTeacher, TeacherCache
from spot_async.types import Capabilities


class RunSpending:
    """The accounts and the teacher's cache of one run. `served` has the models by role.

    It is made before the backends, which charge the `accounts`.
    """

    def __init__(self, served: Mapping[str, ModelConfig], teacher_cache: TeacherCache | None = None) -> None:
        opened = {role: model.backend.open_account(role) for role, model in served.items()}
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


class RunSpendingMetrics:
    """Makes the metrics `spending/<role>/...` and `score_cache/...` of an iteration."""

    def __init__(self, accounts: Mapping[str, Account], cache: ScoreCache | None) -> None:
        self._spending = SpendingMetrics(accounts)
        self._cache = cache
        self._last = CacheCounters()

    def take(self) -> dict[str, float]:
        """Return the metrics of the time since the last call."""
        metrics = self._spending.take()
        if self._cache is not None:
            now, last = vars(self._cache.counters), vars(self._last)
            self._last = CacheCounters(**now)
            metrics |= {f"score_cache/{name}": float(now[name] - last[name]) for name in now}
            metrics["score_cache/size_bytes"] = float(self._cache.size_bytes)
        return metrics
