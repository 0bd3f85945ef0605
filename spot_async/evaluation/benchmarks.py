"""What an evaluation asks: each benchmark's problems, rendered in its format, with its limits and its verifier.

Everything here is read from files before anything starts. Evaluation always uses the student's own chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spot_async.config import BenchmarkConfig, Config, EvaluationConfig, PluginSettings
from spot_async.config_evaluation import ALL_TIERS
from spot_async.data import load_problem_set
from spot_async.errors import ConfigError, DataError
from spot_async.evaluation.formats import WorkedExamples, order_choices, with_options
from spot_async.model_files import ModelFiles
from spot_async.prompts import PromptRenderer, PromptSource
from spot_async.types import Problem

ONLY = "problems"  # what the set of `evaluation.problems` is called


@dataclass(frozen=True)
class Benchmark:
    """A set of problems as the student is asked them."""

    name: str
    sources: Sequence[PromptSource]
    samples: int
    max_response_tokens: int
    verifier: PluginSettings | None  # None where nothing is judged
    writes_outputs: bool = False  # a file for AlpacaEval's own tool
    in_macro: bool = True
    note: str | None = None  # how it is judged, where that is special
    counts: Mapping[str, int] = field(default_factory=dict)  # of its rows: read, dropped by reason
    reads_clock: bool = False  # whether the prompts have today's date in them

    @property
    def key(self) -> str:
        """Of the configuration, that describes it."""
        return "evaluation" if self.name == ONLY else f"evaluation.benchmarks.{self.name}"


def plan_benchmarks(config: Config, student: ModelFiles) -> list[Benchmark]:
    """Every benchmark of the `evaluation` section. Raises ConfigError or DataError, with the key to change."""
    assert config.evaluation is not None
    return [_plan(name, each, config, config.evaluation, student) for name, each in config.evaluation.sets().items()]


def _plan(
    name: str, settings: BenchmarkConfig, config: Config, evaluation: EvaluationConfig, student: ModelFiles
) -> Benchmark:
    key = evaluation.key_of(name)
    found = load_problem_set(settings, key)
    if named_all := next((each for each in found.problems if each.tier == ALL_TIERS), None):
        raise DataError(
            f"{key}: problem {named_all.id!r} has the tier {ALL_TIERS!r}, as results call all problems: rename it, or "
            f"choose another column with {key}.fields.tier"
        )
    is_judged = settings.format != "alpaca_eval"
    instruction = settings.instruction if settings.instruction is not None else config.prompt.instruction
    native = {"template": "student", "thinking": evaluation.thinking, "instruction": instruction if is_judged else ""}
    prompt = config.prompt.model_copy(update=native)
    max_tokens = settings.max_response_tokens or evaluation.max_response_tokens
    problems = _formatted(found.problems, settings, evaluation.seed, key)
    renderer = PromptRenderer(student.vocabulary, prompt)
    sources = _rendered(problems, renderer, student, max_tokens, key)
    return Benchmark(
        name=name,
        sources=sources,
        samples=(settings.samples or evaluation.samples) if is_judged else 1,
        max_response_tokens=max_tokens,
        verifier=settings.verifier_of(evaluation) if is_judged else None,
        writes_outputs=not is_judged,
        in_macro=settings.in_macro,
        note=_note(settings, evaluation),
        counts=found.counts,
        reads_clock=renderer.reads_clock(problems[0]),
    )


def _formatted(problems: Sequence[Problem], settings: BenchmarkConfig, seed: int, key: str) -> list[Problem]:
    """The texts and golds of a format."""
    if settings.format != "multiple_choice":
        return list(problems)
    if settings.order_choices:
        problems = [order_choices(problem, seed, key) for problem in problems]
    if settings.examples is None:
        return [with_options(problem, key) for problem in problems]
    examples = load_problem_set(settings.examples, f"{key}.examples").problems
    worked = WorkedExamples(examples, settings.example_count, f"{key}.examples")
    return [worked.before(problem) for problem in problems]


def _rendered(
    problems: Sequence[Problem], renderer: PromptRenderer, student: ModelFiles, max_tokens: int, key: str
) -> list[PromptSource]:
    """All of them: leaving out those that are too long would be another benchmark."""
    room = student.max_context_tokens - max_tokens
    sources = [PromptSource(problem=problem, token_ids=renderer.token_ids(problem)) for problem in problems]
    too_long = sum(len(source.token_ids) > room for source in sources)
    if too_long:
        owner = key.removesuffix(f".{ONLY}")
        raise ConfigError(
            f"{owner}.max_response_tokens={max_tokens} leaves {room} prompt tokens of the student's context of "
            f"{student.max_context_tokens}, too few for {too_long} of {len(sources)} problems: lower it"
        )
    return sources


def _note(settings: BenchmarkConfig, evaluation: EvaluationConfig) -> str | None:
    """What people who compare figures must know."""
    if settings.format == "alpaca_eval":
        return "not judged here: outputs for its own tool"
    verifier = settings.verifier_of(evaluation)
    usual = evaluation.verifier.model_dump(mode="json")
    special = {name: value for name, value in verifier.model_dump(mode="json").items() if usual.get(name) != value}
    if not special:
        return None
    kind = special.pop("kind", verifier.kind)
    defaults = type(verifier)(kind=verifier.kind).model_dump(mode="json")
    return ", ".join(
        [f"judged by {kind}", *(f"{name} {value}" for name, value in special.items() if value != defaults.get(name))]
    )
