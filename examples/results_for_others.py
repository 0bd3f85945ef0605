"""Writes an evaluation's figures as lm-eval's and lighteval's result files, and as a model card's `model-index`.

    python examples/results_for_others.py RUN [-o DIRECTORY]

RUN is a directory of `spot-async eval` or `train`, or one `evaluation*.json`. Three files are written, into RUN's own
directory unless `-o` names another: `results_lm_eval.json`, `results_lighteval.json` and `model_index.yaml`. In
lighteval's file metrics have its names, `avg@n` and `pass@k`. lm-eval has neither, so in its file they have ours.
The times of an evaluation that was stopped and continued are those of its last part.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

from spot_async.evaluation.metrics import BenchmarkFigures, Estimate, EvaluationFigures
from spot_async.tools.compare.reading import read_evaluated


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, metavar="DIRECTORY")
    given = parser.parse_args(arguments)
    found = read_evaluated(given.run)
    directory = given.output or found.path.parent
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "results_lm_eval.json": json.dumps(lm_eval_results(found.figures), indent=2),
        "results_lighteval.json": json.dumps(lighteval_results(found.figures), indent=2),
        "model_index.yaml": yaml.safe_dump({"model-index": model_index(found.figures)}, sort_keys=False),
    }
    for name, text in texts.items():
        (directory / name).write_text(text + "\n", encoding="utf-8")
        print(directory / name)


def lm_eval_results(figures: EvaluationFigures) -> dict[str, Any]:
    """Return what lm-eval's `results_<time>.json` has: a task for each benchmark, and the group `macro` of them."""
    judged = _judged(figures)
    results = {
        name: {"alias": name} | _with_errors(_metrics(each), "{},none", "{}_stderr,none")
        for name, each in judged.items()
    }
    return {
        "results": results,
        "group_subtasks": {"macro": figures.macro.benchmarks} if figures.macro is not None else {},
        "configs": {name: _task(figures, name, each) for name, each in judged.items()},
        "versions": dict.fromkeys(judged, figures.settings_fingerprint),
        "n-shot": {name: _shots(each) for name, each in judged.items()},
        "higher_is_better": {name: dict.fromkeys(_metrics(each), True) for name, each in judged.items()},
        "n-samples": {name: {"original": each.problems, "effective": each.problems} for name, each in judged.items()},
        "config": {"model": "spot-async", "model_args": figures.model, "limit": None, **figures.settings},
        "date": _ended_s(figures),
        "model_name": figures.model,
        "model_sha": figures.model_fingerprint,
        "total_evaluation_time_seconds": str(figures.seconds or 0.0),
    }


def lighteval_results(figures: EvaluationFigures) -> dict[str, Any]:
    """Return what lighteval's `results_<time>.json` has: a task `name|shots` for each benchmark, and `all`."""
    judged = _judged(figures)
    tasks = {name: f"{name}|{_shots(each)}" for name, each in judged.items()}
    results = {}
    for name, each in judged.items():
        named = {f"avg@n:n={each.samples}": each.avg}
        named |= {f"pass@k:k={k}&n={each.samples}": value for k, value in each.pass_at.items()}
        results[tasks[name]] = _with_errors(named, "{}", "{}_stderr")
    if figures.macro is not None:
        results["all"] = _with_errors({"avg@n": figures.macro.avg}, "{}", "{}_stderr")
    return {
        "config_general": {
            "model_config": {"model_name": figures.model, "model_sha": figures.model_fingerprint},
            "start_time": _ended_s(figures) - (figures.seconds or 0.0),
            "end_time": _ended_s(figures),
            "total_evaluation_time_secondes": str(figures.seconds or 0.0),  # as lighteval spells it
        },
        "results": results,
        "versions": dict.fromkeys(results, figures.settings_fingerprint),
        "config_tasks": {tasks[name]: _task(figures, name, each) for name, each in judged.items()},
    }


def model_index(figures: EvaluationFigures) -> list[dict[str, Any]]:
    """Return the `model-index` of a model card: an entry for each benchmark and metric, in percent."""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=benchmark,
            dataset_name=benchmark,
            metric_type=metric,
            metric_name=metric,
            metric_value=round(100 * estimate.value, 2),
            metric_args={"samples": each.samples, "problems": each.problems},
        )
        for benchmark, each in _judged(figures).items()
        for metric, estimate in _metrics(each).items()
    ]
    index: list[dict[str, Any]] = eval_results_to_model_index(Path(figures.model).name, results)
    return index


def _shots(figures: BenchmarkFigures) -> int:
    """Return how many worked examples stood before each question, which the benchmark's note says."""
    found = re.search(r"worked examples \((\d+)\)", figures.note or "")
    return int(found[1]) if found else 0


def _judged(figures: EvaluationFigures) -> Mapping[str, BenchmarkFigures]:
    return {name: each for name, each in figures.benchmarks.items() if each.avg is not None}


def _metrics(figures: BenchmarkFigures) -> dict[str, Estimate]:
    assert figures.avg is not None
    voted = {} if figures.maj is None else {f"maj@{figures.samples}": figures.maj}
    return {
        f"avg@{figures.samples}": figures.avg,
        **{f"pass@{k}": each for k, each in figures.pass_at.items()},
        **voted,
    }


def _with_errors(metrics: Mapping[str, Estimate | None], value: str, error: str) -> dict[str, float | None]:
    """Return a value and a standard error under the names that these patterns make of each metric's."""
    found: dict[str, float | None] = {}
    for name, each in metrics.items():
        if each is not None:
            found |= {value.format(name): each.value, error.format(name): each.standard_error}
    return found


def _task(figures: EvaluationFigures, name: str, of: BenchmarkFigures) -> dict[str, Any]:
    """Return a task's configuration: what settings say of the benchmark."""
    keys = (f"evaluation.benchmarks.{name}.", "evaluation.")
    said = {key.removeprefix(keys[0]).removeprefix(keys[1]): value for key, value in figures.settings.items()
            if key.startswith(keys[0]) or not key.startswith("evaluation.benchmarks.")}  # fmt: skip
    return {"task": name, "repeats": of.samples, "metadata": {"note": of.note}, "settings": said}


def _ended_s(figures: EvaluationFigures) -> float:
    """Return when the evaluation ended, in seconds since 1970; 0 where an older program wrote it."""
    return datetime.fromisoformat(figures.date).timestamp() if figures.date is not None else 0.0


if __name__ == "__main__":
    main()
