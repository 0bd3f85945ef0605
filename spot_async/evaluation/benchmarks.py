"""Prepares the benchmarks of an evaluation: their problems rendered as prompts, their limits and their verifiers.

Everything is read from files, before anything starts. Prompts use the student's own chat template, or that which
`evaluation.template` names, never the teacher's.

Options of a multiple choice get letters in an order that depends only on the seed and the options' texts. It does not
depend on the file's order, since copies of one benchmark order options differently, nor on the problem's place. Worked
examples come first in the same message. The answer is asked for in a box, as everywhere;
`verification/multiple_choice.py` judges it.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase

import msgspec

from spot_async.base.seeds import derive_seed
from spot_async.base.text import counted
from spot_async.config import BenchmarkConfig, Config, EvaluationConfig, PluginSettings, PromptConfig
from spot_async.config.evaluation import ALL_TIERS, ONLY
from spot_async.data import ProblemSet, load_problem_set, require_answers
from spot_async.data.prompts import THINKING_END, PromptRenderer, render_all
from spot_async.environments.planning import PlannedEnvironment, opened, plan_environments
from spot_async.errors import ConfigError, DataError
from spot_async.models.files import ModelFiles
from spot_async.types import ChatTurn, Problem, PromptSource
from spot_async.verification.multiple_choice import letter_index

QUESTIONS = "The following are {kind} about {category}, with their answers."
# The usual end and start of worked solutions in published sets. They are cut off, since the box says the same.
_CLOSING = re.compile(
    r"\s*(?:so,? |thus,? |therefore,? )?the (?:correct )?answer is:? *\(?[A-Z]\)?\.?\s*$", re.IGNORECASE
)
_OPENING = re.compile(r"^\s*A:\s*")


def order_choices(problem: Problem, seed: int, key: str) -> Problem:
    """Return the problem with its options in seeded order, and the right one's new letter as its answer.

    Raises DataError for a problem without options.
    """
    gold = problem.choices[gold_index(problem, key)]
    choices = sorted(problem.choices)
    random.Random(derive_seed(seed, "choices", *choices)).shuffle(choices)
    return msgspec.structs.replace(problem, choices=tuple(choices), answer=ascii_uppercase[choices.index(gold)])


def gold_index(problem: Problem, key: str) -> int:
    """Return the index of the right option. Raises DataError, naming `key` and the problem, if there is none."""
    if not 2 <= len(problem.choices) <= len(ascii_uppercase):
        raise DataError(
            f"{key}: problem {problem.id!r} has {len(problem.choices)} options; format=multiple_choice needs 2 to 26: "
            "name their column in fields.choices, or choose another format"
        )
    if (index := letter_index(problem.answer, problem.choices)) is None:
        last = ascii_uppercase[len(problem.choices) - 1]
        raise DataError(f"{key}: problem {problem.id!r} has the answer {problem.answer!r}, no letter from A to {last}")
    return index


def options_text(problem: Problem) -> str:
    return "\n".join(
        f"{letter}. {choice.strip()}" for letter, choice in zip(ascii_uppercase, problem.choices, strict=False)
    )


def worked_example(problem: Problem, key: str, *, with_options: bool) -> str:
    """Return an example: a question in the same form, with solution and answer.

    Its options keep their order, since the solution may name their letters.
    """
    answer = ascii_uppercase[gold_index(problem, key)] if with_options else problem.answer
    if not problem.solution:
        raise DataError(f"{key}: example {problem.id!r} has no worked solution: name its column in fields.solution")
    solution = _CLOSING.sub("", _OPENING.sub("", problem.solution)).strip()
    end = "" if "\\boxed" in solution else f" The answer is \\boxed{{{answer}}}."
    return f"{_question(problem, with_options=with_options)}\nAnswer: {solution}{end}"


def behind_examples(
    problems: Sequence[Problem], examples: Sequence[Problem], count: int, key: str, *, with_options: bool
) -> list[Problem]:
    """Return the problems, each behind the first `count` examples of its category, or else of those without one.

    `key` is the examples', for messages. Raises DataError if they are too few.
    """
    shown: defaultdict[str | None, list[str]] = defaultdict(list)
    for example in examples:
        if len(of_category := shown[example.category]) < count:
            of_category.append(worked_example(example, key, with_options=with_options))
    kind, asked = "multiple choice questions" if with_options else "questions", []
    for problem in problems:
        texts = shown[problem.category] or shown[None]
        if len(texts) < count:
            raise DataError(
                f"{key}: {len(texts)} examples of category {problem.category!r}, which problem {problem.id!r} "
                f"has, and {count} are asked for"
            )
        head = QUESTIONS.format(kind=kind, category=problem.category or "various subjects")
        text = "\n\n".join([head, *texts, _question(problem, with_options=with_options)])
        asked.append(msgspec.structs.replace(problem, text=text))
    return asked


def outputs_of(
    problems: Sequence[Problem], responses: Sequence[str], *, generator: str, dataset: str
) -> list[dict[str, str]]:
    """Return the rows of AlpacaEval's outputs file, which its own tool judges. It calls the model `generator`."""
    return [
        {
            "instruction": problem.text,
            "output": response,
            "generator": generator,
            "dataset": problem.category or dataset,
        }
        for problem, response in zip(problems, responses, strict=True)
    ]


