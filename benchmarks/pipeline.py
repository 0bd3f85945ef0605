"""Runs strict SPOT iterations on the shipped example, with everything that a run has but training, for benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spot_async.config import ProblemSetConfig, PromptConfig, SamplingConfig, StagesConfig
from spot_async.data import load_problem_set
from spot_async.data.prompts import PromptRenderer, PromptSchedule, render_all
from spot_async.loop.orchestrator import Orchestrator
from spot_async.models.vocabulary import Vocabulary
from spot_async.policies.spot import SpotPolicy
from spot_async.stages.services import TeacherService
from spot_async.testing.services import SimulatedTrainer
from spot_async.testing.simulation import make_policy, make_run
from spot_async.types import PolicyContext, PromptSource
from spot_async.verification.boxed_match import BoxedMatch

EXAMPLE = Path(__file__).parent.parent / "examples" / "running_sum"
VOCAB = 48
PROBES = 8  # 2 positions with 4 candidates each


@functools.cache
def _example() -> tuple[Vocabulary, Sequence[PromptSource]]:
    """Return the example's vocabulary and prompts. They are read once, as a run does before it starts."""
    vocabulary = Vocabulary.load(EXAMPLE / "student")
    renderer = PromptRenderer(vocabulary, PromptConfig(instruction=""))
    problems = ProblemSetConfig(path=str(EXAMPLE / "data" / "train.jsonl"))
    return vocabulary, render_all(load_problem_set(problems, "data.train").problems, renderer, 64)


def make_orchestrator(
    student: Any, teacher: Any, limits: StagesConfig, *, batch_size: int, iterations: int, max_response_tokens: int
) -> Orchestrator:
    vocabulary, sources = _example()
    return make_run(
        make_policy(SpotPolicy, PolicyContext(vocab_size=VOCAB, tokenizer=vocabulary.tokenizer)),
        student=student,
        teachers={"": TeacherService(server=teacher)},
        verifier=BoxedMatch(BoxedMatch.Settings()),
        trainer=SimulatedTrainer(step_s=0.0),  # trains nothing, so that the next iteration starts at once
        weight_sinks=[],
        prompts=PromptSchedule(
            sources, batch_size=batch_size, run_seed=0, shuffle=True, epochs=None, iterations=iterations
        ),
        vocabulary=vocabulary,
        limits=limits,
        sampling=SamplingConfig(max_prompt_tokens=64, max_response_tokens=max_response_tokens),
        iterations=iterations,
        batch_size=batch_size,
        vocab_size=VOCAB,
        max_dead_share=0.0,
    ).orchestrator
