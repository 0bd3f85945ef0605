"""Checks that the servers of one role agree: the same model, and the same numbers for the same rows.

It asks servers that are running. `diagnosis` asks each server by itself, and puts the findings together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from spot_async.base.tasks import gather_answers
from spot_async.checks import questions
from spot_async.checks.questions import Asked
from spot_async.errors import RequestError
from spot_async.models.precision import noise_nats, precision
from spot_async.protocols import Backend, Generator, Replicated, Scorer
from spot_async.replicas.capabilities import combined
from spot_async.types import Capabilities

TOP_K = 16
OTHER_ROWS_NATS = 1.0  # no rounding makes such differences: the rows are of other weights


@dataclass
class Agreement:
    """What was found by comparing the servers of one role."""

    together: Capabilities  # what all of them offer, including the noise between them
    largest_nats: float | None = None  # largest difference between servers; None if they were not compared
    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def servers_of(role: str, backend: Backend) -> Mapping[str, Backend]:
    """Return the servers of a role by name. A backend that does not stand for several is the role's only server."""
    return backend.backends if isinstance(backend, Replicated) else {role: backend}


async def agreement(role: str, servers: Mapping[str, Any], said: Mapping[str, Capabilities], asked: Asked) -> Agreement:
    """Compare the `servers` of a role, by name. `said` is what each says of itself."""
    found = Agreement(combined([said[name] for name in servers]))
    if len(servers) < 2:
        return found
    for what, values in (
        ("models of different names", [said[name].model for name in servers]),
        ("different software", [said[name].server for name in servers]),
    ):
        if len(set(values)) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in zip(servers, values, strict=True))
            found.warnings.append(f"{role}.backend: its servers have {what}: {listed}")
    if holds_unknown_weights(found.together):
        found.warnings.append(
            f"{role}.backend: its servers hold unknown weights until the first are sent: their numbers are not compared"
        )
        return found
    await _compare(role, servers, asked, found)
    return found


def holds_unknown_weights(said: Capabilities) -> bool:
    return said.weight_update and said.version is None


async def _compare(role: str, servers: Mapping[str, Any], asked: Asked, found: Agreement) -> None:
    together = found.together
    scores = isinstance(next(iter(servers.values())), Scorer)
    samples = isinstance(next(iter(servers.values())), Generator) and together.generation
    # A server that names tokens by text knows the fewer positions, the more it is asked for at each.
    top_k = min(TOP_K, together.max_top_k) if together.every_position else 0
    score_top_k = top_k if scores and together.max_top_k else None
    generation_top_k = min(TOP_K, together.max_generation_top_k) if samples else 0
    if score_top_k is None and not generation_top_k:
        return
    try:
        read = await gather_answers(
            questions.readings(each, asked, score_top_k=score_top_k, generation_top_k=generation_top_k)
            for each in servers.values()
        )
    except RequestError as error:
        found.refusals.append(f"{role}.backend: its servers could not be compared: {error}")
        return
    pairs = {  # each with those before it
        (name, before): questions.in_common(earlier, later)
        for (before, earlier), (name, later) in combinations(zip(servers, read, strict=True), 2)
    }
    if any(not one.size for one, _ in pairs.values()):
        found.warnings.append(f"{role}.backend: its servers could not be compared: they mask different positions")
    differences = np.concatenate([np.abs(one - two) for one, two in pairs.values()])
    if not differences.size:
        return
    found.largest_nats = float(differences.max())
    found.together = msgspec.structs.replace(
        together, logprob_noise_nats=max(together.logprob_noise_nats, noise_nats(differences))
    )
    served = precision(together.dtype)
    apart = {pair: served.judged_nats(one - two) for pair, (one, two) in pairs.items()}
    for later in list(servers)[1:]:
        name, before = pair = max((pair for pair in pairs if pair[0] == later), key=apart.__getitem__)
        nats, (one, two), most = apart[pair], pairs[pair], "" if served.share == 1.0 else "mostly "
        line = f"{role}.backend: {name} gives log-probabilities {most}up to {nats:.2g} nats from those of {before}"
        if nats > OTHER_ROWS_NATS:
            found.refusals.append(f"{line}: these are not the same weights; give all servers of a role the same model")
        elif served.fault(one, two) is not None:
            found.warnings.append(f"{line}: start them with the same type and flags")