def _question(problem: Problem, *, with_options: bool) -> str:
    options = f"\nOptions:\n{options_text(problem)}" if with_options else ""
    return f"Question: {problem.text.strip()}{options}"


# Verifiers that know no options, so that only the letter is right.
LETTERS_ALONE = ("boxed_match", "math", "math_verify")
EXAMPLES = BenchmarkConfig.model_fields["example_count"].default  # the paper's


@dataclass(frozen=True)
class Benchmark:
    """A set of problems as the student is asked them, and how the responses are judged."""

    name: str
    sources: Sequence[PromptSource]  # one per problem, rendered in the benchmark's format
    samples: int
    max_response_tokens: int
    verifier: PluginSettings | None  # None where nothing is judged: AlpacaEval's own tool reads its responses
    in_macro: bool = True
    note: str | None = None  # what people must know who compare its figures
    counts: Mapping[str, int] = field(default_factory=dict)  # rows of its file: read, and dropped by reason
    reads_clock: bool = False  # whether the prompts have today's date in them
    doubts: Sequence[str] = ()  # a line for each kind of answer that no response can meet
    warning: str | None = None  # about settings that are allowed, but hardly meant
    problems: Sequence[Problem] = ()  # as its file has them
    vocab_limit: int | None = None  # `SamplingSettings.vocab_limit`, as in training
    template: str | None = None  # the chat template that rendered its prompts; None where they were rendered before
    environment: PlannedEnvironment | None = None  # None: a response is one turn

    @property
    def key(self) -> str:
        """The configuration key that describes it."""
        return "evaluation" if self.name == ONLY else f"evaluation.benchmarks.{self.name}"


def plan_benchmarks(config: Config, student: ModelFiles, vocab_limit: int | None = None) -> list[Benchmark]:
    """Return every benchmark of the `evaluation` section. Raises ConfigError or DataError, with the key to change."""
    assert config.evaluation is not None
    planned = (_plan(name, each, config, config.evaluation, student) for name, each in config.evaluation.sets().items())
    return [replace(each, vocab_limit=vocab_limit) for each in planned]


def check_eval_every(config: Config, iterations: int) -> None:
    """Raise ConfigError if `evaluation.eval_every` is longer than the whole run."""
    every = 0 if config.evaluation is None else config.evaluation.eval_every
    if every > iterations:
        raise ConfigError(
            f"evaluation.eval_every={every}: the run ends after iteration {iterations}, so nothing would be evaluated "
            "during training; lower it, or set it to 0"
        )


