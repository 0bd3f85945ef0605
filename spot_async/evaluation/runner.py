"""Samples k responses to each held-out problem, judges them, and makes the figures of a table.

Protocol of method.md section 6: native chat template, temperature 1.0, top-p 0.8, one seed per
(problem, sample). A response without evidence after a second try counts as not correct, and is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.actor import Stage
from spot_async.config import EvaluationConfig
from spot_async.evaluation.metrics import avg_at_k_per_problem, pass_at_k_per_problem, standard_error
from spot_async.prompts import PromptSource
from spot_async.protocols import Generator, Verifier
from spot_async.replicas.service_pool import ServicePool, pool_of
from spot_async.retry import DEFAULT_ATTEMPTS, RetryPolicy
from spot_async.seeds import derive_seed
from spot_async.stages import ask_verdict
from spot_async.types import BoolArray, SamplingSettings, Verdict
from spot_async.vocabulary import Vocabulary

S = TypeVar("S")
ALL_TIERS = "all"


class JudgedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response of an evaluation; one line of its JSONL file."""

    problem_id: str
    sample: int
    verdict: Verdict
    tokens: int
    finish_reason: str
    response: str


@dataclass(frozen=True)
class Figures:
    """Avg@k and Pass@k of one tier, in [0, 1], with standard errors over its problems."""

    tier: str
    problems: int
    avg: float
    avg_error: float
    pass_: float
    pass_error: float


@dataclass(frozen=True)
class EvaluationResult:
    """All responses of one evaluation, and what they amount to."""

    tiers: tuple[str | None, ...]  # of each problem
    responses: tuple[tuple[JudgedResponse, ...], ...]  # problems x samples

    @property
    def correct(self) -> BoolArray:
        """(problems, samples)"""
        return np.array([[r.verdict is Verdict.CORRECT for r in row] for row in self.responses], dtype=np.bool_)

    @property
    def samples(self) -> int:
        return len(self.responses[0])

    def tier_names(self) -> list[str]:
        """Tiers in order of appearance, `all` last."""
        return [*dict.fromkeys(tier for tier in self.tiers if tier is not None), ALL_TIERS]

    def in_tier(self, tier: str) -> BoolArray:
        """(problems,) which problems a row of the table is about."""
        return np.array([tier in (ALL_TIERS, each) for each in self.tiers], dtype=np.bool_)

    def figures(self, tier: str) -> Figures:
        correct = self.correct[self.in_tier(tier)]
        average, passed = avg_at_k_per_problem(correct), pass_at_k_per_problem(correct, self.samples)
        return Figures(
            tier=tier,
            problems=len(correct),
            avg=float(average.mean()),
            avg_error=standard_error(average),
            pass_=float(passed.mean()),
            pass_error=standard_error(passed),
        )

    def count(self, verdict: Verdict) -> int:
        return sum(response.verdict is verdict for row in self.responses for response in row)

    @property
    def tokens(self) -> int:
        return sum(response.tokens for row in self.responses for response in row)


async def evaluate(
    sources: Sequence[PromptSource],
    config: EvaluationConfig,
    *,
    generator: Generator | ServicePool[Generator],
    verifier: Verifier,
    vocabulary: Vocabulary,
    on_progress: Callable[[int, int], None],
    on_stages: Callable[[Sequence[Stage[Any]]], None] = lambda stages: None,
) -> EvaluationResult:
    """Run one evaluation. `on_progress(finished, total)` is called after each response, `on_stages` once before."""

    def stage(name: str, service: S | ServicePool[S]) -> Stage[S]:
        return Stage(
            name,
            pool_of(service),
            concurrency=config.concurrency,
            timeout_s=config.timeout_s,
            retry=RetryPolicy(DEFAULT_ATTEMPTS),
            mailbox_capacity=1,
            jitter=lambda: 0.5,
        )

    generation_stage = stage("evaluation", generator)
    verification = stage("evaluation verify", verifier)
    on_stages((generation_stage, verification))
    total = len(sources) * config.samples
    judged: dict[tuple[int, int], JudgedResponse] = {}
    jobs = ((j, i) for j in range(len(sources)) for i in range(config.samples))

    async def work(jobs: Iterator[tuple[int, int]]) -> None:
        for j, i in jobs:
            judged[j, i] = await judge(j, i)
            on_progress(len(judged), total)

    async def judge(j: int, i: int) -> JudgedResponse:
        sampling = SamplingSettings(
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_response_tokens,
            stop_token_ids=vocabulary.end_token_ids,
            seed=derive_seed(config.seed, j, i),
        )
        problem, prompt_ids = sources[j].problem, sources[j].token_ids
        session = f"eval-{j}"
        generation = await generation_stage.ask(
            (j, i),
            lambda generator, deadline: generator.generate(prompt_ids, sampling, session=session, deadline=deadline),
            session=session,
            tokens=len(prompt_ids) + sampling.max_tokens,
            work=lambda generation: len(generation.token_ids),
        )
        text = vocabulary.decode(generation.token_ids)
        verdict = await ask_verdict(verification, (j, i), problem, text)
        return JudgedResponse(
            problem_id=problem.id,
            sample=i,
            verdict=verdict,
            tokens=len(generation.token_ids),
            finish_reason=generation.finish_reason,
            response=text,
        )

    async with asyncio.TaskGroup() as group:
        for _ in range(min(config.concurrency, total)):
            group.create_task(work(jobs))
    return EvaluationResult(
        tiers=tuple(source.problem.tier for source in sources),
        responses=tuple(tuple(judged[j, i] for i in range(config.samples)) for j in range(len(sources))),
    )


def paired_change(before: EvaluationResult, after: EvaluationResult, tier: str) -> tuple[float, float]:
    """Change of Avg@k on the same problems, and its standard error over them."""
    chosen = before.in_tier(tier)
    change = avg_at_k_per_problem(after.correct[chosen]) - avg_at_k_per_problem(before.correct[chosen])
    return float(change.mean()), standard_error(change)
