"""Backends that pass everything on to another, with one fault each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from spot_async.errors import PermanentError, SpotError
from spot_async.types import Capabilities, Generation, SamplingSettings, ScoreRequest, TokenScores, VersionSpan


class Faulty:
    """A backend that passes everything on; a fault changes one thing about it."""

    def __init__(self, backend: Any, **said: Any) -> None:
        self.backend, self.said = backend, said

    async def capabilities(self, *, deadline: float) -> Capabilities:
        found = await self.backend.capabilities(deadline=deadline)
        return msgspec.structs.replace(
            found, **{"version": (await self.backend.stats(deadline=deadline)).version, **self.said}
        )

    async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
        return await self.backend.generate(prompt_ids, sampling, **more)

    async def score(self, request: ScoreRequest, **more: Any) -> TokenScores:
        return await self.backend.score(request, **more)

    async def candidate_logprobs(self, *arguments: Any, **more: Any) -> Any:
        return await self.backend.candidate_logprobs(*arguments, **more)

    async def update_weights(self, snapshot: Any, *, deadline: float) -> None:
        await self.backend.update_weights(snapshot, deadline=deadline)


def of_samples(change: Callable[[SamplingSettings], dict[str, Any]]) -> type[Faulty]:
    """Return a backend that samples with other settings than it was asked for."""

    class Sampling(Faulty):
        async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
            return await super().generate(prompt_ids, msgspec.structs.replace(sampling, **change(sampling)), **more)

    return Sampling


def of_generations(change: Callable[[Generation], dict[str, Any]]) -> type[Faulty]:
    """Return a backend that reports something else than it sampled."""

    class Generations(Faulty):
        async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
            reply = await super().generate(prompt_ids, sampling, **more)
            return msgspec.structs.replace(reply, **change(reply))

    return Generations


def of_scores(change: Callable[[TokenScores], dict[str, Any]]) -> type[Faulty]:
    class Scores(Faulty):
        async def score(self, request: ScoreRequest, **more: Any) -> TokenScores:
            reply = await super().score(request, **more)
            return msgspec.structs.replace(reply, **change(reply))

    return Scores


def with_row(values: Any, row: int) -> Any:
    """Return a copy with one row replaced by its neighbour's."""
    changed = np.array(values)
    if len(changed) > 1:
        changed[row] = changed[row + (1 if row == 0 else -1)]
    return changed


class CapsTheResponse(Faulty):
    """Cuts responses that do not fit short without saying so, as vLLM does."""

    async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
        room = 512 - len(prompt_ids)
        return await super().generate(
            prompt_ids, msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room)), **more
        )


def with_ids_below(limit: int, request: ScoreRequest) -> ScoreRequest:
    prompt_ids, response_ids = (np.clip(ids, 0, limit - 1) for ids in (request.prompt_ids, request.response_ids))
    return msgspec.structs.replace(request, prompt_ids=prompt_ids, response_ids=response_ids)


class ForgivesIds(Faulty):
    async def score(self, request: ScoreRequest, **more: Any) -> TokenScores:
        return await super().score(with_ids_below(53, request), **more)


class CutsTopK(Faulty):
    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        return await super().score(request, top_k=min(top_k, 53))


class ScoresAtOne(Faulty):
    async def score(self, request: ScoreRequest, **more: Any) -> TokenScores:
        return await super().score(msgspec.structs.replace(request, temperature=1.0), **more)


class MixedUpUnderLoad(Faulty):
    """Gives answers that depend on how many other requests there are."""

    in_flight = 0

    async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
        self.in_flight += 1
        reply = await super().generate(prompt_ids, sampling, **more)
        self.in_flight -= 1
        return msgspec.structs.replace(reply, logprobs=reply.logprobs - 0.1 * (12 < self.in_flight < 40))


class IgnoresDeadlines(Faulty):
    async def generate(
        self, prompt_ids: Any, sampling: SamplingSettings, *, deadline: float, **more: Any
    ) -> Generation:
        return await super().generate(prompt_ids, sampling, deadline=deadline + 60, **more)


class AnswersAnyVersion(Faulty):
    async def candidate_logprobs(self, request: ScoreRequest, *asked: Any, expected_version: Any) -> Any:
        held = (await self.backend.stats(deadline=request.deadline)).version
        return await super().candidate_logprobs(request, *asked, expected_version=held)


class CandidatesAtOneOnly(Faulty):
    async def candidate_logprobs(self, request: ScoreRequest, *asked: Any, **more: Any) -> Any:
        if request.temperature != 1.0:
            raise PermanentError("candidates are at temperature 1 only")
        return await super().candidate_logprobs(request, *asked, **more)


class Breaks(Faulty):
    async def score(self, request: ScoreRequest, **more: Any) -> TokenScores:
        raise KeyError("input_top_logprobs")


class FinishesWhatNobodyWantsAnyMore(Faulty):
    """Does not notice that a client has hung up."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.tasks: list[asyncio.Task[Generation]] = []

    async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
        self.tasks.append(asyncio.create_task(super().generate(prompt_ids, sampling, **more)))
        return await asyncio.shield(self.tasks[-1])


class TakesAnyWeights(Faulty):
    async def update_weights(self, snapshot: Any, *, deadline: float) -> None:
        try:
            await super().update_weights(snapshot, deadline=deadline)
        except SpotError:
            return


class StaleVersion(Faulty):
    """Names the weights that it started with, whatever it serves."""

    async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
        reply = await super().generate(prompt_ids, sampling, **more)
        spans = (VersionSpan(0, len(reply.token_ids), self.said["version"]),)
        return msgspec.structs.replace(reply, version_spans=spans)


class StaleWeights(Faulty):
    """Names the new weights, but serves the old ones."""

    first_directory: str

    async def update_weights(self, snapshot: Any, *, deadline: float) -> None:
        await super().update_weights(snapshot, deadline=deadline)
        await super().update_weights(
            msgspec.structs.replace(snapshot, directory=self.first_directory), deadline=deadline
        )
