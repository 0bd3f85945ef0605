"""The state of all responses being decoded, as columns with one row per slot.

With columns a decode step updates every row in a few array operations, without a loop. Used rows come first: the last
row moves into the place of one that ends. `cache.py` has the keys and values of the same rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spot_async.serving.engine.requests import GenerateTask
from spot_async.types import Int64Array

NO_TOKEN = -1
GREEDY_TOP_P = 1e-9  # leaves only the likeliest token
NO_LIMIT = np.iinfo(np.int64).max


class SlotTable:
    def __init__(self, slots: int) -> None:
        self.tasks: list[GenerateTask] = []  # by row
        self.rows = np.arange(slots)
        self.length = np.zeros(slots, np.int64)  # tokens whose keys and values are in the cache
        self.last_token = np.zeros(slots, np.int64)  # the context's last token, which is not in the cache yet
        self.produced = np.zeros(slots, np.int64)
        self.budget = np.zeros(slots, np.int64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.vocab_limit = np.full(slots, NO_LIMIT, np.int64)
        self.stop_ids = np.full((slots, 1), NO_TOKEN, np.int64)  # (slots, stop ids of the request with most)
        self.uniforms = np.zeros((slots, 0), np.float64)  # (slots, longest budget so far)
        self.token_ids = np.zeros((slots, 0), np.int32)
        self.logprobs = np.zeros((slots, 0), np.float32)
        self.topk_ids = np.zeros((slots, 0, 0), np.int32)  # (slots, longest budget, K) of requests that ask for it
        self.topk_logprobs = np.zeros((slots, 0, 0), np.float32)

    @property
    def active(self) -> int:
        return len(self.tasks)

    def add(self, task: GenerateTask) -> None:
        """Give the task the first free row. All of its context except the last token is in the cache there."""
        row = self.active
        sampling, produced = task.request.sampling, len(task.token_ids)
        self._widen(len(sampling.stop_token_ids), sampling.max_tokens, task.request.top_k)
        self.tasks.append(task)
        task.row = row
        self.length[row] = task.context_length - 1
        self.last_token[row] = task.token_ids[-1] if produced else task.request.prompt_ids[-1]
        self.produced[row] = produced
        self.budget[row] = sampling.max_tokens
        is_greedy = sampling.temperature == 0
        self.temperature[row] = 1.0 if is_greedy else sampling.temperature
        self.top_p[row] = GREEDY_TOP_P if is_greedy else sampling.top_p
        self.top_k[row] = task.request.top_k
        self.vocab_limit[row] = NO_LIMIT if sampling.vocab_limit is None else sampling.vocab_limit
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.uniforms[row, : sampling.max_tokens] = task.uniforms
        self.token_ids[row, :produced] = task.token_ids
        self.logprobs[row, :produced] = task.logprobs
        if task.topk_ids is not None and task.topk_logprobs is not None:
            self.topk_ids[row, :produced, : task.request.top_k] = task.topk_ids
            self.topk_logprobs[row, :produced, : task.request.top_k] = task.topk_logprobs

    def record(
        self,
        token_ids: Int64Array,
        logprobs: npt.NDArray[np.float32],
        topk_ids: Int64Array | None,
        topk_logprobs: npt.NDArray[np.float32] | None,
    ) -> Int64Array:
        """Append one token to each active row; return the rows that it finishes."""
        rows = slice(0, self.active)
        numbers, place = self.rows[rows], self.produced[rows]
        self.token_ids[numbers, place] = token_ids
        self.logprobs[numbers, place] = logprobs
        if topk_ids is not None and topk_logprobs is not None:
            k = topk_ids.shape[1]
            self.topk_ids[numbers, place, :k] = topk_ids
            self.topk_logprobs[numbers, place, :k] = topk_logprobs
        self.last_token[rows] = token_ids
        self.produced[rows] += 1
        stopped = (token_ids[:, None] == self.stop_ids[rows]).any(axis=1)
        finished: Int64Array = numbers[stopped | (self.produced[rows] >= self.budget[rows])]
        return finished

    def save(self, row: int) -> GenerateTask:
        """Copy what a row has sampled into its task; return the task."""
        task, produced, k = self.tasks[row], self.produced[row], self.top_k[row]
        task.token_ids = self.token_ids[row, :produced].copy()
        task.logprobs = self.logprobs[row, :produced].copy()
        if k:
            task.topk_ids = self.topk_ids[row, :produced, :k].copy()
            task.topk_logprobs = self.topk_logprobs[row, :produced, :k].copy()
        return task

    def remove(self, row: int) -> int | None:
        """Free a row; return the row that was moved into its place, if there was one."""
        last = self.active - 1
        self.tasks[row].row = None
        moved = self.tasks.pop()
        if row != last:
            for column in self._columns().values():
                column[row] = column[last]
            self.tasks[row] = moved
            moved.row = row
        self.length[last] = 0  # a free row computed as padding writes at position 0, which the next prefill overwrites
        return last if row != last else None

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray) and name != "rows"}

    def _widen(self, stop_ids: int, budget: int, top_k: int) -> None:
        """Make room for a request with more stop ids, tokens or top-k than any before it."""
        if stop_ids > self.stop_ids.shape[1]:
            more = stop_ids - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        tokens = max(budget, self.uniforms.shape[1])
        for name in ("uniforms", "token_ids", "logprobs") if tokens > self.uniforms.shape[1] else ():
            self._replace(name, (len(self.rows), tokens))
        ranks = max(top_k, self.topk_ids.shape[2])
        for name in ("topk_ids", "topk_logprobs") if top_k and self.topk_ids.shape[1:] != (tokens, ranks) else ():
            self._replace(name, (len(self.rows), tokens, ranks))

    def _replace(self, name: str, shape: tuple[int, ...]) -> None:
        """Replace a column by a wider one, and copy the active rows. The rest takes no memory until it is written."""
        old = getattr(self, name)
        new = np.zeros(shape, old.dtype)
        held = old[: self.active]
        if name != "uniforms":  # uniforms are drawn for the whole budget
            held = held[:, : int(self.produced[: self.active].max(initial=0))]
        new[tuple(map(slice, held.shape))] = held
        setattr(self, name, new)