def _plan(
    name: str, settings: BenchmarkConfig, config: Config, evaluation: EvaluationConfig, student: ModelFiles
) -> Benchmark:
    key = evaluation.key_of(name)
    verifier = settings.verifier_of(evaluation)
    judges_answers = verifier is not None and verifier.JUDGES_ANSWERS
    played = settings.environment or config.environment
    found = load_problem_set(settings, key, needs_answers=judges_answers, environment=played)
    if judges_answers:
        require_answers(found, key)
    if named_all := next((each for each in found.problems if each.tier == ALL_TIERS), None):
        raise DataError(
            f"{key}: problem {named_all.id!r} has the tier {ALL_TIERS!r}, which in results means all problems: "
            f"rename it, or choose another column with {key}.fields.tier"
        )
    instruction = settings.instruction if settings.instruction is not None else config.prompt.instruction
    own = {"template": evaluation.template, "thinking": evaluation.thinking}
    prompt = config.prompt.model_copy(update={**own, "instruction": instruction if verifier is not None else ""})
    max_tokens = settings.max_response_tokens or evaluation.max_response_tokens
    examples = None if settings.examples is None else load_problem_set(settings.examples, f"{key}.examples")
    problems = _formatted(found.problems[: evaluation.limit], examples, settings, evaluation.seed, key)
    if evaluation.system is not None:
        first = ChatTurn(role="system", content=evaluation.system)
        problems = [msgspec.structs.replace(each, history=(first, *each.history)) for each in problems]
    if evaluation.template == "student" and not student.vocabulary.tokenizer.chat_template:
        raise DataError(
            f"evaluation: {student.directory}: the tokenizer has no chat template, and an evaluation is rendered with "
            "the student's own, whatever prompt.template says: add chat_template.jinja to the directory, or set "
            "evaluation.template to plain, for a base model, or to a Jinja file"
        )
    problems, about = opened(problems, {} if played is None else {"": played})  # they are of no training set
    renderer = PromptRenderer(student.vocabulary, prompt, "evaluation")
    sources = _rendered(problems, renderer, student, max_tokens, key)
    if evaluation.thinking_tokens is not None:
        ends = [(problems[0], student.vocabulary.encode(THINKING_END))]
        renderer.check_rows("evaluation.thinking_tokens", ends, student.vocab_size, "the student")
    return replace(
        judged_benchmark(name, sources, config, evaluation),
        counts=found.counts,
        environment=plan_environments(about, student, renderer.arguments).get(""),
        reads_clock=renderer.reads_clock(problems[0]),
        doubts=[
            *renderer.thinking_doubts(problems[0]),
            *_unwritten_end(evaluation, student),
            *found.doubts(key, verifier),
            *(examples.doubts(f"{key}.examples", None) if examples is not None else ()),
        ],
        problems=found.problems,
        template=renderer.template_text(problems[0].tools),
    )


def _unwritten_end(evaluation: EvaluationConfig, student: ModelFiles) -> list[str]:
    vocabulary = student.vocabulary
    if evaluation.thinking_tokens is None or THINKING_END in vocabulary.whole_text(vocabulary.encode(THINKING_END)):
        return []
    return [f"evaluation.thinking_tokens: the student's tokenizer cannot write {THINKING_END}, so it ends no thinking"]


def judged_benchmark(
    name: str, sources: Sequence[PromptSource], config: Config, evaluation: EvaluationConfig
) -> Benchmark:
    """Return a benchmark of these problems with its limits and verifier. Raises ConfigError if that cannot judge."""
    settings, key = evaluation.sets()[name], evaluation.key_of(name)
    verifier = settings.verifier_of(evaluation)
    if verifier is not None:
        section = f"{'evaluation' if settings.verifier is None else key}.verifier"
        verifier.check_machine(section)
        if getattr(verifier, "prices", None) is not None:
            raise ConfigError(f"{section}.prices: only what the verifier of training costs is counted; leave it out")
        _check_verifier(verifier, [each.problem for each in sources], settings, key)
    return Benchmark(
        name=name,
        sources=sources,
        samples=(settings.samples or evaluation.samples) if verifier is not None else 1,
        max_response_tokens=settings.max_response_tokens or evaluation.max_response_tokens,
        verifier=verifier,
        in_macro=settings.in_macro,
        note=_note(settings, evaluation, config.prompt),
        warning=_letters_alone(verifier, settings, key) or _same_responses(settings, evaluation, key),
    )


def _check_verifier(verifier: PluginSettings, problems: Sequence[Problem], settings: BenchmarkConfig, key: str) -> None:
    """Raise ConfigError if the verifier judges letters of options, and a problem has none.

    Every response to such a problem would count as wrong.
    """
    if verifier.kind != "multiple_choice" or settings.format == "multiple_choice":
        return
    if without := next((each for each in problems if letter_index(each.answer, each.choices) is None), None):
        owner = "evaluation" if settings.verifier is None else key
        raise ConfigError(
            f"{owner}.verifier=multiple_choice: judges the letters of options, but problem {without.id!r} of {key} "
            "has none: choose another verifier, or format=multiple_choice"
        )


def _letters_alone(verifier: PluginSettings | None, settings: BenchmarkConfig, key: str) -> str | None:
    if verifier is None or settings.format != "multiple_choice" or verifier.kind not in LETTERS_ALONE:
        return None
    return (
        f"{key}.verifier={verifier.kind}: knows no options, so only the bare letter in the box is right, and an "
        "option's text is wrong: remove it to judge by multiple_choice"
    )


