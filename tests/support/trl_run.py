"""Trains a model for a step in TRL's `GRPOTrainer` on `noted_sums.py`: `python trl_run.py GIVEN.json FOUND.json`.

The interpreter is that of an environment with TRL. Nothing of spot-async is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from noted_sums import Sums
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


def main(model: str, rows: list[dict[str, str]], log: str, directory: str) -> dict[str, Any]:
    """Return the tools as the model is shown them, and each episode: its problem, messages, ids and reward."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    tokenizer.response_template = {**qwen3_template, "start_anchor": "<|assistant|>"}  # of the calculator's models
    episodes: list[dict[str, Any]] = []

    def note(completions: Any, completion_ids: Any, environments: Any, **columns: Any) -> list[float]:
        rewards = [environment.get_reward() for environment in environments]
        for each in zip(columns["id"], completions, completion_ids, rewards, strict=True):
            episodes.append(dict(zip(("id", "said", "ids", "reward"), each, strict=True)))
        return rewards

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[note],
        environment_factory=partial(Sums, log),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": row["problem"]}], **row} for row in rows]
        ),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=directory,
            max_steps=1,
            per_device_train_batch_size=4 * len(rows),
            num_generations=4,
            max_completion_length=96,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        ),
    )
    trainer.train()
    return {"tools": [get_json_schema(tool) for tool in trainer.tools], "episodes": episodes}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        found = main(**json.loads(Path(sys.argv[1]).read_text()), directory=own)
    Path(sys.argv[2]).write_text(json.dumps(found))
