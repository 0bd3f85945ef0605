"""Samples responses to the benchmarks' problems, and has them judged.

The protocol is the paper's. Each (problem, sample) has its own seed, whatever else is evaluated beside
it. A response that the verifier could not judge, even when asked again, counts as not correct, and is reported as such.
`benchmarks.py` decides what is asked, `results.py` computes the figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.base.events import Channel
from spot_async.base.retry import DEFAULT_ATTEMPTS, RetryPolicy
from spot_async.base.seeds import derive_seed
from spot_async.config import Config, EvaluationConfig
from spot_async.data.prompts import THINKING_END
from spot_async.errors import BudgetSpentError, ConfigError, DataError
from spot_async.evaluation.benchmarks import Benchmark, judged_benchmark
from spot_async.evaluation.response_log import JudgedResponse, ResponseKey
from spot_async.evaluation.results import BenchmarkResult, EvaluationResult, reported
from spot_async.models.episodes import Action, Observation, Step
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Generator, Verifier
from spot_async.replicas.leasing import ServicePool, pool_of
from spot_async.stages.episode import Episode, play
from spot_async.stages.plugin_contract import ask_judgement
from spot_async.stages.requests import identity
from spot_async.stages.services import EnvironmentService
from spot_async.stages.stage import Stage, StageLimits
from spot_async.types import FinishReason, Generation, IntArray, Problem, PromptSource, SamplingSettings, Verdict
from spot_async.verification import MathMatch, extract_boxed

S = TypeVar("S")
Job = tuple[int, int, int]  # benchmark, problem, sample


async def _nowhere(response: JudgedResponse) -> None:
    """Keep nothing: the default of `evaluate(keep=...)`."""


async def evaluate(
    sampler: ResponseSampler,
    *,
    on_progress: Callable[[int, int], None] = lambda finished, total: None,
    known: Mapping[ResponseKey, JudgedResponse] | None = None,
    keep: Callable[[JudgedResponse], Awaitable[None]] = _nowhere,
    saved: Mapping[ResponseKey, JudgedResponse] | None = None,
) -> EvaluationResult:
    """Run one evaluation, and return its responses.

    Responses in `known` are not sampled again; every new one is given to `keep`. `on_progress(finished, total)` is
    called after each response. If there are `saved` responses, these are judged again, and none is sampled.

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
                earlier = None if saved is None else saved[key_of(benchmarks, job)]
                response = await (sampler.sample(job) if earlier is None else sampler.judged(job, earlier))
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


