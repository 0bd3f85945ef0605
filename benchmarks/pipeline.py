"""Runs strict SPOT iterations on the shipped example, with everything that a run has but training, for benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from spot_async.config import ProblemSetConfig, PromptConfig, SamplingConfig, StagesConfig
from spot_async.data import load_problem_set
from spot_async.data.prompts import PromptRenderer, PromptSchedule, PromptSource, render_all
from spot_async.errors import RequestError
from spot_async.loop.orchestrator import IterationResult, Orchestrator, OrchestratorSettings
from spot_async.models.vocabulary import Vocabulary
from spot_async.policies.spot import SpotPolicy, SpotSettings
from spot_async.stages.stages import Services, Stages
from spot_async.types import PolicyContext, Prompt, Supervision, TrainReport, WeightSnapshot, WeightVersion

EXAMPLE = Path(__file__).parent.parent / "examples" / "running_sum"
VOCAB = 48
PROBES = 8  # 2 positions with 4 candidates each


class InstantTrainer:
    """A trainer that does nothing, so that the next iteration starts at once."""

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        return TrainReport(snapshot=WeightSnapshot(directory="", version=WeightVersion(0, iteration + 1)), metrics={})


class Silence:
    def iteration_finished(self, result: IterationResult) -> None:
        pass

    def prompt_died(self, prompt: Prompt, error: RequestError) -> None:
        raise error


@functools.cache
def _example() -> tuple[Vocabulary, Sequence[PromptSource]]:
    """Return the example's vocabulary and prompts. They are read once, as a run does before it starts."""
    vocabulary = Vocabulary.load(EXAMPLE / "student")
    renderer = PromptRenderer(vocabulary, PromptConfig(instruction=""))
    problems = ProblemSetConfig(path=str(EXAMPLE / "data" / "train.jsonl"))
    return vocabulary, render_all(load_problem_set(problems, "data.train").problems, renderer, 64)


def make_orchestrator(
    services: Services, stages: StagesConfig, *, batch_size: int, iterations: int, max_response_tokens: int
) -> Orchestrator:
    vocabulary, sources = _example()
    return Orchestrator(
        OrchestratorSettings(
            iterations=iterations,
            batch_size=batch_size,
            max_staleness=0,
            capacity_prompts=batch_size,
            capacity_bytes=1 << 30,
            max_response_tokens=max_response_tokens,
            vocab_size=VOCAB,
            weight_update_timeout_s=60.0,
            max_dead_share=0.0,
        ),
        prompts=PromptSchedule(
            sources, batch_size=batch_size, run_seed=0, shuffle=True, epochs=None, iterations=iterations
        ),
        policy=SpotPolicy(SpotSettings(), PolicyContext(vocab_size=VOCAB, tokenizer=vocabulary.tokenizer)),
        stages=Stages(
            services,
            stages,
            SamplingConfig(max_prompt_tokens=64, max_response_tokens=max_response_tokens),
            student=vocabulary,
            teacher=vocabulary,
            run_seed=0,
            max_running_prompts=batch_size,
            max_probes_per_prompt=PROBES,
        ),
        trainer=InstantTrainer(),
        weight_sinks=[],
        observer=Silence(),
    )
