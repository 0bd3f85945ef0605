"""Trains with TRL's own trainers, for `beside_trl.py`, in an environment that has `trl`.

    python benchmarks/beside_trl_peer.py < jobs

A line of input is a job in JSON, and a line of output what it found. So libraries are loaded once. Each job trains the
same initial model for some iterations, each of which ends with one update on all of its responses.

`DistillationTrainer` samples from the student and minimises the reverse KL of whole rows to a teacher in this process.
`GRPOTrainer` samples groups, rewards a right answer in a box, and holds the student to the initial one. Both sample by
`generate` of transformers, since vLLM in a trainer's process needs a GPU. Layers are not recomputed, all rows of an
iteration are one forward pass, and nothing is saved or reported: that is TRL at its fastest here.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

MAX_RESPONSE_TOKENS, LEARNING_RATE, WARM_UP, REFERENCE_KL = 160, 2e-4, 3, 1e-3  # configs/quickstart.yaml, grpo.yaml
BOXED = re.compile(r"\\boxed\{(-?\d+)\}")


class Clock(TrainerCallback):
    """Notes when training begins and when each iteration ends: wall seconds and this process's CPU seconds."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    on_step_end = on_train_begin


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each completion whose last box has the answer."""
    boxes = [BOXED.findall(completion[0]["content"]) for completion in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(boxes, answer, strict=True)]


def trainer(job: dict[str, Any], directory: str) -> DistillationTrainer | GRPOTrainer:
    """Return the trainer of a job, with the optimiser and the sampling that `spot-async train` has."""
    problems = [json.loads(line) for line in Path(job["problems"]).read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": each["problem"]}], "answer": each["answer"]} for each in problems]
    common: dict[str, Any] = {
        "output_dir": directory,
        "max_steps": job["iterations"],
        "per_device_train_batch_size": job["prompts"] * job["samples"],
        "gradient_checkpointing": False,
        "max_completion_length": MAX_RESPONSE_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARM_UP,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "seed": job["seed"],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    student = AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32, trust_remote_code=False)
    given: dict[str, Any] = {
        "model": student,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(job["student"], trust_remote_code=False),
    }
    if job["method"] == "opd":
        teacher = AutoModelForCausalLM.from_pretrained(job["teacher"], dtype=torch.float32, trust_remote_code=False)
        return DistillationTrainer(args=DistillationConfig(beta=1.0, **common), teacher_model=teacher, **given)
    groups = {"num_generations": job["samples"], "beta": REFERENCE_KL, "epsilon": 0.2, "delta": 3.0}
    return GRPOTrainer(args=GRPOConfig(**groups, **common), reward_funcs=reward, **given)


def found(job: dict[str, Any]) -> dict[str, Any]:
    """Train; return each iteration's wall and CPU seconds, tokens of a response, and loss or reward."""
    torch.set_num_threads(job["threads"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        training = trainer(job, directory)
        training.add_callback(clock)
        training.train()
    rows = [row for row in training.state.log_history if "completions/mean_length" in row]
    steps = list(itertools.pairwise(clock.marks))
    return {
        "wall_s": [after[0] - before[0] for before, after in steps],
        "cpu_s": [after[1] - before[1] for before, after in steps],
        "tokens": [row["completions/mean_length"] for row in rows],
        "learned": [row["loss" if job["method"] == "opd" else "reward"] for row in rows],
    }


if __name__ == "__main__":
    answers = sys.stdout
    for line in sys.stdin:
        with redirect_stdout(sys.stderr):
            answer = found(json.loads(line))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
