"""Requests inside the engine, and how waiting ones are grouped into one forward pass."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from spot_async.models.alignment import decision_row, decision_rows
from spot_async.serving.api import CandidateReply, CandidateRequest, EngineRequest, GenerateRequest, ScoreRequest
from spot_async.serving.engine.logits import draw_uniforms
from spot_async.serving.engine.weights import Adapter
from spot_async.types import (
    Float64Array,
    FloatArray,
    Generation,
    Int64Array,
    IntArray,
    TokenScores,
    VersionSpan,
    WeightVersion,
)


@dataclasses.dataclass(eq=False)
class GenerateTask:
    """A response being sampled. While it has a slot, the slot has its tokens; else the task itself has them."""

    request: GenerateRequest
    uniforms: Float64Array  # (max_tokens,)
    future: Future[Generation] = dataclasses.field(default_factory=Future)
    number: int = -1  # counts tasks in order of arrival
    row: int | None = None  # its slot's row
    adapter: Adapter | None = None
    token_ids: IntArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # (t,)
    logprobs: FloatArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))  # (t,)
    topk_ids: IntArray | None = None  # (t, K)
    topk_logprobs: FloatArray | None = None  # (t, K)
    spans: tuple[VersionSpan, ...] = ()

    @property
    def context_length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)

    def context(self) -> npt.NDArray[np.int32]:
        """The prompt and what was sampled so far, (context_length,)."""
        return np.concatenate([self.request.prompt_ids, self.token_ids])

    def prefix(self) -> npt.NDArray[np.int32]:
        """The context without its last token, (context_length - 1,), which a prefill reads."""
        return self.context()[:-1]

    def read_as(self) -> tuple[Adapter | None, bytes]:
        """What decides the prefix's keys and values."""
        return self.adapter, self.prefix().tobytes()

    def close_span(self, version: WeightVersion) -> None:
        """Note that everything sampled since the last span came from `version`."""
        start = self.spans[-1].end if self.spans else 0
        if start < len(self.token_ids):
            self.spans = (*self.spans, VersionSpan(start, len(self.token_ids), version))


@dataclasses.dataclass(eq=False)
class ScoreTask:
    request: ScoreRequest
    future: Future[TokenScores] = dataclasses.field(default_factory=Future)
    adapter: Adapter | None = None

    def decisions(self) -> Int64Array:
        """The output rows of the sequence that decide the response's tokens."""
        rows = decision_rows(len(self.request.prompt_ids), len(self.request.response_ids))
        return np.arange(rows.start, rows.stop)

    def shape(self) -> tuple[int, float]:
        """What tasks must have in common to be scored in one forward pass."""
        return self.request.top_k, self.request.temperature


@dataclasses.dataclass(eq=False)
class CandidateTask:
    request: CandidateRequest
    future: Future[CandidateReply] = dataclasses.field(default_factory=Future)
    adapter: Adapter | None = None

    def decisions(self) -> Int64Array:
        """The output rows of the sequence that decide the requested positions."""
        return decision_row(len(self.request.prompt_ids), 0) + self.request.positions.astype(np.int64)

    def shape(self) -> tuple[int, float]:
        """What tasks must have in common to be scored in one forward pass."""
        return self.request.candidate_ids.shape[1], self.request.temperature


Task = GenerateTask | ScoreTask | CandidateTask


def new_task(request: EngineRequest) -> Task:
    """Return the task of a request that has passed `Limits.check`."""
    match request:
        case GenerateRequest(sampling=sampling):
            return GenerateTask(request, draw_uniforms(sampling.seed, sampling.max_tokens))
        case ScoreRequest():
            return ScoreTask(request)
        case CandidateRequest():
            return CandidateTask(request)


T = TypeVar("T")


def take_group(
    queue: deque[T],
    key: Callable[[T], Hashable],
    width: Callable[[T], int],
    *,
    tokens: int,
    rows: int,
    text: Callable[[T], Hashable] | None = None,
) -> list[T]:
    """Take the oldest task and later ones with the same key: at most `rows` of them, and `tokens` padded tokens.

    Tasks with the same `text` are read once, so their tokens count once. Without `text` each task counts. One task is
    always taken, so that a sequence longer than the budget is not stuck. Keys hold the padded width: equal widths waste
    little, and keep a task's numbers independent of its neighbours' lengths.
    """
    if not queue or rows < 1:
        return []
    wanted = key(queue[0])
    room = max(1, tokens // width(queue[0]))
    if text is None:
        text, rows = id, min(rows, room)
    group: list[T] = []
    passed: list[T] = []
    texts: set[Hashable] = set()
    while queue and len(group) < rows:
        task = queue.popleft()
        if key(task) == wanted and (len(texts) < room or text(task) in texts):
            texts.add(text(task))
            group.append(task)
        else:
            passed.append(task)
    queue.extendleft(reversed(passed))
    return group
