"""The schema of evaluation and its benchmarks, and the check that a preset keeps to the paper's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, TypeAdapter

from spot_async.config.base import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    check_attempt_timeout,
    spelled,
)
from spot_async.config.environment import EnvironmentConfig
from spot_async.config.plugins import BenchmarkVerifier, EvaluationVerifier, PluginSettings
from spot_async.config.problems import ENVIRONMENT, ProblemSetConfig, PromptConfig, Thinking

# Keys that `evaluation.preset: paper` keeps at their defaults, which are the paper's (appendix B).
FURTHER = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
PAPER_EVALUATION = (
    "template",
    "system",
    "stop",
    "thinking",
    "thinking_tokens",
    "samples",
    "temperature",
    "top_p",
    *FURTHER,
    "max_response_tokens",
    "seed",
)
PAPER_PROMPT = ("instruction",)
# Llama's templates print today's date. Fixing that date is no departure from the paper's protocol.
DATE_ARGUMENT = "date_string"

# Names in tables, metrics and files of results: for all problems of a benchmark, and for the mean over benchmarks.
ALL_TIERS = "all"
MACRO = "macro"
MEAN_COLUMN = "Avg."
RESERVED_NAMES = (ALL_TIERS, MACRO, MEAN_COLUMN)
ONLY = "problems"  # the name of the set in `evaluation.problems`, which has none of its own


NAME_WORDS = "a name is letters, digits, `_`, `.` and `-`, and begins with a letter or a digit"


class BenchmarkConfig(ProblemSetConfig):
    """A set of held-out problems, and where its evaluation differs from the others'. A plain value is its `path`."""

    format: Literal["boxed", "multiple_choice", "alpaca_eval"] = Field(
        "boxed",
        description="`boxed` asks for an answer, `multiple_choice` for an option's letter. `alpaca_eval` sends the "
        "bare instruction and writes one response each for AlpacaEval's own tool; nothing is judged",
    )
    verifier: BenchmarkVerifier = Field(
        None,
        description="default: `evaluation.verifier`, or `multiple_choice` for that format; settings need a `kind`",
    )
    environment: EnvironmentConfig | None = Field(None, description=ENVIRONMENT)
    instruction: str | None = Field(None, description="default: `prompt.instruction`; `alpaca_eval` never has one")
    samples: PositiveInt | None = Field(None, description="responses per problem; default: `evaluation.samples`")
    max_response_tokens: PositiveInt | None = Field(None, description="default: `evaluation.max_response_tokens`")
    order_choices: bool = Field(
        True, description="give options their letters in a seeded order, whatever order the file has"
    )
    examples: ProblemSetConfig | None = Field(
        None, description="worked examples in front of each question, of its category where they have one"
    )
    example_count: PositiveInt = Field(5, description="how many of `examples` each question has")
    in_macro: bool = Field(True, description="whether it counts for the mean over benchmarks, if it is judged")

    def _check(self) -> None:
        if self.format == "alpaca_eval" and (self.samples or 1) > 1:
            raise ValueError(f"samples={self.samples}: format=alpaca_eval writes one response each; remove it")
        if self.format == "alpaca_eval" and self.verifier is not None:
            raise ValueError("verifier: format=alpaca_eval judges nothing; remove it")
        if self.format == "alpaca_eval" and self.examples is not None:
            raise ValueError("examples: format=alpaca_eval asks the bare instruction; remove them")

    def verifier_of(self, evaluation: EvaluationConfig) -> PluginSettings | None:
        """Return the settings of the verifier that judges it; None for `alpaca_eval`, which nothing judges."""
        if self.format == "alpaca_eval":
            return None
        if self.verifier is None and self.format == "multiple_choice":
            return TypeAdapter(EvaluationVerifier).validate_python("multiple_choice")
        return self.verifier or evaluation.verifier


