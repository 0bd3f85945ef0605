"""Identifies an evaluation by everything that decides its responses and verdicts: the model's files and the settings.

Two evaluations with equal identities are the same one, so that a killed one can be continued. Two with equal settings
are the same measurement of two models, so that their figures can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spot_async.config import Config
from spot_async.errors import DataError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.response_log import PROMPTS, Identity

BLOCK_BYTES = 1 << 16
BLOCKS = 64  # how many blocks of a file are hashed: few suffice, since training changes all of a model's weights


def identity_of(config: Config, benchmarks: Sequence[Benchmark], model: Path) -> Identity:
    """Return the identity of an evaluation of the weights in `model`."""
    return Identity(
        model=model_fingerprint(model),
        backend=config.student.backend.kind,
        settings=settings_of(config, benchmarks),
    )


def settings_of(config: Config, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """Return all settings that decide the figures, by key. How the model is served is not among them."""
    evaluation = config.evaluation
    assert evaluation is not None
    settings: dict[str, Any] = {
        f"evaluation.{name}": getattr(evaluation, name) for name in ("preset", "seed", "temperature", "top_p")
    }
    for each in benchmarks:
        settings |= {
            f"{each.key}.samples": each.samples,
            f"{each.key}.max_response_tokens": each.max_response_tokens,
            f"{each.key}.verifier": None if each.verifier is None else each.verifier.that_decide(),
            f"{each.key}.{PROMPTS}": prompts_fingerprint(each),
        }
        if each.vocab_limit is not None:
            settings[f"{each.key}.vocab_limit"] = each.vocab_limit
    return settings


def settings_fingerprint(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def prompts_fingerprint(benchmark: Benchmark) -> str:
    """Return a digest of all prompts and answers of a benchmark, in order."""
    digest = hashlib.sha256()
    for source in benchmark.sources:
        problem = source.problem
        digest.update(json.dumps([problem.id, problem.answer, problem.choices]).encode())
        digest.update(source.token_ids.tobytes())
    return digest.hexdigest()[:16]


def model_fingerprint(directory: Path) -> str:
    """Return a digest of a model directory: names, sizes and evenly spread blocks of its files. Raises DataError."""
    digest = hashlib.sha256()
    try:
        for path in sorted(each for each in directory.iterdir() if each.is_file() and not each.name.startswith(".")):
            size = path.stat().st_size
            digest.update(os.fsencode(path.name) + f"\t{size}\n".encode())
            step = max(BLOCK_BYTES, size // BLOCKS)
            with path.open("rb") as file:
                for offset in range(0, size, step):
                    file.seek(offset)
                    digest.update(file.read(BLOCK_BYTES))
    except OSError as error:
        raise DataError(f"{directory}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:16]
