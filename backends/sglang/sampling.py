"""What every request of SGLang's native API says of sampling, so that a server's own defaults bend nothing. Pure.

What a request leaves out, SGLang takes from `--preferred-sampling-params`. None of that is the policy's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .weights import ModelInfo, ServerInfo

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
}


def neutral(model: ModelInfo, info: ServerInfo) -> dict[str, Any]:
    """Return the parameters with which one server samples from the model's own distribution.

    Whatever else it prefers is null, which SGLang takes for its own default: end texts, grammars, biases, and what
    later versions may add. A version that does not know a parameter would refuse it, so only what it names is sent.
    """
    watermark = {"watermark": {"enabled": False}} if info.enable_watermark else {}
    return {**dict.fromkeys(model.preferred_sampling_params or ()), **watermark, **NEUTRAL}
