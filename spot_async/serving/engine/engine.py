"""Continuous batching over key/value slots: plain synchronous torch code, driven one `step` at a time.

A step scores one batch, reads one batch of waiting prompts into free slots, and decodes one token of every active
response. Each request has a future for its result. The engine knows no sockets, threads or clocks: `worker.py` gives it
a thread, and `http/app.py` an HTTP API.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from spot_async.errors import (
    PoisonedReplyError,
    ServerRestartedError,
    SpotError,
    TransientError,
    VersionMismatchError,
)
from spot_async.serving.api import CandidateReply
from spot_async.serving.engine.cache import bucketed
from spot_async.serving.engine.limits import Limits
from spot_async.serving.engine.logits import candidate_rows, sample, score_rows
from spot_async.serving.engine.model import CausalModel
from spot_async.serving.engine.requests import CandidateTask, GenerateTask, ScoreTask, Task, take_group
from spot_async.serving.engine.slots import SlotTable
from spot_async.serving.engine.weights import Adapter, Adapters, Parameters
from spot_async.serving.settings import EngineSettings
from spot_async.types import Generation, TokenScores, WeightVersion

logger = logging.getLogger(__name__)

# On the shipped example this saves a quarter of the engine's time in a strict iteration, and more would save little
# else. Each decode makes a waiting prompt wait one step longer.
DECODES_BETWEEN_PREFILLS = 8
FREE_SHARE = 1 / 8  # a backlog of prompts waits for this share of the slots to be free, or most reads would be tiny
T = TypeVar("T")


class Engine:
    """The engine. Not thread-safe: only its worker's thread calls it."""

    prefill_tokens = 4096  # padded prompt tokens that are read between two decode steps
    score_tokens = 8192  # padded tokens of one scoring forward
    score_logits = 1 << 24  # in memory at a time when scoring: rows of a chunk times the vocabulary

    def __init__(self, model: CausalModel, settings: EngineSettings) -> None:
        self.limits = Limits(vocab_size=model.vocab_size, max_context_tokens=model.max_context_tokens)
        self.parameters = Parameters(model.module.state_dict())
        self.adapters = Adapters(Path(model.name), model.products, model.device)
        self.version = WeightVersion(0, 0)
        self.tokens_generated = 0
        self.tokens_scored = 0
        self.tokens_prefilled = 0
        self._model = model
        self._settings = settings
        self._numbers = itertools.count()
        self._decodes_since_prefill = 0
        self._waiting: deque[GenerateTask] = deque()
        self._scoring: deque[ScoreTask | CandidateTask] = deque()
        self._table = SlotTable(model.padded_rows(settings.slots))
        self._cache = model.new_cache(model.padded_rows(settings.slots))

    # -- what is asked of it --

    def submit(self, task: Task) -> None:
        """Queue a task. A later `step` answers its future."""
        try:
            task.adapter = self.adapters.named(task.request.adapter)
        except ServerRestartedError as error:
            _refuse(task.future, error)
            return
        if isinstance(task, GenerateTask):
            task.number = next(self._numbers)
            self._waiting.append(task)
        else:
            self._scoring.append(task)

    @torch.inference_mode()
    def abort(self, task: Task) -> None:
        """Forget a request and free its slot, unless it has been answered."""
        if isinstance(task, GenerateTask) and task.row is not None:
            self._free(task.row)
        for queue in (self._waiting, self._scoring):
            if task in queue:
                queue.remove(task)  # type: ignore[arg-type]

    def update_weights(self, tensors: Mapping[str, torch.Tensor], version: WeightVersion) -> None:
        """Copy in weights that `parameters.read` has checked. Responses in flight continue under them.

        The keys and values of such responses are the old weights'. So they give up their slots and go to the front of
        the queue, to be read in again with the tokens that they have. Adapters are the old weights', so they are
        forgotten with all that was asked of them.
        """
        self.adapters.base_replaced()
        adapted = [*self._table.tasks, *self._waiting, *self._scoring]
        for task in [each for each in adapted if each.adapter is not None]:
            self.abort(task)
            _refuse(task.future, ServerRestartedError("the weights below the adapter were replaced"))
        running = sorted((self._table.save(row) for row in range(self._table.active)), key=lambda task: task.number)
        for row in reversed(range(self._table.active)):
            self._table.remove(row)
        for task in running:
            task.close_span(self.version)
        # In order of arrival, and before those that have no token yet.
        self._waiting.extendleft(reversed(running))
        self.parameters.copy_in(tensors)
        self.version = version

    # -- what it has to do --

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return self._table.active

    @property
    def scoring(self) -> int:
        return len(self._scoring)

    @property
    def busy(self) -> bool:
        return bool(self._table.tasks or self._waiting or self._scoring)

    @torch.inference_mode()
    def step(self) -> None:
        """Do one batch of each kind of work that is waiting. A torch error fails only the requests of its batch."""
        if self._scoring:
            self._score_batch()
        if self._waiting and self._prefill_is_due():
            self._prefill_batch()
            self._decodes_since_prefill = 0
        if self._table.tasks:
            self._decode()
            self._decodes_since_prefill += 1

    def _prefill_is_due(self) -> bool:
        """Return whether to read waiting prompts in now.

        A prefill of one prompt costs about as much as a decode of all rows. So a prompt waits a few decodes for others
        to join it, and a backlog waits until several slots are free. Nothing waits while nothing is being decoded.
        """
        free = self._settings.slots - self._table.active
        return free > 0 and (
            not self._table.tasks
            or len(self._waiting) >= free >= FREE_SHARE * self._settings.slots
            or self._decodes_since_prefill >= DECODES_BETWEEN_PREFILLS
        )

    # -- generation --

    def _prefill_batch(self) -> None:
        """Give slots to waiting tasks, and read their contexts, except the last token, into the cache.

        The last token is decoded like any other. So a prefill needs no logits, and contexts that differ only in it (the
        samples of one prompt, the candidates of one position) are read once.
        """
        group = take_group(
            self._waiting,
            self._padded_prefix,
            self._padded_prefix,
            tokens=self.prefill_tokens,
            rows=self._settings.slots - self._table.active,
            text=GenerateTask.read_as,
        )
        places: dict[tuple[Adapter | None, bytes], int] = {}
        prefixes = [task.prefix() for task in group]
        sources = np.array([places.setdefault(task.read_as(), len(places)) for task in group])
        token_ids = np.zeros((len(places), self._padded_prefix(group[0])), np.int64)
        for place, prefix in zip(sources, prefixes, strict=True):
            token_ids[place, : len(prefix)] = prefix
        try:
            with self._model.adapted([adapter for adapter, _ in places], repeats=token_ids.shape[1]):
                self._model.prefill(self._tensor(token_ids), self._cache, self._table.active, self._tensor(sources))
        except RuntimeError as error:
            self._fail(group, error)
            return
        self.tokens_prefilled += token_ids.size
        for task in group:
            self._table.add(task)

    def _decode(self) -> None:
        table = self._table
        rows = slice(0, table.active)
        padded = self._model.padded_rows(table.active)
        width = self._model.padded_width(int(table.length[rows].max()) + 1)
        adapters = [task.adapter for task in table.tasks]
        adapters += adapters[:1] * (padded - len(adapters))
        try:
            with self._model.adapted(adapters):
                hidden = self._model.decode(
                    self._tensor(table.last_token[:padded]), self._tensor(table.length[:padded]), width, self._cache
                )
            logits = self._model.logits(hidden)[rows]
        except RuntimeError as error:
            # All active rows are decoded together, so all of them fail. Their stages ask again.
            failed = list(table.tasks)
            for row in reversed(range(table.active)):
                table.remove(row)
            self._fail(failed, error)
            return
        table.length[rows] += 1
        self._emit(logits)

    def _emit(self, logits: torch.Tensor) -> None:
        """Sample the next token of every active row from logits (n, V). Answer and free the rows that end."""
        table = self._table
        rows = slice(0, table.active)
        top_p, vocab_limit = table.top_p[rows, None], table.vocab_limit[rows, None]
        sampled = sample(
            logits,
            self._tensor(table.temperature[rows, None]),
            self._tensor(top_p) if (top_p < 1).any() else None,
            self._tensor(table.uniforms[table.rows[rows], table.produced[rows], None]),
            top_k=table.top_k[rows],
            vocab_limit=self._tensor(vocab_limit) if (vocab_limit < logits.shape[-1]).any() else None,
        )
        logprobs = sampled.logprobs.numpy(force=True)
        finished = table.record(
            sampled.token_ids.numpy(force=True),
            logprobs,
            None if sampled.topk_ids is None else sampled.topk_ids.numpy(force=True),
            None if sampled.topk_logprobs is None else sampled.topk_logprobs.numpy(force=True),
        )
        self.tokens_generated += len(logprobs)
        broken = table.rows[rows][~np.isfinite(logprobs)]
        # From the last row down, because the last row moves into the place of one that is freed.
        for row in sorted({*finished.tolist(), *broken.tolist()}, reverse=True):
            self._finish(row, broken=row in broken)

    def _finish(self, row: int, *, broken: bool) -> None:
        task = self._table.save(row)
        if broken:
            # NaN in the cache would reach the row's next response through the mask.
            self._cache.erase(row)
        self._free(row)
        if broken:
            version = self._version_of(task)
            _refuse(task.future, PoisonedReplyError(f"weights {version} gave logits that are not finite"))
            return
        task.close_span(self._version_of(task))
        stopped = int(task.token_ids[-1]) in task.request.sampling.stop_token_ids
        generation = Generation(
            token_ids=task.token_ids,
            logprobs=task.logprobs,
            finish_reason="stop" if stopped else "length",
            version_spans=task.spans,
            topk_ids=task.topk_ids,
            topk_logprobs=task.topk_logprobs,
        )
        _answer(task.future, generation)

    def _free(self, row: int) -> None:
        moved = self._table.remove(row)
        if moved is not None:
            self._cache.move(moved, row, int(self._table.length[row]))

    @property
    def _chunk_rows(self) -> int:
        return max(1, self.score_logits // self.limits.vocab_size)

    def _padded_prefix(self, task: GenerateTask) -> int:
        return min(bucketed(max(1, task.context_length - 1)), self.limits.max_context_tokens)

    # -- scoring --

    def _score_batch(self) -> None:
        group = take_group(
            self._scoring,
            lambda task: (type(task), self._padded_sequence(task), task.shape()),
            self._padded_sequence,
            tokens=self.score_tokens,
            rows=self.score_tokens,
        )
        # Checked now and not when the request came, because the weights may have changed while it waited.
        group = [task for task in group if not self._refuse_version(task)]
        if not group:
            return
        try:
            hidden = self._decision_hidden(group)
            if isinstance(group[0], ScoreTask):
                self._answer_scores(group, hidden)  # type: ignore[arg-type]
            else:
                self._answer_candidates(group, hidden)  # type: ignore[arg-type]
        except RuntimeError as error:
            self._fail(group, error)

    def _refuse_version(self, task: ScoreTask | CandidateTask) -> bool:
        version = self._version_of(task)
        if isinstance(task, ScoreTask) or task.request.expected_version in (None, version):
            return False
        message = f"asked of weights {task.request.expected_version}, but the server holds {version}"
        _refuse(task.future, VersionMismatchError(message))
        return True

    def _decision_hidden(self, group: Sequence[ScoreTask | CandidateTask]) -> torch.Tensor:
        """Return the hidden rows (R, D) that decide each task's positions, task after task."""
        width = self._padded_sequence(group[0])
        token_ids = np.zeros((len(group), width), np.int64)
        rows = []
        for number, task in enumerate(group):
            request = task.request
            sequence = np.concatenate([request.prompt_ids, request.response_ids])
            token_ids[number, : len(sequence)] = sequence
            rows.append(number * width + task.decisions())
            self.tokens_scored += len(sequence)
        with self._model.adapted([task.adapter for task in group], repeats=width):
            return self._model.hidden(self._tensor(token_ids), self._tensor(np.concatenate(rows)))

    def _answer_scores(self, group: Sequence[ScoreTask], hidden: torch.Tensor) -> None:
        request = group[0].request
        targets = np.concatenate([task.request.response_ids for task in group]).astype(np.int64)
        scores = score_rows(
            self._model.logits,
            hidden,
            self._tensor(targets),
            top_k=request.top_k,
            temperature=request.temperature,
            chunk_rows=self._chunk_rows,
        )
        logprobs, topk_ids, topk_logprobs, entropy = (part.numpy(force=True) for part in scores[:4])
        tails = None if scores.tail_logprobs is None else scores.tail_logprobs.numpy(force=True)
        topk_ids = topk_ids.astype(np.int32)
        end = 0
        for task in group:
            start, end = end, end + len(task.request.response_ids)
            reply = TokenScores(
                logprobs=logprobs[start:end],
                topk_ids=topk_ids[start:end],
                topk_logprobs=topk_logprobs[start:end],
                entropy=entropy[start:end],
                entropy_lower=entropy[start:end],
                entropy_upper=entropy[start:end],
                version=self._version_of(task),
                tail_logprobs=None if tails is None else tails[start:end],
            )
            self._answer_finite(task, reply, logprobs[start:end])

    def _answer_candidates(self, group: Sequence[CandidateTask], hidden: torch.Tensor) -> None:
        candidates = np.concatenate([task.request.candidate_ids for task in group]).astype(np.int64)
        logprobs = candidate_rows(
            self._model.logits,
            hidden,
            self._tensor(candidates),
            temperature=group[0].request.temperature,
            chunk_rows=self._chunk_rows,
        ).numpy(force=True)
        end = 0
        for task in group:
            start, end = end, end + len(task.request.positions)
            reply = CandidateReply(logprobs=logprobs[start:end], version=self._version_of(task))
            self._answer_finite(task, reply, logprobs[start:end])

    def _answer_finite(self, task: Task, reply: Any, logprobs: npt.NDArray[np.float32]) -> None:
        if np.isnan(logprobs).any():
            version = self._version_of(task)
            _refuse(task.future, PoisonedReplyError(f"weights {version} gave logits that are not finite"))
        else:
            _answer(task.future, reply)

    def _padded_sequence(self, task: ScoreTask | CandidateTask) -> int:
        length = len(task.request.prompt_ids) + len(task.request.response_ids)
        return min(bucketed(length), self.limits.max_context_tokens)

    # -- both --

    def _version_of(self, task: Task) -> WeightVersion:
        """Return the version of the weights that a task is asked of."""
        return self.version if task.adapter is None else task.adapter.version

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def _fail(self, group: Sequence[Task], error: RuntimeError) -> None:
        logger.error("%d requests failed in the engine", len(group), exc_info=error)
        line = (str(error).splitlines() or [type(error).__name__])[0]
        for task in group:
            _refuse(task.future, TransientError(f"the engine failed on this request: {line}"))


def _answer(future: Future[T], result: T) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _refuse(future: Future[Any], error: SpotError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
