"""Makes the requests of one prompt: their priority and session, their seeds, and how much they may sample.

Here requests get their identity: priority and seeds from the prompt's ordinal, deadlines and retries from the stage,
prefixes and budgets from the method. So policies need none of that, and backends know nothing of prompts.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from spot_async.base.seeds import derive_seed
from spot_async.base.waiting_room import Priority
from spot_async.errors import ContractError
from spot_async.protocols import Generator
from spot_async.stages.services import StagesSettings
from spot_async.stages.stage import Stage
from spot_async.types import FinishReason, Generation, IntArray, Prompt, SamplingSettings, ScoreRequest

S = TypeVar("S")
T = TypeVar("T")


@dataclass(eq=False)
class PromptRequests:
    """Makes and sends the requests of one prompt."""

    prompt: Prompt
    settings: StagesSettings
    stop_token_ids: tuple[int, ...]
    vocab_limit: int | None
    own_temperature: float | None = None  # of a model with one of its own; None: that of the settings

    def __post_init__(self) -> None:
        self.temperature = self.own_temperature or self.settings.sampling.temperature
        # All requests of a prompt begin with its tokens. Those of probes and candidates continue with its response's.
        self._session = f"prompt-{self.prompt.ordinal}"
        # While another batch is trained, nobody waits for a single response, so those of all prompts share requests.
        self._together = "all prompts" if self.settings.weights_may_change else self._session

    def sampling(self, max_tokens: int, *request: int | str) -> SamplingSettings:
        """Return how a request samples. What identifies it within the prompt decides its seed."""
        sampling = self.settings.sampling
        return SamplingSettings(
            temperature=self.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            stop_token_ids=self.stop_token_ids,
            seed=derive_seed(self.settings.seed, self.prompt.ordinal, *request),
            vocab_limit=self.vocab_limit,
        )

    def longest(self, prefix_ids: IntArray, max_tokens: int | None) -> int:
        """Return how many tokens may come after a prefix of the response."""
        room = self.settings.sampling.max_response_tokens - len(prefix_ids)
        return room if max_tokens is None else min(room, max_tokens)

    async def continued(
        self,
        request: tuple[int | str, ...],
        prompt_ids: IntArray,
        prefix_ids: IntArray,
        *,
        most: int,
        stop: Sequence[int],
        generate: Callable[[IntArray, SamplingSettings], Awaitable[Generation]],
    ) -> Generation:
        """Sample what comes after a prefix, in `most` tokens: nothing, if the response ended or has no room."""
        if len(prefix_ids) and int(prefix_ids[-1]) in self.stop_token_ids:
            return nothing("stop")
        if most <= 0:
            return nothing("length")
        settings = self.sampling(most, *request)
        stops = tuple(dict.fromkeys((*settings.stop_token_ids, *stop)))
        settings = msgspec.structs.replace(settings, stop_token_ids=stops)
        context_ids = np.concatenate([prompt_ids, prefix_ids], dtype=np.int32) if len(prefix_ids) else prompt_ids
        return await generate(context_ids, settings)

    def generate(
        self,
        stage: Stage[Generator],
        prefix_ids: IntArray,
        settings: SamplingSettings,
        *,
        priority: Priority = (),
        top_k: int = 0,
        apart: str = "",
    ) -> Coroutine[Any, Any, Generation]:
        """Ask for what comes after these tokens. `priority` ranks requests of the stage within the prompt.

        `apart` names an episode, whose short turns are not to wait for the long responses of others.
        """
        session = f"{self._session}-{apart}" if apart else self._together
        return stage.ask(
            (self.prompt.ordinal, *priority),
            lambda generator, deadline: generator.generate(
                prefix_ids, settings, top_k=top_k, session=session, deadline=deadline
            ),
            session=self._session,
            tokens=len(prefix_ids) + settings.max_tokens,
            work=lambda generation: len(generation.token_ids),
        )

    def ask(
        self,
        stage: Stage[S],
        read_ids: IntArray,
        response_ids: IntArray,
        score: Callable[[S, ScoreRequest], Awaitable[T]],
        *,
        times: int = 1,
        kind: str = "",
    ) -> Coroutine[Any, Any, T]:
        """Ask about a response behind what is read before it, so many `times` as a server counts its tokens."""
        return stage.ask(
            (self.prompt.ordinal,),
            lambda server, deadline: score(server, ScoreRequest(read_ids, response_ids, self.temperature, deadline)),
            session=self._session,
            tokens=times * (len(read_ids) + len(response_ids)),
            kind=kind,
        )


def given(stage: Stage[T | None], service: object, need: str) -> Stage[T]:
    """Return a stage that only some policies use. Raise ContractError if the policy's needs do not state it."""
    if service is None:
        raise ContractError(f"the policy asks for what its needs do not state: {need}")
    return cast("Stage[T]", stage)


def identity(n: int, prompt_ids: IntArray | None, prefix_ids: IntArray) -> Iterator[int | str]:
    """Yield what decides the seed of a response beside its prompt: its number, and what it continues."""
    if n:  # the first sample's seed is the same whatever the group's size
        yield n
    for name, token_ids in (("prompt", prompt_ids), ("prefix", prefix_ids)):
        if token_ids is not None and len(token_ids):
            yield f"{name} {hashlib.blake2b(content(token_ids), digest_size=8).hexdigest()}"


def content(token_ids: IntArray) -> bytes:
    """Return what tells token ids from others."""
    return np.asarray(token_ids, np.int32).tobytes()


@functools.cache
def nothing(finish_reason: FinishReason) -> Generation:
    """Return a response without tokens."""
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason=finish_reason,
        version_spans=(),
    )
