"""The backend for our own server. `examples/custom_backend` is the one to copy for a backend of your own.

Each method of a protocol (`spot_async.protocols`) makes a request, sends it, and checks the reply before anyone else
sees it, with what is in `shared/`:

* `http.py` sends requests with deadlines and turns every failure into one of `spot_async.errors`.
* `replies.py` checks that the numbers in a reply can be true.
* `lora.py` serves a student's versions as LoRA adapters beside its base model.
* `held_weights.py` notices a server that was restarted, or updated by somebody else.
* `remote.py` starts a server as a child process, unless the settings name one that is running, and connects to it.
* `remote.py` and `settings.py` also add what JSON servers have in common, such as billing.
* `student_backend.py` has the bases of backends whose servers may serve a student: new weights; sleep and health.

Leaving the backend ends the server. Inference itself happens in the server (`spot_async.serving`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.base import wire
from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, RequestError, TransientError
from spot_async.serving import api
from spot_async.types import (
    Capabilities,
    FloatArray,
    Generation,
    IntArray,
    SamplingSettings,
    ScoreRequest,
    TokenScores,
    WeightSnapshot,
    WeightVersion,
)

from ..shared.bodies import largest_reply_bytes
from ..shared.discovery import asked_as, may_be_other
from ..shared.held_weights import HeldWeights
from ..shared.replies import check_candidates, check_generation, check_scores
from ..shared.student_backend import AdapterBackend
from ..shared.witnesses import file_digests
from .coalescing import Asked, Batch, Coalescer, RefusedTogetherError
from .server import LocalServer, error_of, take_frames, time_left
from .settings import LocalSettings

# Replies to requests that left together are read on the event loop, alone large ones are read in a thread. Within this
# limit are 27,000 tokens or 3,500 with a top-20, which take the loop 0.1 and 0.5 ms.
MOST_BYTES_TOGETHER = 24 << 20

T = TypeVar("T")


class LocalBackend(AdapterBackend):
    """A `Generator`, `Scorer`, `CandidateScorer`, `WeightSink` and `HealthCheck` around one server."""

    class Settings(LocalSettings):
        """See `LocalSettings`."""

    _server: LocalServer

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        server = LocalServer(settings, role=role, model=model, run_directory=run_directory)
        super().__init__(settings, server, server, base=Path(model), run_directory=run_directory)
        self._settings = settings
        self._held: HeldWeights
        self._capabilities: Capabilities
        self._coalescer = Coalescer()

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        await super()._open(stack)
        deadline = asyncio.get_running_loop().time() + self._settings.start_timeout_s
        async with asked_as(self._server, "`spot-async serve`", _may_be_other, deadline=deadline):
            with self._server.starting():
                found = await self._server.get(api.HEALTH, api.HealthReply, deadline=deadline)
        self._held = HeldWeights(self._name, found.version)
        # Requests name this process, so that another one at its address, with other weights, refuses them.
        self._server.endpoint.headers[api.INSTANCE_HEADER] = found.instance
        self._capabilities = await self.capabilities(deadline=deadline)
        try:
            await self._start_adapters(stack, deadline)
        except PermanentError as error:
            section = self._server.section
            raise ConfigError(f"{section}: the server does not take this run's adapters: {error}") from None

    async def capabilities(self, *, deadline: float) -> Capabilities:
        with self._server.starting():
            found = await self._server.get(api.CAPABILITIES, Capabilities, deadline=deadline)
        if self._is_student and self._settings.takes_adapters:
            takes = self._adapters is not None
            return msgspec.structs.replace(
                found, weight_transport="adapter", weight_update=takes, in_flight_updates=takes
            )
        # A student's server that was already running may hold another run's weights.
        is_unknown = self._is_student and self._settings.is_attached
        return msgspec.structs.replace(found, version=None) if is_unknown else found

    async def ping(self, *, deadline: float) -> None:
        """Ask for the server's health. Its event loop answers, and that is enough: if its engine fails, it ends."""
        since = self._held.now()
        health = await self._server.get(api.HEALTH, api.HealthReply, deadline=deadline)
        self._held.check(health.version, since)

    async def stats(self, *, deadline: float) -> api.Stats:
        """Return the server's counters and the CPU seconds it has used."""
        return await self._server.get(api.STATS, api.Stats, deadline=deadline)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        since, vocab_size = self._held.now(), self._capabilities.vocab_size
        with self._asking() as adapter:

            def check(reply: Generation) -> Generation:
                for span in reply.version_spans:
                    if span.version is not None:  # which is refused below
                        self._check_version(span.version, adapter, since)
                return check_generation(reply, sampling, top_k=top_k, vocab_size=vocab_size)

            sent = api.GenerateRequest(
                prompt_ids=prompt_ids, sampling=sampling, top_k=top_k, adapter=adapter, timeout_s=time_left(deadline)
            )
            largest = largest_reply_bytes(sampling.max_tokens, sampling.max_tokens * (1 + top_k))
            return await self._reply(api.GENERATE, Asked(sent, Generation, check, largest), deadline, session)

    async def score(
        self, request: ScoreRequest, *, top_k: int, expected_version: WeightVersion | None = None
    ) -> TokenScores:
        since = self._held.now()
        with self._asking(expected_version) as adapter:

            def check(reply: TokenScores) -> TokenScores:
                self._check_version(reply.version, adapter, since)
                return check_scores(reply, request.response_ids, top_k=top_k, vocab_size=self._capabilities.vocab_size)

            sent = api.ScoreRequest(
                prompt_ids=request.prompt_ids,
                response_ids=request.response_ids,
                top_k=top_k,
                temperature=request.temperature,
                adapter=adapter,
                timeout_s=time_left(request.deadline),
            )
            tokens = len(request.response_ids)
            asked = Asked(sent, TokenScores, check, largest_reply_bytes(tokens, tokens * (1 + top_k)))
            return await self._reply(api.SCORE, asked, request.deadline)

    async def candidate_logprobs(
        self,
        request: ScoreRequest,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        expected_version: WeightVersion | None,
    ) -> FloatArray:
        if not candidate_ids.size:
            return np.zeros(candidate_ids.shape, np.float32)
        since = self._held.now()
        with self._asking(expected_version) as adapter:

            def check(reply: api.CandidateReply) -> api.CandidateReply:
                if expected_version is None:
                    self._check_version(reply.version, adapter, since)
                elif reply.version != expected_version:
                    raise PoisonedReplyError(f"is of weights {reply.version}, but {expected_version} were asked for")
                check_candidates(reply.logprobs, candidate_ids)
                return reply

            sent = api.CandidateRequest(
                prompt_ids=request.prompt_ids,
                response_ids=request.response_ids,
                positions=positions,
                candidate_ids=candidate_ids,
                temperature=request.temperature,
                expected_version=expected_version,
                adapter=adapter,
                timeout_s=time_left(request.deadline),
            )
            asked = Asked(sent, api.CandidateReply, check, largest_reply_bytes(logprobs=candidate_ids.size))
            return (await self._reply(api.CANDIDATE_LOGPROBS, asked, request.deadline)).logprobs

    async def _reply(self, path: str, asked: Asked[T], deadline: float, session: str | None = "") -> T:
        """Return the reply. Requests of one path and session leave together. With None the request leaves alone."""
        alone = functools.partial(self._server.post, path, asked.request, asked.kind, asked.check)
        if session is None or asked.largest > MOST_BYTES_TOGETHER:
            return await alone(deadline, asked.largest)
        group = f"{path} {session}"
        try:
            if (reply := await self._coalescer.reply_with_others(group, asked, deadline)) is not None:
                return reply
            async with self._coalescer.carry(group, asked) as batch:
                if len(batch.asked) == 1:
                    batch.settle(0, await alone(deadline, asked.largest))
                else:
                    await self._many(batch, deadline)
            return batch.own_reply()
        except RefusedTogetherError:
            return await alone(deadline, asked.largest)

    async def _many(self, batch: Batch[Any], deadline: float) -> None:
        """Send several requests as one, and hand out their replies as they come."""
        received, waiting = bytearray(), dict(enumerate(batch.asked))
        sent = [wire.encode(each.request) for each in batch.asked]
        body = wire.encode({"requests": list(map(msgspec.Raw, sent))})  # a `ManyRequest`
        reading = functools.partial(self._server.endpoint.reading, "POST", api.MANY)

        def outcome(asked: Asked[Any], reply: api.ManyReply, frame: bytes) -> object:
            if reply.error is not None:
                failed = error_of(self._name, reply.error) or TransientError(f"{self._name}: {reply.error}")
                failed.exchange = self._server.endpoint.exchange("POST", api.MANY, sent[reply.index], received=frame)
                return failed
            try:
                with reading(sent[reply.index], frame):
                    return asked.check(wire.decode(reply.reply, asked.kind))
            except RequestError as error:
                return error

        def read(part: bytes) -> None:
            received.extend(part)
            with reading(body, received):
                for frame in take_frames(received):
                    reply = wire.decode(frame, api.ManyReply)
                    if reply.index not in waiting:
                        raise PoisonedReplyError(f"replied to request {reply.index}, which does not wait for one")
                    batch.settle(reply.index, outcome(waiting.pop(reply.index), reply, frame))

        largest = sum(each.largest for each in batch.asked)
        stream = functools.partial(self._server.endpoint.stream, content_type=api.CONTENT_TYPE, deadline=deadline)
        try:
            await stream(api.MANY, body, read, largest=largest)
        except PermanentError as error:
            raise RefusedTogetherError(str(error)) from error
        if waiting:
            with reading(body, received):
                raise TransientError(f"the server ended without {len(waiting)} of {len(batch.asked)} replies")

    @contextlib.contextmanager
    def _asking(self, expected: WeightVersion | None = None) -> Iterator[str | None]:
        """Give the name of the adapter that one request is asked of; None where the server takes whole weights."""
        if self._adapters is None:
            yield None
            return
        with self._adapters.request(expected) as adapter:
            yield adapter.name

    def _check_version(self, version: WeightVersion | None, adapter: str | None, since: int) -> None:
        """Raise a `RequestError` for a reply of other weights than its request, sent at `since`, was asked of."""
        if version is None:
            raise PoisonedReplyError("names no weights")
        if self._adapters is None or adapter is None:
            self._held.check(version, since)
        elif version != self._adapters.version_of(adapter):
            raise PoisonedReplyError(f"is of weights {version}, and not those of adapter {adapter}")

    async def _update(self, snapshot: WeightSnapshot, deadline: float) -> None:
        digests = await asyncio.to_thread(file_digests, Path(snapshot.directory))
        request = api.UpdateRequest(snapshot=snapshot, digests=digests, timeout_s=time_left(deadline))

        def check(reply: api.VersionReply) -> api.VersionReply:
            if reply.version != snapshot.version:
                raise PoisonedReplyError(f"holds weights {reply.version} after an update to {snapshot.version}")
            return reply

        with self._held.updating(snapshot.version):
            await self._server.post(api.UPDATE_WEIGHTS, request, api.VersionReply, check, deadline)


def _may_be_other(error: RequestError) -> bool:
    """Return whether a refusal came in another form than our own server's, so that another setting cannot mend it."""
    status = error.exchange.status if error.exchange is not None else None
    return may_be_other(error) or (status in (400, 401, 403, 501) and f"HTTP {status}" in str(error))
