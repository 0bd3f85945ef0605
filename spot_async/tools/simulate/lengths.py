"""Decides how long responses and probes are: drawn from a log-normal, or as a run recorded them.

A length depends on the prompt, on the request's seed and on nothing else. So all simulations of a workload have the
same responses, and their times can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spot_async.base.seeds import derive_seed

GRAINS = 64  # an average response has about so many grains


class Lengths(Protocol):
    """Lengths in tokens, before they are cut."""

    @property
    def mean(self) -> float:
        """About the mean length of a response."""
        ...

    def response(self, ordinal: int, seed: int) -> float: ...

    def probe(self, ordinal: int, seed: int) -> float: ...


@dataclass(frozen=True)
class LogNormalLengths:
    """Responses and probes are drawn alike, each by itself."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def response(self, ordinal: int, seed: int) -> float:
        return float(self.median * math.exp(self.sigma * np.random.default_rng(seed).standard_normal()))

    def probe(self, ordinal: int, seed: int) -> float:
        return self.response(ordinal, seed)


@dataclass(frozen=True)
class RecordedPrompt:
    """The tokens that a run generated for one prompt."""

    responses: Sequence[int]
    probes: Sequence[float] = ()  # of all of its responses


@dataclass(frozen=True)
class RecordedLengths:
    """Each simulated prompt is one of a run's, drawn at random: long responses keep their long probes."""

    prompts: Sequence[RecordedPrompt]

    @property
    def mean(self) -> float:
        every = [tokens for prompt in self.prompts for tokens in prompt.responses]
        return sum(every) / len(every)

    def response(self, ordinal: int, seed: int) -> float:
        responses = self._drawn(ordinal).responses
        return float(responses[seed % len(responses)])

    def probe(self, ordinal: int, seed: int) -> float:
        """Return a probe of the same prompt. Where the run has none, probes are as long as responses."""
        probes = self._drawn(ordinal).probes
        return probes[seed % len(probes)] if probes else self.response(seed, seed)

    def _drawn(self, ordinal: int) -> RecordedPrompt:
        return self.prompts[derive_seed(0, "recorded prompt", ordinal) % len(self.prompts)]


@dataclass(frozen=True)
class Workload:
    """Lengths in grains. A grain stands for several tokens, so that long responses cost no more than short ones."""

    lengths: Lengths
    grain: int  # tokens
    most: int  # grains of the longest response

    @classmethod
    def of(cls, lengths: Lengths, max_response_tokens: int) -> Workload:
        grain = max(1, round(min(lengths.mean, max_response_tokens) / GRAINS))
        return cls(lengths, grain, max(1, round(max_response_tokens / grain)))

    def grains(self, ordinal: int, seed: int, most: int) -> int:
        """Return the length of a response that may have `most` grains. One that may have fewer than all is a probe."""
        tokens = (self.lengths.probe if most < self.most else self.lengths.response)(ordinal, seed)
        return max(1, min(most, round(tokens / self.grain)))