@dataclass(eq=False)
class ResponseSampler:
    """Samples a response and has it judged. `stages` are the stages that it asks."""

    benchmarks: Sequence[Benchmark]
    config: EvaluationConfig
    _: KW_ONLY
    generator: Generator | ServicePool[Generator] | None  # without it and the vocabulary it only judges
    verifiers: Mapping[str, Verifier]  # by benchmark; responses to one without are not judged
    vocabulary: Vocabulary | None
    # By benchmark. Responses to one without an environment are one turn.
    environments: Mapping[str, EnvironmentService] = field(default_factory=dict)
    events: Channel = field(default_factory=Channel)  # its requests are published there

    def __post_init__(self) -> None:
        self._generation: Stage[Any] = self._stage("evaluation", self.generator)
        # One stage per verifier: benchmarks that share a verifier share its concurrency limit too.
        by_verifier = {id(each): self._stage("evaluation verify", each) for each in self.verifiers.values()}
        self._verification = {name: by_verifier[id(verifier)] for name, verifier in self.verifiers.items()}
        self._math_verify: dict[str, Stage[Verifier]] = {
            name: self._stage("evaluation verify", verifier.plain)
            for name, verifier in self.verifiers.items()
            if isinstance(verifier, MathMatch)
        }
        self._environments = {
            name: (each, self._stage("evaluation environment", each.server)) for name, each in self.environments.items()
        }
        playing = (stage for _, stage in self._environments.values())
        self.stages: tuple[Stage[Any], ...] = (self._generation, *by_verifier.values(), *playing)

    def _stage(self, name: str, service: S | ServicePool[S]) -> Stage[S]:
        limits = StageLimits(
            concurrency=self.config.concurrency,
            timeout_s=self.config.timeout_s,
            attempt_timeout_s=self.config.attempt_timeout_s,
            retry=RetryPolicy(DEFAULT_ATTEMPTS),
            waiting_capacity=1,
        )
        return Stage(name, pool_of(service), limits, jitter=lambda: 0.5, events=self.events)

    async def sample(self, job: Job) -> JudgedResponse:
        """Return the judged response of one job."""
        assert self.vocabulary is not None
        b, j, i = job
        benchmark = self.benchmarks[b]
        problem, prompt_ids = benchmark.sources[j].problem, benchmark.sources[j].token_ids
        sampling = SamplingSettings(
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            further=self.config.further,
            max_tokens=benchmark.max_response_tokens,
            stop_token_ids=self.vocabulary.end_token_ids,
            seed=derive_seed(self.config.seed, j, i),
            vocab_limit=benchmark.vocab_limit,
        )
        turns: int | msgspec.UnsetType = msgspec.UNSET
        if benchmark.name in self._environments:
            response, episode = await self._played(job, benchmark.sources[j], sampling)
            finish_reason, tokens = response.finish_reason, int(episode.counted.sum())
            token_ids, turns = episode.last_turn, len(episode.starts)
        else:
            token_ids, finish_reason = await self._response(job, prompt_ids, sampling)
            tokens = len(token_ids)
        return await self.judged(
            job,
            JudgedResponse(
                benchmark=benchmark.name,
                problem_id=problem.id,
                sample=i,
                verdict=None,
                tokens=tokens,
                finish_reason=finish_reason,
                response=self._cut(self.vocabulary.decode(token_ids)),
                turns=turns,
                problem=problem.shown,
                gold=problem.answer,
                choices=problem.choices,
                tier=problem.tier,
                seed=sampling.seed,
            ),
        )

    async def _played(self, job: Job, source: PromptSource, sampling: SamplingSettings) -> tuple[Generation, Episode]:
        """Play an episode, whose environment has the seed of its problem and sample."""
        service, stage = self._environments[self.benchmarks[job[0]].name]

        def turn(before: IntArray) -> Awaitable[Generation]:
            seed = derive_seed(sampling.seed, *identity(0, None, before)) if len(before) else sampling.seed
            room = msgspec.structs.replace(sampling, seed=seed, max_tokens=sampling.max_tokens - len(before))
            return self._generate(job, np.concatenate([source.token_ids, before], dtype=np.int32), room)

        def act(steps: Sequence[Step], action: Action) -> Awaitable[Observation]:
            asked: Any = source.problem, steps, action
            return stage.ask(job, lambda each, deadline: each.act(*asked, seed=sampling.seed, deadline=deadline))

        return await play(service.rules, turn, act, most=sampling.max_tokens)

    async def _response(
        self, job: Job, prompt_ids: IntArray, sampling: SamplingSettings
    ) -> tuple[IntArray, FinishReason]:
        """Return a response's tokens, those included that end its thinking, and what ended it."""
        assert self.vocabulary is not None
        most = self.config.thinking_tokens
        if most is None:
            whole = await self._generate(job, prompt_ids, sampling)
            return whole.token_ids, whole.finish_reason
        begun = await self._generate(job, prompt_ids, msgspec.structs.replace(sampling, max_tokens=most))
        if begun.finish_reason != "length":
            return begun.token_ids, begun.finish_reason
        is_over = THINKING_END in self.vocabulary.whole_text(begun.token_ids)
        end = self.vocabulary.encode("" if is_over else f"\n{THINKING_END}\n\n")
        read = np.concatenate([begun.token_ids, end])[: sampling.max_tokens]
        if not (left := sampling.max_tokens - len(read)):
            return read, "length"
        rest = msgspec.structs.replace(sampling, max_tokens=left, seed=derive_seed(sampling.seed, "answer"))
        answer = await self._generate(job, np.concatenate([prompt_ids, read]), rest)
        return np.concatenate([read, answer.token_ids]), answer.finish_reason

    async def _generate(self, job: Job, prompt_ids: IntArray, sampling: SamplingSettings) -> Generation:
        session = f"eval-{job[0]}-{job[1]}"
        generation: Generation = await self._generation.ask(
            job,
            lambda generator, deadline: generator.generate(prompt_ids, sampling, session=session, deadline=deadline),
            session=session,
            tokens=len(prompt_ids) + sampling.max_tokens,
            work=lambda generation: len(generation.token_ids),
        )
        return generation

    def _cut(self, text: str) -> str:
        """Return what stands before the first stop text."""
        return text[: min((at for stop in self.config.stop if (at := text.find(stop)) >= 0), default=len(text))]

    async def judged(self, job: Job, response: JudgedResponse) -> JudgedResponse:
        """Return a response with its verdict, which is None if the benchmark has no verifier, and what that reads."""
        benchmark = self.benchmarks[job[0]]
        verification = self._verification.get(benchmark.name)
        if benchmark.verifier is None or verification is None:
            return response
        problem = benchmark.sources[job[1]].problem
        verdict = (await ask_judgement(verification, job, problem, response.response)).verdict
        if verdict is Verdict.UNJUDGED:
            raise ConfigError(
                f"{benchmark.key}: its verifier called a response to problem {problem.id!r} neither right nor wrong, "
                "and an evaluation counts those that are right: let it give verdicts"
            )
        extracted = extract_boxed(response.response) if benchmark.verifier.READS_BOX else None
        own: Verdict = verdict
        if (math_verify := self._math_verify.get(benchmark.name)) is not None:
            own = (await ask_judgement(math_verify, job, problem, response.response)).verdict
        return msgspec.structs.replace(
            response, verdict=verdict, extracted=extracted, math_verify=msgspec.UNSET if own is verdict else own
        )


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


def saved_benchmarks(config: Config, saved: Mapping[ResponseKey, JudgedResponse], name: str) -> list[Benchmark]:
    """Return the benchmarks of an evaluation as its responses tell of them, with the verifiers of `config`.

    Raises DataError, which calls their file `name`, for responses that are missing or do not tell.
    """
    evaluation = config.evaluation
    assert evaluation is not None
    template = next((each.template for each in saved.values() if each.template), None)
    benchmarks = []
    for benchmark in evaluation.sets():
        rows = {each.problem_id: each for each in saved.values() if each.benchmark == benchmark and each.problem}
        problems = (
            Problem(id=each.problem_id, text=each.problem, answer=each.gold, tier=each.tier, choices=each.choices)
            for each in rows.values()
        )
        sources = [PromptSource(problem=problem, token_ids=np.zeros(0, np.int32)) for problem in problems]
        benchmarks.append(replace(judged_benchmark(benchmark, sources, config, evaluation), template=template))
    if keys_of(benchmarks) - saved.keys() or not all(each.sources for each in benchmarks):
        raise DataError(f"{name}: lacks responses, or their problems, as older versions wrote it: evaluate again")
    return benchmarks


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
