"""Decides how long responses and probes are: drawn from a log-normal, or as a run recorded them.

A length depends on the prompt, and on the request's seed or on how many like it the prompt had before. So all
simulations of a workload have the same responses, and their times can be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field

from spot_async.base.seeds import derive_seed
from spot_async.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section

GRAINS = 64  # an average response has about so many grains


# What was asked for each prompt so far: responses, and probes (True). And how long an episode's turns are, by session.
Asked = Counter[tuple[int, bool] | str]


class EnvironmentRates(Section):
    """How fast turns are answered, and how many there are. All training sets count as one."""

    workers: PositiveInt | None = Field(None, description="turns that are answered at a time; default: as configured")
    answer_s: NonNegativeFloat | None = Field(None, description="mean seconds of an answer; 0 for a turn without one")
    answer_tokens: NonNegativeFloat = Field(0.0, description="tokens of an answer, which are only read")
    turns: Annotated[float, Field(ge=1)] | None = Field(None, description="mean turns of a response")

    def turns_of(self, ordinal: int) -> int:
        """Return the turns of a prompt's episodes. Over prompts in a row they have the mean."""
        mean = self.turns or 1.0
        return int((ordinal + 1) * mean) - int(ordinal * mean)


class LogNormal(Section):
    """Lengths in tokens, before they are cut. Responses and probes are drawn alike, each by itself."""

    median: PositiveFloat | None = Field(None, description="tokens that half of the responses have at most")
    sigma: NonNegativeFloat = Field(0.7, description="standard deviation of the logarithm of a length")
    prompts: NonNegativeFloat = Field(0.0, description="tokens of a prompt, which servers score with each response")

    @property
    def mean(self) -> float:
        """About the mean length of a response."""
        return (self.median or 0.0) * math.exp(self.sigma**2 / 2)

    def tokens(self, ordinal: int, seed: int, nth: int, *, is_probe: bool) -> float:
        return float((self.median or 0.0) * math.exp(self.sigma * np.random.default_rng(seed).standard_normal()))

    def prompt(self, ordinal: int) -> float:
        return self.prompts


@dataclass(frozen=True)
class RecordedPrompt:
    """The tokens of one prompt, and those that a run generated for it."""

    responses: Sequence[int]
    probes: Sequence[float] = ()  # of all of its responses
    tokens: float = 0.0


@dataclass(frozen=True)
class RecordedLengths:
    """Each simulated prompt is one of a run's: long responses keep their long probes.

    None comes again before all others have come.
    """

    prompts: Sequence[RecordedPrompt]

    @property
    def mean(self) -> float:
        every = [tokens for prompt in self.prompts for tokens in prompt.responses]
        return sum(every) / len(every)

    def tokens(self, ordinal: int, seed: int, nth: int, *, is_probe: bool) -> float:
        """Return a length of the same prompt. Where that has no probes, they are as long as any responses."""
        drawn = self._drawn(ordinal)
        if is_probe and not drawn.probes:
            return float(self._drawn(seed).responses[0])
        own = drawn.probes if is_probe else drawn.responses
        return float(own[nth % len(own)])

    def prompt(self, ordinal: int) -> float:
        return self._drawn(ordinal).tokens

    def _drawn(self, ordinal: int) -> RecordedPrompt:
        time, place = divmod(ordinal, len(self.prompts))
        return self.prompts[_shuffled(len(self.prompts), time)[place]]


Lengths: TypeAlias = LogNormal | RecordedLengths


@lru_cache(maxsize=4)
def _shuffled(number: int, time: int) -> list[int]:
    order: list[int] = np.random.default_rng(derive_seed(0, "recorded prompts", time)).permutation(number).tolist()
    return order


@dataclass(frozen=True)
class Workload:
    """Lengths in grains. A grain stands for several tokens, so that long responses cost no more than short ones."""

    lengths: Lengths
    grain: int  # tokens
    most: int  # grains of the longest response
    environment: EnvironmentRates = field(default_factory=EnvironmentRates)  # where it has turns: of episodes

    @classmethod
    def of(cls, lengths: Lengths, max_response_tokens: int, environment: EnvironmentRates | None = None) -> Workload:
        grain = max(1, round(min(lengths.mean, max_response_tokens) / GRAINS))
        return cls(lengths, grain, max(1, round(max_response_tokens / grain)), environment or EnvironmentRates())

    def turn(self, ordinal: int, seed: int, most: int, asked: Asked, session: str) -> int:
        """Return the length of an episode's turn. Each episode, of a response or a probe, has a session of its own.

        All of its turns are as long, so that the first one decides.
        """
        if self.environment.turns is None or session not in asked:
            grains = self.grains(ordinal, seed, most, asked)
            asked[session] = max(1, round(grains / self.environment.turns_of(ordinal)))
        return min(most, asked[session])

    def grains(self, ordinal: int, seed: int, most: int, asked: Asked) -> int:
        """Return the length of a response that may have `most` grains. One that may have fewer than all is a probe."""
        is_probe = most < self.most
        nth = asked[ordinal, is_probe]
        asked[ordinal, is_probe] += 1
        tokens = self.lengths.tokens(ordinal, seed, nth, is_probe=is_probe)
        return max(1, min(most, round(tokens / self.grain)))

    def scored(self, ordinal: int, grains: int) -> float:
        """Return the grains that are scored with a response: those of the prompt as well."""
        return grains + self.lengths.prompt(ordinal) / self.grain
