"""lighteval's command with a task of ours alone; `test_lighteval.py` starts it in lighteval's environment.

    python lighteval_task.py FOLDER ... runs `lighteval ...` on the task `sums` of the problems in FOLDER/test.jsonl

It imports nothing of spot-async. Other tasks of lighteval ask the network as soon as they are imported.
"""

from __future__ import annotations

import sys
from typing import Any

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.registry import Registry
from lighteval.tasks.requests import Doc


def asked(row: dict[str, Any], task_name: str) -> Doc:
    return Doc(task_name=task_name, query=row["problem"], choices=[row["answer"]], gold_index=0, id=row["id"])


if __name__ == "__main__":
    task = LightevalTaskConfig(
        name="sums",
        prompt_function=asked,
        hf_repo=sys.argv.pop(1),
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        generation_size=100,
        metrics=[Metrics.expr_gold_metric],
        stop_sequence=[],
    )
    Registry.load_all_task_configs = staticmethod(lambda *_, **__: {"sums": task})
    from lighteval.__main__ import app

    app()
