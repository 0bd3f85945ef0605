"""The engine's thread, and the only access to it: calls are queued and run between two steps.

The thread sleeps only while there is nothing to do. Results come back as `concurrent.futures` futures, and cancelling
one aborts its request.
"""

from __future__ import annotations

import functools
import os
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from spot_async.errors import PermanentError, SpotError
from spot_async.serving.api import EngineRequest, Stats, VersionReply
from spot_async.serving.engine.engine import Engine
from spot_async.serving.engine.requests import Task, new_task
from spot_async.serving.engine.weights import Adapter
from spot_async.types import WeightVersion


class EngineWorker:
    """The engine's worker. `run` is the body of its thread; all else may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.parameters, self.adapters = engine.parameters, engine.adapters  # `read` is slow; the rest is the engine's
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = False

    def run(self) -> None:
        """Work until `stop`. Whatever this raises is a bug, and the process must not continue without its engine."""
        while not self._stopping:
            if self._engine.scoring:  # in large batches it is cheapest: whoever waits for this core may ask for more
                os.sched_yield()
            if self._engine.busy and self._calls.empty():
                self._engine.step()
            else:
                self._calls.get()()

    def stop(self) -> None:
        """Let `run` return after the current step. Requests that are left are never answered."""
        self._calls.put(self._stop)

    def _stop(self) -> None:
        self._stopping = True

    def submit(self, request: EngineRequest) -> Future[Any]:
        """Return a future of the request's reply, or of a `PermanentError` if it cannot be served."""
        try:
            self._engine.limits.check(request)
        except PermanentError as error:
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused
        task = new_task(request)
        task.future.add_done_callback(functools.partial(self._abort_cancelled, task))
        self._calls.put(functools.partial(self._engine.submit, task))
        return task.future

    def update_weights(self, tensors: Mapping[str, torch.Tensor], version: WeightVersion) -> Future[VersionReply]:
        """Return a future that is done once all later tokens come from these tensors, of `parameters.read`."""
        return self._call(lambda: self._engine.update_weights(tensors, version), version)

    def load_adapter(self, name: str, adapter: Adapter) -> Future[VersionReply]:
        """Return a future that is done once requests may name the adapter."""
        return self._call(lambda: self._engine.adapters.load(name, adapter), adapter.version)

    def unload_adapter(self, name: str) -> Future[VersionReply]:
        """Return a future that is done once no request can name the adapter any more."""
        return self._call(lambda: self._engine.adapters.unload(name), self.version)

    def _call(self, change: Callable[[], None], version: WeightVersion) -> Future[VersionReply]:
        future: Future[VersionReply] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                change()
            except SpotError as error:
                future.set_exception(error)
            else:
                future.set_result(VersionReply(version=version))

        self._calls.put(call)
        return future

    @property
    def version(self) -> WeightVersion:
        return self._engine.version

    def stats(self) -> Stats:
        engine = self._engine
        return Stats(
            waiting=engine.waiting,
            active=engine.active,
            scoring=engine.scoring,
            tokens_generated=engine.tokens_generated,
            tokens_scored=engine.tokens_scored,
            tokens_prefilled=engine.tokens_prefilled,
            cpu_s=time.process_time(),
            version=engine.version,
        )

    def _abort_cancelled(self, task: Task, future: Future[Any]) -> None:
        if future.cancelled():
            self._calls.put(functools.partial(self._engine.abort, task))