class EvaluationConfig(Section):
    """How the student is measured on problems that it is not trained on."""

    preset: Literal["paper"] | None = Field(
        None, description="`paper` keeps to the paper's protocol: keys that depart from it are refused"
    )
    problems: ProblemSetConfig | None = Field(None, description="held-out problems; exclusive with `benchmarks`")
    benchmarks: dict[Annotated[str, spelled(r"[A-Za-z0-9][A-Za-z0-9_.-]*", NAME_WORDS)], BenchmarkConfig] = Field(
        {}, description="several sets of held-out problems by name, reported one by one and as their mean"
    )
    template: Annotated[
        str, spelled(r"student|plain|.+\.jinja", "give student, plain or a path that ends in .jinja")
    ] = Field(
        "student", description="chat template of all prompts, as `prompt.template` has it; `plain` for base models"
    )
    thinking: Thinking = False
    thinking_tokens: PositiveInt | None = Field(
        None,
        description="so many tokens into a response, thinking that has not ended is ended by `</think>`; null: never",
    )
    system: str | None = Field(None, description="a system message in front of each problem; null: none")
    limit: PositiveInt | None = Field(None, description="only so many problems of each set, its first ones; null: all")
    samples: PositiveInt = Field(8, description="responses per problem: the n of Avg@n, and the largest k of Pass@k")
    pass_k: list[PositiveInt] = Field(
        [], description="further k, up to a benchmark's `samples`, for which an unbiased Pass@k is reported"
    )
    eval_every: int = Field(
        0,
        ge=0,
        description="iterations between evaluations during training, which keep the student of the best Avg@n; 0: none",
    )
    temperature: NonNegativeFloat = Field(1.0, description="divides the logits; 0 takes the likeliest token")
    top_p: Probability = Field(0.8, description="share of probability that is sampled from; 1 is all of it")
    top_k: PositiveInt | None = Field(None, description="how many of the likeliest tokens are sampled from; null: all")
    min_p: Probability | None = Field(None, description="least share of the likeliest token's probability; null: 0")
    presence_penalty: float | None = Field(None, description="as in vLLM and SGLang, like the next two; null: none")
    frequency_penalty: float | None = Field(None, description="likewise, for each time that a token came; null: none")
    repetition_penalty: PositiveFloat | None = Field(None, description="a factor, of the prompt's tokens too; null: 1")
    stop: list[str] = Field([], description="texts that end an answer: what stands from the first of them on is cut")
    max_response_tokens: PositiveInt = Field(8192, description="longest response")
    seed: int = Field(42, ge=0, description="the seed of each sample of each problem derives from it")
    verifier: EvaluationVerifier = Field(
        default_factory=dict,
        validate_default=True,
        description="judges responses; a verifier's own settings; `math_verify` with `preset: paper`",
    )
    concurrency: PositiveInt = Field(256, description="responses in flight")
    timeout_s: PositiveFloat = Field(600.0, description="deadline of one response, with all its attempts")
    attempt_timeout_s: PositiveFloat | None = Field(
        None,
        description="as `stages.attempt_timeout_s`: longest time of one attempt. Default: all of `timeout_s`",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _papers_verifier(cls, given: Any) -> Any:
        """Have `preset: paper` judge by the paper's verifier, unless another is named."""
        verifier = given.get("verifier", {}) if isinstance(given, dict) and given.get("preset") == "paper" else None
        return given | {"verifier": {"kind": "math_verify"} | verifier} if isinstance(verifier, dict) else given

    def _check(self) -> None:
        check_attempt_timeout(self.attempt_timeout_s, self.timeout_s)
        if self.problems is not None and self.benchmarks:
            raise ValueError("give exactly one of problems and benchmarks: set problems to null, or remove benchmarks")
        if self.problems is None and not self.benchmarks:
            raise ValueError("give exactly one of problems and benchmarks; both are missing")
        if ONLY in self.benchmarks:
            raise ValueError(
                f"benchmarks.{ONLY}: in results this is the set of evaluation.problems; give it another name"
            )
        if reserved := [name for name in self.benchmarks if name in RESERVED_NAMES]:
            raise ValueError(
                f"benchmarks.{reserved[0]}: results have a row of their own with this name; give it another"
            )
        most = max(each.samples or self.samples for each in self.sets().values())
        if self.thinking_tokens is not None:
            self._check_thinking(self.thinking_tokens)
        if too_large := [k for k in self.pass_k if k > most]:
            raise ValueError(f"pass_k={too_large[0]} needs as many samples as that, but samples={most}: raise it")

    def _check_thinking(self, most: int) -> None:
        if self.thinking is False:
            raise ValueError(f"thinking_tokens={most}: thinking is false: set it to true, or to null")
        longest = min(each.max_response_tokens or self.max_response_tokens for each in self.sets().values())
        if most >= longest:
            raise ValueError(f"thinking_tokens={most} leaves nothing of max_response_tokens={longest}: lower it")
        if counting := [name for name in ("presence_penalty", "frequency_penalty") if getattr(self, name) is not None]:
            raise ValueError(
                f"{counting[0]} counts what a request wrote, and thinking_tokens makes two of one: drop one"
            )

    @property
    def further(self) -> tuple[tuple[str, float], ...]:
        """`SamplingSettings.further`."""
        return tuple((name, value) for name in FURTHER if (value := getattr(self, name)) is not None)

    def sets(self) -> Mapping[str, BenchmarkConfig]:
        """Return all benchmarks by name. The set in `evaluation.problems` is called `problems`."""
        if self.problems is None:
            return self.benchmarks
        return {ONLY: BenchmarkConfig.model_validate(dict(self.problems))}

    def key_of(self, name: str) -> str:
        """Return the configuration key of one of `sets`."""
        return f"evaluation.benchmarks.{name}" if self.benchmarks else "evaluation.problems"


def check_paper(evaluation: EvaluationConfig, prompt: PromptConfig) -> None:
    """Raise ValueError, which names every key that departs, unless an evaluation is the paper's."""
    verifier = evaluation.verifier
    others = [
        *_not_default("evaluation", evaluation, PAPER_EVALUATION),
        *([_not_papers("evaluation.verifier", verifier.kind, "math_verify")] if verifier.kind != "math_verify" else []),
        *(
            ["evaluation.verifier.relative_tolerance is not the paper's (a benchmark may have one)"]
            if getattr(verifier, "relative_tolerance", 0.0) != 0.0
            else []
        ),
        *_not_default("prompt", prompt, PAPER_PROMPT),
        *(
            f"prompt.template_arguments.{name} is not the paper's"
            for name in prompt.template_arguments
            if name != DATE_ARGUMENT
        ),
    ]
    if others:
        raise ValueError(f"{'; '.join(others)}: set what the paper has, or evaluation.preset to null")


def _not_default(prefix: str, section: Section, keys: Sequence[str]) -> Iterator[str]:
    for key in keys:
        value, paper = getattr(section, key), type(section).model_fields[key].default
        if value != paper:
            yield _not_papers(f"{prefix}.{key}", *(json.dumps(each, ensure_ascii=False) for each in (value, paper)))


def _not_papers(key: str, value: str, paper: str) -> str:
    return f"{key}={value} is not the paper's {paper}"
