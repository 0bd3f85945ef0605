"""Samples responses to the benchmarks' problems, and has them judged.

The protocol is the paper's. Each (problem, sample) has its own seed, whatever else is evaluated beside
it. A response that the verifier could not judge, even when asked again, counts as not correct, and is reported as such.
`benchmarks.py` decides what is asked, `results.py` computes the figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from spot_async.base.events import Channel
from spot_async.base.retry import DEFAULT_ATTEMPTS, RetryPolicy
from spot_async.base.seeds import derive_seed
from spot_async.config import EvaluationConfig
from spot_async.errors import BudgetSpentError, ConfigError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.response_log import JudgedResponse, ResponseKey
from spot_async.evaluation.results import BenchmarkResult, EvaluationResult, reported
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Generator, Verifier
from spot_async.replicas.leasing import ServicePool, pool_of
from spot_async.stages.plugin_contract import ask_judgement
from spot_async.stages.stage import Stage, StageLimits
from spot_async.types import Problem, SamplingSettings, Verdict
from spot_async.verification.normalization import extract_boxed

S = TypeVar("S")
Job = tuple[int, int, int]  # benchmark, problem, sample


async def _nowhere(response: JudgedResponse) -> None:
    """Keep nothing: the default of `evaluate(keep=...)`."""


async def evaluate(
    sampler: ResponseJudge,
    *,
    on_progress: Callable[[int, int], None] = lambda finished, total: None,
    known: Mapping[ResponseKey, JudgedResponse] | None = None,
    keep: Callable[[JudgedResponse], Awaitable[None]] = _nowhere,
) -> EvaluationResult:
    """Run one evaluation, and return its responses.

    Responses in `known` are not sampled again; every new one is given to `keep`. `on_progress(finished, total)` is
    called after each response.

    Raises the errors of failed requests in an exception group. Raises `BudgetSpentError` when the budget runs out, but
    only after every response that was paid for has been kept.
    """
    benchmarks, config = sampler.benchmarks, sampler.config
    total = sum(benchmark.samples * len(benchmark.sources) for benchmark in benchmarks)
    judged = dict(known or {})
    jobs = iter([job for job in _jobs(benchmarks) if key_of(benchmarks, job) not in judged])
    spent: list[BudgetSpentError] = []

    async def work(jobs: Iterator[Job]) -> None:
        for job in jobs:
            try:
                response = await sampler.sample(job)
            except BudgetSpentError as error:
                # Raised only after the TaskGroup: raised here, it would cancel responses that are paid for.
                spent.append(error)
                return
            await keep(response)
            judged[response.key] = response
            on_progress(len(judged), total)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(config.concurrency, total)):
            group.create_task(work(jobs))
    if spent:
        raise spent[0]
    return collected(benchmarks, judged, config.pass_k)


class ResponseJudge:
    """Has responses judged. `stages` are the stages that it asks."""

    def __init__(
        self,
        benchmarks: Sequence[Benchmark],
        config: EvaluationConfig,
        *,
        verifiers: Mapping[str, Verifier],
        events: Channel | None = None,
    ) -> None:
        """Make a judge that has asked nothing. Its requests are published on `events`.

        `verifiers` are by benchmark; responses to a benchmark without one are not judged.
        """
        self.benchmarks = benchmarks
        self.config = config
        self._events = events
        # One stage per verifier: benchmarks that share a verifier share its concurrency limit too.
        by_verifier = {id(each): self._stage("evaluation verify", each) for each in verifiers.values()}
        self._verification = {name: by_verifier[id(verifier)] for name, verifier in verifiers.items()}
        self.stages: tuple[Stage[Any], ...] = tuple(by_verifier.values())

    def _stage(self, name: str, service: S | ServicePool[S]) -> Stage[S]:
        limits = StageLimits(
            concurrency=self.config.concurrency,
            timeout_s=self.config.timeout_s,
            attempt_timeout_s=self.config.attempt_timeout_s,
            retry=RetryPolicy(DEFAULT_ATTEMPTS),
            waiting_capacity=1,
        )
        return Stage(name, pool_of(service), limits, jitter=lambda: 0.5, events=self._events)

    async def sample(self, job: Job) -> JudgedResponse:
        """Return the judged response of one job."""
        raise NotImplementedError

    async def judged(self, job: Job, response: JudgedResponse) -> JudgedResponse:
        """Return the response with its verdict, which is None if the benchmark has no verifier, and what it is on."""
        benchmark = self.benchmarks[job[0]]
        problem = benchmark.sources[job[1]].problem
        reads_box = benchmark.verifier is not None and benchmark.verifier.READS_BOX
        return msgspec.structs.replace(
            response,
            verdict=await self._verdict(job, benchmark, problem, response.response),
            problem=problem.shown,
            gold=problem.answer,
            choices=problem.choices,
            tier=problem.tier,
            extracted=extract_boxed(response.response) if reads_box else None,
        )

    async def _verdict(self, job: Job, benchmark: Benchmark, problem: Problem, text: str) -> Verdict | None:
        """Return the verdict on a response; None if the benchmark has no verifier."""
        verification = self._verification.get(benchmark.name)
        if verification is None:
            return None
        verdict = (await ask_judgement(verification, job, problem, text)).verdict
        if verdict is Verdict.UNJUDGED:
            raise ConfigError(
                f"{benchmark.key}: its verifier called a response to problem {problem.id!r} neither right nor wrong, "
                "and an evaluation counts those that are right: let it give verdicts"
            )
        return verdict


class ResponseSampler(ResponseJudge):
    """Samples a response and has it judged."""

    def __init__(
        self,
        benchmarks: Sequence[Benchmark],
        config: EvaluationConfig,
        *,
        generator: Generator | ServicePool[Generator],
        verifiers: Mapping[str, Verifier],
        vocabulary: Vocabulary,
        events: Channel | None = None,
    ) -> None:
        super().__init__(benchmarks, config, verifiers=verifiers, events=events)
        self._vocabulary = vocabulary
        self._generation = self._stage("evaluation", generator)
        self.stages = (self._generation, *self.stages)

    async def sample(self, job: Job) -> JudgedResponse:
        """Return the judged response of one job."""
        b, j, i = job
        benchmark = self.benchmarks[b]
        problem, prompt_ids = benchmark.sources[j].problem, benchmark.sources[j].token_ids
        sampling = SamplingSettings(
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            max_tokens=benchmark.max_response_tokens,
            stop_token_ids=self._vocabulary.end_token_ids,
            seed=derive_seed(self.config.seed, j, i),
            vocab_limit=benchmark.vocab_limit,
        )
        session = f"eval-{b}-{j}"
        generation = await self._generation.ask(
            job,
            lambda generator, deadline: generator.generate(prompt_ids, sampling, session=session, deadline=deadline),
            session=session,
            tokens=len(prompt_ids) + sampling.max_tokens,
            work=lambda generation: len(generation.token_ids),
        )
        response = JudgedResponse(
            benchmark=benchmark.name,
            problem_id=problem.id,
            sample=i,
            verdict=None,
            tokens=len(generation.token_ids),
            finish_reason=generation.finish_reason,
            response=self._vocabulary.decode(generation.token_ids),
            seed=sampling.seed,
        )
        return await self.judged(job, response)


def collected(
    benchmarks: Sequence[Benchmark], judged: Mapping[ResponseKey, JudgedResponse], pass_k: Sequence[int]
) -> EvaluationResult:
    """Return all responses in the order of benchmarks, problems and samples, whatever order they came in."""
    wanted = reported_k(benchmarks, pass_k)
    return EvaluationResult(
        tuple(
            BenchmarkResult(
                tiers=tuple(source.problem.tier for source in benchmark.sources),
                responses=tuple(
                    tuple(judged[key_of(benchmarks, (b, j, i))] for i in range(benchmark.samples))
                    for j in range(len(benchmark.sources))
                ),
                name=benchmark.name,
                pass_k=tuple(wanted.get(benchmark.name, ())),
                is_judged=benchmark.verifier is not None,
                in_macro=benchmark.in_macro,
                note=benchmark.note,
            )
            for b, benchmark in enumerate(benchmarks)
        )
    )


def reported_k(benchmarks: Sequence[Benchmark], pass_k: Sequence[int]) -> dict[str, list[int]]:
    """Return the k of Pass@k to report, by judged benchmark, including those that the mean over benchmarks needs."""
    judged = [benchmark for benchmark in benchmarks if benchmark.verifier is not None]
    of_mean = {min(each.samples for each in members)} if (members := [each for each in judged if each.in_macro]) else ()
    return {benchmark.name: reported([*pass_k, *of_mean], benchmark.samples) for benchmark in judged}


def keys_of(benchmarks: Sequence[Benchmark]) -> set[ResponseKey]:
    """Return the keys of all responses that a complete evaluation has."""
    return {key_of(benchmarks, job) for job in _jobs(benchmarks)}


def _jobs(benchmarks: Sequence[Benchmark]) -> Iterator[Job]:
    """Return every response that the benchmarks ask for: first benchmark first, its problems in order."""
    for b, benchmark in enumerate(benchmarks):
        for j in range(len(benchmark.sources)):
            for i in range(benchmark.samples):
                yield b, j, i


def key_of(benchmarks: Sequence[Benchmark], job: Job) -> ResponseKey:
    b, j, i = job
    return ResponseKey(benchmarks[b].name, benchmarks[b].sources[j].problem.id, i)
