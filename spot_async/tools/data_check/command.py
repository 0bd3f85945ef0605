"""`spot-async data check`: decides which sets to look at, and shows what `check.py` finds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.base import registry
from spot_async.base.text import counted, shortened, visible
from spot_async.checks.plan import make_policy
from spot_async.config import Config, PluginSettings, ProblemSetConfig, PromptConfig
from spot_async.config.loading import apply_override, load_config, parse_yaml, validate_as
from spot_async.data.golds import gold_doubts
from spot_async.data.keys import about, setting
from spot_async.data.problem_set import Overlap, ProblemSet, find_overlaps, load_problem_set, require_answers, too_short
from spot_async.data.prompts import PromptRenderer, render_all
from spot_async.errors import ConfigError
from spot_async.models.files import no_directory, read_model
from spot_async.models.hub import Say, local_path, with_downloads
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Verifier
from spot_async.tools.data_check.check import GoldCheck, Spread, answer_type, check_golds, count_by, find_repeated
from spot_async.types import Problem

SAMPLES = 2
SHOWN_IDS = 10
SHOWN_CHARS = 400


@dataclass(frozen=True)
class EvaluationSet:
    """A set of held-out problems that the training set is compared with."""

    name: str  # its configuration key, or its path
    problems: ProblemSetConfig
    key: str = ""  # its configuration key, for messages
    verifier: PluginSettings | None = None  # None if no verifier is known for it


@dataclass(frozen=True)
class Check:
    """What `data check` is asked to do."""

    key: str  # its configuration key, for messages; empty without a configuration
    problems: ProblemSetConfig
    verifier: PluginSettings
    against: Sequence[EvaluationSet]
    model: str | None  # the directory whose tokenizer renders prompts
    prompt: PromptConfig
    max_prompt_tokens: int | None
    run: Config | None = None  # the configuration, whose policy may need answers; None if there is none


def check_of_config(
    path: Path, overrides: Sequence[str], against: Sequence[str], verifier: str | None, say: Say
) -> Check:
    """Return the check of a run's training problems, with its verifier and prompts, against its evaluation problems.

    `verifier` replaces the run's; evaluation sets keep their own.
    """
    config = with_downloads(load_config(path, overrides), say, weights=())
    owner = config.teacher if config.prompt.template == "teacher" and config.teacher else config.student
    return Check(
        key="data.train",
        problems=config.data.train,
        verifier=read_verifier(verifier) if verifier else config.verifier,
        against=[*evaluation_sets(config), *(EvaluationSet(each, ProblemSetConfig(path=each)) for each in against)],
        model=local_path(owner.model),
        prompt=config.prompt,
        max_prompt_tokens=config.sampling.max_prompt_tokens,
        run=config,
    )


def check_of_file(
    path: str, settings: Sequence[str], against: Sequence[str], verifier: str | None, model: str | None
) -> Check:
    """Return the check of a file. `settings` are a problem set's KEY=VALUE, such as `layout=math`."""
    if model is not None and not Path(model).is_dir():
        raise ConfigError(f"--model: {no_directory(model)}")
    tree: dict[str, Any] = {"path": path}
    for each in settings:
        apply_override(tree, each)
    return Check(
        key="",
        problems=validate_as(ProblemSetConfig, tree),
        verifier=read_verifier(verifier or "boxed_match"),
        against=[EvaluationSet(each, ProblemSetConfig(path=each)) for each in against],
        model=model,
        prompt=PromptConfig(),
        max_prompt_tokens=None,
    )


def is_config(path: str) -> bool:
    return path.endswith((".yaml", ".yml"))


def evaluation_sets(config: Config) -> list[EvaluationSet]:
    if (evaluation := config.evaluation) is None:
        return []
    keys = {evaluation.key_of(name): settings for name, settings in evaluation.sets().items()}
    return [
        EvaluationSet(key, each, key, None if each.format == "alpaca_eval" else each.verifier_of(evaluation))
        for key, each in keys.items()
    ]


