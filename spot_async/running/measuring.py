"""Makes one evaluation in a run directory: continues it where it was begun, has it judged, and writes its files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import structlog

from spot_async.base import registry
from spot_async.base.events import Channel
from spot_async.config import Config
from spot_async.errors import DataError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.figures import read_figures
from spot_async.evaluation.formats import outputs_of
from spot_async.evaluation.identity import identity_of, settings_fingerprint
from spot_async.evaluation.response_log import Identity, ResponseLog, check_same, read_responses, write_whole
from spot_async.evaluation.results import EvaluationResult
from spot_async.evaluation.runner import collected, evaluate, keys_of, reported_k
from spot_async.loop.events import EvaluationBegan, ResponseJudged, StepBegan, TrainingView
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Generator, Verifier
from spot_async.replicas.leasing import ServicePool
from spot_async.run_directory.layout import RunDirectory


async def measure(
    config: Config,
    benchmarks: Sequence[Benchmark],
    vocabulary: Vocabulary,
    generator: Generator | ServicePool[Generator],
    directory: RunDirectory,
    events: Channel,
    when: str,
    weights: Path,
    beside: TrainingView | None = None,
) -> EvaluationResult | None:
    """Evaluate the `weights` that are served, and write the files; return None if the configuration has no evaluation.

    `when` is part of the files' names; it is empty for the only evaluation of a run directory. `beside` is what runs
    training meanwhile. Files that are there, as in a run that was resumed, are read, and nothing is asked.
    """
    if config.evaluation is None:
        return None
    step = f"evaluating {f'after iteration {int(when)}' if when.isdigit() else when}".strip()
    events.publish(StepBegan(step, beside))
    identity = identity_of(config, benchmarks, weights)
    log = ResponseLog(directory, f"{file_stem(when)}.jsonl", identity)
    if (finished := finished_evaluation(config, benchmarks, directory, when)) is not None:
        return finished
    known = log.open()
    async with AsyncExitStack() as stack:
        result = await evaluate(
            benchmarks,
            config.evaluation,
            generator=generator,
            verifiers=await open_verifiers(benchmarks, stack),
            vocabulary=vocabulary,
            on_progress=lambda finished, total: events.publish(ResponseJudged(finished, total)),
            on_stages=lambda stages: events.publish(EvaluationBegan(stages)),
            known=known,
            keep=log.append,
            events=events,
        )
    write_files(directory, when, weights, result, log, identity, benchmarks)
    log.discard_partial()
    avg = None if (figures := result.figures().avg) is None else figures.value
    structlog.get_logger().info("evaluated", when=when, avg=avg, tokens=result.tokens, continued_from=len(known))
    return result


def finished_evaluation(
    config: Config, benchmarks: Sequence[Benchmark], directory: RunDirectory, when: str
) -> EvaluationResult | None:
    """Return an evaluation from its files; None if it is not complete."""
    if config.evaluation is None or not (directory.path / f"{file_stem(when)}.json").exists():
        return None
    judged = read_responses(directory, f"{file_stem(when)}.jsonl")
    return None if keys_of(benchmarks) - judged.keys() else collected(benchmarks, judged, config.evaluation.pass_k)


def write_evaluation(
    config: Config,
    benchmarks: Sequence[Benchmark],
    directory: RunDirectory,
    when: str,
    weights: Path,
    result: EvaluationResult,
) -> None:
    """Write the files of an evaluation that was made under another name already."""
    identity = identity_of(config, benchmarks, weights)
    log = ResponseLog(directory, f"{file_stem(when)}.jsonl", identity)
    write_files(directory, when, weights, result, log, identity, benchmarks)


def write_files(
    directory: RunDirectory,
    when: str,
    weights: Path,
    result: EvaluationResult,
    log: ResponseLog,
    identity: Identity,
    benchmarks: Sequence[Benchmark],
) -> None:
    """Write the sorted responses, outputs for other tools, and last the figures. If those are there, everything is."""
    log.complete(result.responses)
    for benchmark, each in zip(benchmarks, result.benchmarks, strict=True):
        if benchmark.writes_outputs:
            problems, texts = (
                [source.problem for source in benchmark.sources],
                [row[0].response for row in each.responses],
            )
            outputs = outputs_of(problems, texts, generator=weights.name, dataset=benchmark.name)
            name = f"{file_stem(when)}-outputs-{benchmark.name}.json"
            write_whole(directory, name, msgspec.json.format(msgspec.json.encode(outputs), indent=2) + b"\n")
    write_figures(directory, when, weights, result, identity)


def write_figures(
    directory: RunDirectory, when: str, weights: Path, result: EvaluationResult, identity: Identity
) -> None:
    figures = result.evaluation_figures(
        model=str(weights.resolve()),  # resolved, since `RUN/student` is another one later
        model_fingerprint=identity.model,
        settings=identity.settings,
        settings_fingerprint=settings_fingerprint(identity.settings),
    )
    write_whole(
        directory, f"{file_stem(when)}.json", msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n"
    )


def add_pass_k(directory: RunDirectory, config: Config, benchmarks: Sequence[Benchmark], weights: Path) -> None:
    """Add the figures for every k of `evaluation.pass_k` to a complete evaluation, from its responses.

    Raise DataError if the responses are needed, and gone or damaged.
    """
    assert config.evaluation is not None
    pass_k = config.evaluation.pass_k
    found = read_figures(directory.path / f"{file_stem('')}.json").benchmarks
    there = {name: set(each.pass_at) for name, each in found.items() if each.avg is not None}
    if there == {name: set(ks) for name, ks in reported_k(benchmarks, pass_k).items()}:
        return
    log = ResponseLog(directory, f"{file_stem('')}.jsonl", identity_of(config, benchmarks, weights))
    judged = log.read_complete()
    if missing := keys_of(benchmarks) - judged.keys():
        raise DataError(f"{directory.path / file_stem('')}.jsonl lacks responses ({len(missing)}): evaluate again")
    write_figures(directory, "", weights, collected(benchmarks, judged, pass_k), log.identity)


def is_complete(directory: RunDirectory, config: Config, benchmarks: Sequence[Benchmark], weights: Path) -> bool:
    """Return whether the directory holds the whole evaluation already.

    Raise DataError if it holds one, or a part of one, of another model or of other settings.
    """
    wanted = identity_of(config, benchmarks, weights)
    path = directory.path / f"{file_stem('')}.json"
    if not path.exists():
        ResponseLog(directory, f"{file_stem('')}.jsonl", wanted).check()
        return False
    found = read_figures(path)
    identity = Identity(model=found.model_fingerprint, backend=wanted.backend, settings=found.settings)
    check_same(identity, wanted, str(path))
    return True


def file_stem(when: str) -> str:
    return f"evaluation-{when}" if when else "evaluation"


async def open_verifiers(benchmarks: Sequence[Benchmark], stack: AsyncExitStack) -> dict[str, Verifier]:
    """Open and return each benchmark's verifier, by the benchmark's name. Equal settings share one verifier."""
    opened: dict[str, Verifier] = {}
    found: dict[str, Verifier] = {}
    for benchmark in benchmarks:
        settings = benchmark.verifier
        if settings is None:
            continue
        key = settings.model_dump_json()
        if key not in opened:
            verifier: Verifier = registry.load("verifiers", settings.kind)(settings)
            opened[key] = await stack.enter_async_context(verifier)
        found[benchmark.name] = opened[key]
    return found
