"""Judges pairs of gold and response with another grader; `graders.py` starts it in that program's environment.

Reads `[gold, response]`, a JSON list a line, and writes `true` or `false`. It imports nothing of spot-async.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

Grader = Callable[[str, str], bool]


def lighteval() -> Grader:
    from lighteval.metrics.dynamic_metrics import (
        ExprExtractionConfig,
        LatexExtractionConfig,
        MultilingualExtractiveMatchMetric,
    )
    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.requests import Doc
    from lighteval.utils.language import Language

    metric = MultilingualExtractiveMatchMetric(
        language=Language.ENGLISH,
        fallback_mode="first_match",
        precision=5,
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig(boxed_match_priority=0)),
        aggregation_function=max,
    )

    def judge(gold: str, response: str) -> bool:
        doc = Doc(query="", choices=[f"${gold}$"], gold_index=0, task_name="")
        return bool(metric.compute(doc=doc, model_response=ModelResponse(text=[response])))

    return judge


def lm_eval() -> Grader:
    """Return what the tasks minerva_math and hendrycks_math report as `math_verify`."""
    from math_verify import parse, verify

    return lambda gold, response: bool(verify(parse(rf"\boxed{{{gold}}}"), parse(response)))


def trl() -> Grader:
    from trl.rewards import accuracy_reward

    def judge(gold: str, response: str) -> bool:
        return accuracy_reward([[{"content": response}]], [f"${gold}$"])[0] == 1.0

    return judge


def verl() -> Grader:
    """Return verl's `math_verify` reward. Its file is loaded alone: the package asks for Ray."""
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        raise SystemExit("verl is not installed here")
    path = Path(found.origin).parent / "utils" / "reward_score" / "math_verify.py"
    spec = importlib.util.spec_from_file_location("verl_math_verify", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verl_math_verify"] = module
    spec.loader.exec_module(module)
    return lambda gold, response: module._verify_in_subprocess(rf"\boxed{{{gold}}}", response) == 1.0


def main() -> None:
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    judge = {"lighteval": lighteval, "lm_eval": lm_eval, "trl": trl, "verl": verl}[sys.argv[1]]()
    for line in sys.stdin:
        verdict = False
        with contextlib.suppress(Exception):
            verdict = judge(*json.loads(line))
        replies.write(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()