def read_verifier(text: str) -> PluginSettings:
    """Read a verifier's settings from `KIND`, or from a section such as `{kind: math_verify, workers: 4}`."""
    tree = parse_yaml(text, f"--verifier {text}")
    tree = {"kind": tree} if isinstance(tree, str) else tree
    if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
        raise ConfigError(f"--verifier {text}: give one of {', '.join(registry.names('verifiers'))}")
    try:
        schema: type[PluginSettings] = registry.load("verifiers", tree["kind"]).Settings
    except ValueError as error:
        raise ConfigError(f"--verifier {text}: {error}") from None
    return validate_as(schema, tree)


def run(screen: Console, check: Check) -> bool:
    """Look, print what was found, and return whether every answer can be verified.

    Raises ConfigError or DataError for what cannot be read.
    """
    found = _load_training(check)
    others = [
        load_problem_set(each.problems, each.key, needs_answers=each.verifier is not None) for each in check.against
    ]
    renderer = PromptRenderer(Vocabulary.load(Path(check.model)), check.prompt) if check.model else None
    tokens = [len(each.token_ids) for each in render_all(found.problems, renderer)] if renderer else None
    answers = [(check.key, found, check.verifier)]
    answers += [(s.name, each, s.verifier) for s, each in zip(check.against, others, strict=True) if s.verifier]
    golds = [(key, asyncio.run(_check_golds(each.problems, by)), by.kind) for key, each, by in answers]
    screen.print(shown(f"layout: {found.layout}"))
    screen.print(_rows_table(found, tokens, check.max_prompt_tokens))
    screen.print(_problems_table(found.problems, tokens))
    if check.run is None and found.unanswered:
        field = setting(check.key, "fields.answer")
        _warn(
            screen, f"no run that learns from outcomes, and no evaluation, takes those without an answer; see {field}"
        )
    _show_samples(screen, found.problems, renderer)
    for (key, found_there, _), (_, checked, kind) in zip(answers, golds, strict=True):
        _show_golds(screen, key, checked, kind, setting(key, "fields.answer"))
        for line in gold_doubts(found_there.problems, key):
            _warn(screen, line)
    if others:
        overlaps = [find_overlaps(found.problems, each.problems) for each in others]
        _show_overlaps(screen, list(zip([each.name for each in check.against], others, overlaps, strict=True)))
    return not any(checked.unverifiable for _, checked, _ in golds)


def _load_training(check: Check) -> ProblemSet:
    """Return the problems as the run would read them.

    The policy is loaded only if some problems have no answer, to ask whether it needs them.
    """
    found = load_problem_set(check.problems, check.key, needs_answers=False)
    if check.run is None or all(problem.answer for problem in found.problems):
        return found
    role, model = ("teacher", check.run.teacher) if check.run.teacher is not None else ("student", check.run.student)
    if make_policy(check.run, read_model(role, model.model)).needs.outcomes:
        found = load_problem_set(check.problems, check.key)
        require_answers(found, check.key)
    return found


async def _check_golds(problems: Sequence[Problem], settings: PluginSettings) -> GoldCheck:
    verifier: Verifier = registry.load("verifiers", settings.kind)(settings)
    async with verifier:
        return await check_golds(problems, verifier)


def _rows_table(found: ProblemSet, tokens: Sequence[int] | None, max_prompt_tokens: int | None) -> Table:
    table = _table("rows", "", "rows")
    for name, rows in found.counts.items():
        table.add_row(shown(name), str(rows))
    if tokens is not None and max_prompt_tokens is not None:
        long = sum(length > max_prompt_tokens for length in tokens)
        table.add_row(f"prompts longer than {max_prompt_tokens} tokens, filtered by a run", str(long))
    return table


def _problems_table(problems: Sequence[Problem], tokens: Sequence[int] | None) -> Table:
    table = _table("problems", "", "")
    repeated = find_repeated(problems)
    lengths = {"characters of a problem": Spread.of([len(problem.text) for problem in problems])}
    if tokens is not None:
        lengths["tokens of a prompt"] = Spread.of(tokens)
    for name, spread in lengths.items():
        table.add_row(name, f"median {spread.median}, 95 % {spread.p95}, longest {spread.longest}")
    for name, counts in (
        ("answers", count_by([answer_type(problem) for problem in problems])),
        ("tiers", count_by([problem.tier for problem in problems])),
        ("categories", count_by([problem.category for problem in problems])),
    ):
        if counts:
            table.add_row(name, shown(", ".join(f"{value}: {count}" for value, count in counts.items())))
    table.add_row(
        "repeated but for white space",
        f"{repeated.groups} texts, {repeated.rows} further rows, {repeated.conflicting} of them with another answer",
    )
    return table


