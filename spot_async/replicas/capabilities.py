"""Combines what a role's servers offer, and checks that they serve the same model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from spot_async.errors import ConfigError
from spot_async.types import Capabilities

VOCABULARY = ("vocab_size", "vocab_fingerprint")
MODEL = ("model", *VOCABULARY)
OFFERS = (  # what policies and stages rely on; a restart alone changes none of it
    "max_top_k",
    "max_generation_top_k",
    "candidate_logprobs",
    "weight_update",
    "in_flight_updates",
    "generation",
    "token_id_prompts",
    "every_position",
    "sampled_token_ids",
)

# How offers of several servers are combined: numbers and abilities by the least of them, others if all say the same.
LEAST = ("max_context_tokens", "max_top_k", "max_generation_top_k", "max_position_top_k")
EVERY = (
    *("exact_entropy", "weight_update", "in_flight_updates", "generation", "token_id_prompts", "every_position"),
    *("sampled_token_ids", "abort", "seeds"),
)
ALIKE = ("dtype", "version")


def check_same(expected: Capabilities, name: str, found: Capabilities, what: Sequence[str]) -> None:
    """Raise ConfigError unless the server `name` agrees with `expected` in every field of `what`.

    `expected` is what the server said earlier, or what another server of its role says.
    """
    for each in what:
        if getattr(expected, each) != getattr(found, each):
            raise ConfigError(
                f"{name} serves another model ({each} {getattr(found, each)}, not {getattr(expected, each)}): give all "
                "servers of a role the same model, and keep it during the run"
            )


def check_no_less(before: Capabilities, name: str, found: Capabilities) -> None:
    """Raise ConfigError if a server that comes back offers less than it did when the run started.

    A server that is still starting may offer less for a moment. The caller enters it again later.
    """
    together = combined([before, found])
    for each in OFFERS:
        if getattr(together, each) != getattr(before, each):
            raise ConfigError(
                f"{name} offers less than before ({each} {getattr(found, each)}, not {getattr(before, each)}): start "
                "it as it was"
            )


def combined(all_of: Sequence[Capabilities]) -> Capabilities:
    """Return what every server offers, since any of them may be asked.

    Fields that cannot be combined, such as the model's name, are those of the first.
    """
    first = all_of[0]
    found: dict[str, Any] = {name: min(getattr(each, name) for each in all_of) for name in LEAST}
    found |= {name: all(getattr(each, name) for each in all_of) for name in EVERY}
    alike = [name for name in ALIKE if all(getattr(each, name) == getattr(first, name) for each in all_of)]
    found |= {name: getattr(first, name) if name in alike else None for name in ALIKE}
    return msgspec.structs.replace(
        first,
        **found,
        candidate_logprobs=min((each.candidate_logprobs for each in all_of), key=("none", "single", "batched").index),
        weights_need=next((each.weights_need for each in all_of if each.weights_need), ""),
        weights_checked=min((each.weights_checked for each in all_of), key=(False, None, True).index),
        logprob_noise_nats=max(each.logprob_noise_nats for each in all_of),
    )
