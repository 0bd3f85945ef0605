"""Files of evaluations, made of counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from spot_async.evaluation.metrics import BenchmarkFigures, Estimate, EvaluationFigures, MacroFigures


def written(
    path: Path,
    benchmarks: dict[str, list[int]],
    *,
    samples: int = 8,
    model: str = "m",
    model_fingerprint: str = "f",
    note: str | None = None,
    file: str = "evaluation.json",
    versions: Mapping[str, str] | None = None,
    **settings,
) -> Path:
    """A run directory with the counts of correct responses of each benchmark's problems."""
    some = Estimate(value=0.5, standard_error=0.1)
    figures = EvaluationFigures(
        model=model,
        model_fingerprint=model_fingerprint,
        settings=settings,
        settings_fingerprint="s",
        versions=dict(versions or {}),
        benchmarks={
            name: BenchmarkFigures(
                problems=len(counts),
                samples=samples,
                tokens=1,
                mean_tokens=some,
                truncated=0.0,
                verdicts={},
                note=note,
                correct={f"{name}-{i}": count for i, count in enumerate(counts)},
            )
            for name, counts in benchmarks.items()
        },
        macro=MacroFigures(benchmarks=list(benchmarks), avg=some, pass_at={}),
        tokens=1,
        truncated=0.0,
        verdicts={},
    )
    path.mkdir(parents=True, exist_ok=True)
    (path / file).write_bytes(msgspec.json.encode(figures))
    return path