def _same_responses(settings: BenchmarkConfig, evaluation: EvaluationConfig, key: str) -> str | None:
    samples = settings.samples or evaluation.samples
    if evaluation.temperature > 0 or samples == 1 or settings.format == "alpaca_eval":
        return None
    return f"{key}: with evaluation.temperature=0 all {samples} responses to a problem are the same: set samples to 1"


def _formatted(
    problems: Sequence[Problem], examples: ProblemSet | None, settings: BenchmarkConfig, seed: int, key: str
) -> list[Problem]:
    """Return the problems with the texts and answers that the benchmark's format gives them."""
    is_choice = settings.format == "multiple_choice"
    for problem in problems if is_choice else ():
        gold_index(problem, key)
    if is_choice and settings.order_choices:
        problems = [order_choices(problem, seed, key) for problem in problems]
    if examples is None and is_choice:
        return [msgspec.structs.replace(each, text=f"{each.text.strip()}\n{options_text(each)}") for each in problems]
    if examples is None:
        return [*problems]
    return behind_examples(
        problems, examples.problems, settings.example_count, f"{key}.examples", with_options=is_choice
    )


def _rendered(
    problems: Sequence[Problem], renderer: PromptRenderer, student: ModelFiles, max_tokens: int, key: str
) -> list[PromptSource]:
    """Return all prompts. Raises ConfigError if one is too long: without it, this would be another benchmark."""
    room = student.max_context_tokens - max_tokens
    sources = render_all(problems, renderer)
    read = [(source.problem, source.token_ids) for source in sources]
    renderer.check_rows(key, read, student.vocab_size, "the student")
    too_long = sum(len(source.token_ids) > room for source in sources)
    if too_long:
        owner = key.removesuffix(f".{ONLY}")
        left = f"{room} prompt tokens" if room > 0 else "no prompt tokens"
        raise ConfigError(
            f"{owner}.max_response_tokens={max_tokens} leaves {left} of the student's context of "
            f"{student.max_context_tokens}, too few for {too_long} of {len(sources)} problems: lower it"
        )
    return sources


def _note(settings: BenchmarkConfig, evaluation: EvaluationConfig, prompt: PromptConfig) -> str | None:
    """Return what people must know who compare figures: facts of its format, and settings of its own."""
    facts, changes = _facts(settings, evaluation), _changes(settings, evaluation, prompt)
    if evaluation.limit is not None:
        facts.insert(0, f"only its first {counted(evaluation.limit, 'problem')}")
    if changes and evaluation.preset is not None:
        changes[0] = f"not as preset {evaluation.preset}: {changes[0]}"
    return "; ".join([*facts, *changes]) or None


def _facts(settings: BenchmarkConfig, evaluation: EvaluationConfig) -> list[str]:
    if (judged := settings.verifier_of(evaluation)) is None:
        return ["not judged here: outputs for its own tool"]
    return [
        *([_judged_by(judged)] if settings.verifier is None and judged.kind != evaluation.verifier.kind else []),
        *([] if settings.examples is None else [f"worked examples ({settings.example_count})"]),
        *([] if settings.order_choices or settings.format == "boxed" else ["options in the file's order"]),
    ]


def _changes(settings: BenchmarkConfig, evaluation: EvaluationConfig, prompt: PromptConfig) -> list[str]:
    is_judged = settings.format != "alpaca_eval"
    changes = []
    if is_judged and settings.instruction not in (None, prompt.instruction):
        changes.append(f"instruction {json.dumps(settings.instruction, ensure_ascii=False)}")
    changes += [
        f"{name} {own} instead of {usual}"
        for name, own, usual in (
            ("samples", settings.samples if is_judged else None, evaluation.samples),
            ("max_response_tokens", settings.max_response_tokens, evaluation.max_response_tokens),
            ("example_count", settings.example_count if settings.examples else None, EXAMPLES),
        )
        if own is not None and own != usual
    ]
    if settings.verifier is not None:
        usual = settings.model_copy(update={"verifier": None}).verifier_of(evaluation)
        if usual is not None and settings.verifier.that_decide() != usual.that_decide():
            changes.append(_judged_by(settings.verifier))
    return changes


def _judged_by(verifier: PluginSettings) -> str:
    """Return the verifier in words: its name, and the settings that may change verdicts and are not defaults."""
    special = verifier.model_dump(mode="json", exclude_defaults=True, exclude={"kind", *verifier.WITHOUT_EFFECT})
    return ", ".join([f"judged by {verifier.kind}", *(f"{name} {value}" for name, value in special.items())])