def _show_samples(screen: Console, problems: Sequence[Problem], renderer: PromptRenderer | None) -> None:
    for problem in problems[:: max(1, len(problems) // SAMPLES)][:SAMPLES]:
        screen.rule(shown(f"problem {problem.id}"), align="left")
        screen.print(shown(shortened(problem.shown, SHOWN_CHARS)))
        for letter, choice in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", problem.choices, strict=False):
            screen.print(shown(f"({letter}) {shortened(choice, SHOWN_CHARS)}"))
        screen.print(shown(f"answer: {problem.answer or '(none)'}"))
    if renderer is not None:
        screen.rule("first prompt", align="left")
        screen.print(shown(renderer.text(problems[0])))


def _show_golds(screen: Console, key: str, golds: GoldCheck, kind: str, column: str) -> None:
    by = "the letters of their choices" if golds.tried == golds.have_choices > 0 else kind
    screen.rule(shown(f"{about(key)}answers against themselves, by {by}"), align="left")
    if golds.tried or not golds.prose:
        screen.print(f"{golds.tried} tried, {len(golds.unverifiable)} unverifiable", highlight=False)
    for problem, verdict in golds.unverifiable[:SHOWN_IDS]:
        screen.print(shown(f"  {problem.id}: {shortened(problem.answer, SHOWN_CHARS)!r} is {verdict}"))
    if golds.prose:
        ids = _ids([problem.id for problem in golds.prose])
        _warn(
            screen,
            f"{counted(len(golds.prose), 'answer')} in prose, which a response would have to repeat word for word: "
            f"{ids}; name the column of short answers in {column}",
        )
    if golds.spelling_only:
        ids = _ids([problem.id for problem in golds.spelling_only])
        screen.print(shown(f"{len(golds.spelling_only)} right only in the file's own spelling: {ids}"))
    if golds.misread:
        ids = _ids([problem.id for problem in golds.misread])
        _warn(
            screen, f"{counted(len(golds.misread), 'answer')} read as something else, right with another digit: {ids}"
        )
    if golds.unclear_choices:
        ids = _ids([problem.id for problem in golds.unclear_choices])
        screen.print(shown(f"{len(golds.unclear_choices)} with an empty choice, or two that are the same: {ids}"))
    if golds.oversized:
        screen.print(f"{golds.oversized} so long that only the same words are right", highlight=False)


def _show_overlaps(screen: Console, found: Sequence[tuple[str, ProblemSet, Sequence[Overlap]]]) -> None:
    columns = ("problems", "iden-\ntical", "con-\ntained", "equal\nanswers", "too\nshort")
    table = _table("overlap: identical problems, and others by 13 words", "evaluation set", *columns)
    for name, other, overlaps in found:
        identical = sum(overlap.is_identical for overlap in overlaps)
        equal = sum(overlap.has_equal_answer for overlap in overlaps)
        figures = (len(other.problems), identical, len(overlaps), equal, too_short(other.problems))
        table.add_row(shown(name), *map(str, figures))
    screen.print(table)
    for name, _, overlaps in found:
        if overlaps:
            pairs = _ids([f"{each.evaluation.id} in {each.training.id}" for each in overlaps])
            screen.print(shown(f"{name}: {pairs}"), soft_wrap=True)


def shown(text: str) -> Text:
    """Return text from a file for the terminal, with control characters made visible, so that it cannot command it."""
    return Text(visible(text))


def _warn(screen: Console, words: str) -> None:
    screen.print(Text(visible(f"warning: {words}"), style="yellow"), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _ids(ids: Sequence[str]) -> str:
    more = f", and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(ids[:SHOWN_IDS]) + more
