"""Supervises one recorded set of rollouts again through other servers, and computes a first iteration's loss.

Every response and probe is sampled once, by the local backend, and answered from the record after that. Scores and
candidate log-probabilities are asked of the servers that are compared. Policy, stages and loss are the run's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from only_teacher import only

from spot_async import stages_for
from spot_async.base import registry
from spot_async.base.tasks import gather
from spot_async.checks.diagnosis import capabilities
from spot_async.config import SamplingConfig, TrainingConfig
from spot_async.models.files import read_model
from spot_async.stages.services import Services, StagesSettings
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import Strategy, process_group
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import Generation, IntArray, Problem, Prompt, SamplingSettings, Supervision, Verdict

PROMPTS = 4
RESPONSE_TOKENS = 14
TRAINING = TrainingConfig(iterations=1, batch_size=PROMPTS, mini_batch_size=PROMPTS, learning_rate=1e-6)


class Recorded:
    """A generator that samples each request once."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._replies: dict[tuple[bytes, str, int], Generation] = {}

    async def generate(
        self, prompt_ids: IntArray, sampling: SamplingSettings, *, top_k: int = 0, deadline: float, **more: Any
    ) -> Generation:
        request = (prompt_ids.tobytes(), repr(sampling), top_k)
        if request not in self._replies:
            self._replies[request] = await self._backend.generate(prompt_ids, sampling, top_k=top_k, deadline=deadline)
        return self._replies[request]

    @property
    def size(self) -> int:
        return len(self._replies)


class Student:
    """Samples from the record; candidates are the server's under test."""

    def __init__(self, record: Recorded, backend: Any) -> None:
        self._record, self._backend = record, backend

    async def generate(self, prompt_ids: IntArray, sampling: SamplingSettings, **more: Any) -> Generation:
        return await self._record.generate(prompt_ids, sampling, **more)

    async def candidate_logprobs(self, *arguments: Any, **more: Any) -> Any:
        return await self._backend.candidate_logprobs(*arguments, **more)


class LengthIsRight:
    """A verifier that a random model satisfies now and then, and that anyone can repeat."""

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        return Verdict.CORRECT if sum(map(ord, response_text)) % 3 == 0 else Verdict.WRONG


async def supervise(
    policy: str, settings: Mapping[str, Any], record: Recorded, student: Any, teacher: Any, models: tuple[Path, Path]
) -> list[Supervision]:
    """What a run's first batch would be, with these two servers behind the recorded rollouts."""
    student_files, teacher_files = (
        read_model(role, str(path)) for role, path in zip(("student", "teacher"), models, strict=True)
    )
    kind = registry.load("policies", policy)
    sampling = SamplingConfig(max_prompt_tokens=64, max_response_tokens=RESPONSE_TOKENS)
    context = msgspec.structs.replace(teacher_files.policy_context, sampling=sampling)
    method = kind(kind.Settings(**settings), context)
    stages = stages_for(
        method,
        Services(
            student=Student(record, student),
            teachers=only(teacher, vocabulary=teacher_files.vocabulary),
            verifier=LengthIsRight(),
            vocabulary=student_files.vocabulary,
            capabilities={"student": await capabilities(student), "teacher": await capabilities(teacher)},
        ),
        StagesSettings(sampling=sampling),
    )
    prompts = _prompts(student_files.vocabulary.tokenizer)
    samples = await gather(method.supervise(prompt, stages.for_prompt(prompt)) for prompt in prompts)
    return [sample.supervision for per_prompt in samples for sample in per_prompt if sample.supervision is not None]


def first_loss(batch: Sequence[Supervision], student: Path, directory: Path) -> dict[str, float]:
    """The trainer's own figures of its first iteration."""
    settings = TrainerSettings(
        training=TRAINING,
        model_directory=str(student),
        run_directory=str(directory),
        temperature=1.0,
        seed=0,
        iterations=1,
    )
    with _alone(directory):
        trainer = StudentTrainer(settings, Strategy(), torch.device("cpu"))
        return trainer.train(Batch(iteration=0, samples=tuple(batch))).metrics


def _prompts(tokenizer: Any) -> list[Prompt]:
    import numpy as np

    texts = [f"the sum of {i} and {i + 3} equals one half of the product" for i in range(PROMPTS)]
    return [
        Prompt(
            ordinal=i,
            problem=Problem(id=str(i), text=text, answer="?"),
            token_ids=np.array(tokenizer(text)["input_ids"], np.int32),
        )
        for i, text in enumerate(texts)
    ]


@contextmanager
def _alone(directory: Path) -> Any:
    """A process group of this process only."""
    names = {"RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with process_group(str(directory), torch.device("cpu"), "none"):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
