"""Makes the prompts of a run from problems: renders them, drops those that are too long, and puts them in order.

The order is a pure function of the seed and the problems. Each epoch has its own permutation. Problems of an epoch's
last, incomplete batch are left out of that epoch, as in the paper. Where training sets have shares, each has epochs of
its own, so that every stretch of the run has the sets in their shares, and an epoch has as many prompts as there are
problems.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np

from spot_async.base.files import read_bounded, refuse_pointer
from spot_async.base.seeds import derive_seed
from spot_async.base.text import first_line
from spot_async.config import PromptConfig, TeacherPromptConfig, TemplateConfig, teacher_role
from spot_async.errors import ConfigError, DataError
from spot_async.models.episodes import Tools
from spot_async.models.template_trial import overdoes
from spot_async.models.vocabulary import Vocabulary
from spot_async.types import ChatTurn, IntArray, Problem, Prompt, PromptSource, place_in_run

DATE_WARNING = (
    "prompt.template_arguments: the chat template writes today's date, so prompts change from day to day: set its "
    'variable for the date, as in prompt.template_arguments.date_string="26 Jul 2024"'
)
# For models without a chat template. It continues worked examples of a benchmark: "Question: ... Answer: ...".
_PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}Answer:"
AT_ONCE = 1024  # prompts that are rendered together: their ids are Python's numbers until all are there
THINKING_END = "</think>"
# As models spell it: <think>, <seed:think>, [THINK]. The group is empty where thinking begins.
_THINKING = re.compile(r"[<\[](/?)(?:\w+:)?think(?:ing)?[>\]]", re.IGNORECASE)
# Variables of templates that do not know `enable_thinking`, with values for less thinking and for more.
_OTHER_SWITCHES = {"thinking": (False, True), "reasoning_effort": ("low", "high"), "thinking_budget": (0, 512)}
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}here\N{OBJECT REPLACEMENT CHARACTER}"
# In front of a template, this macro replaces the function through which transformers lets templates read the clock.
_MARKED_CLOCK = f"{{% macro strftime_now(spelling) %}}{_MARK}{{% endmacro %}}"


class PromptRenderer:
    """Renders problems with a chat template: the problem's history, then a user message of problem and instruction.

    The template is the tokenizer's own, the Jinja file that `config.template` names, or for `plain` none to speak of.
    Only it writes control tokens: a text that spells one is read as letters, so no text can end its turn.
    """

    def __init__(self, vocabulary: Vocabulary, config: PromptConfig, key: str = "prompt") -> None:
        self.key = key  # the section that says how, for messages
        self._arguments_key = f"{'prompt' if key == 'evaluation' else key}.template_arguments"
        self._tokenizer = vocabulary.tokenizer
        self._added = vocabulary.added
        self._config = config
        used = self._template_config
        self._arguments: dict[str, Any] = dict(used.template_arguments)
        if used.thinking is not None:
            self._arguments["enable_thinking"] = used.thinking
        taken = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        if given := sorted(used.template_arguments.keys() & taken):
            raise DataError(f"{self._arguments_key}.{given[0]}: is no variable of the template's own: remove it")
        self._name = str(self._tokenizer.name_or_path)
        self._tried: list[Tools] = []
        if used.template.endswith(".jinja"):
            self._name = f"{self.key}.template={used.template}"
            self._arguments["chat_template"] = read_template(Path(used.template), self.key)
        elif used.template == "plain":
            begins = self._tokenizer.bos_token_id in self._tokenizer("").input_ids  # as it reads every text
            self._arguments["chat_template"] = f"{'{{ bos_token }}' if begins else ''}{_PLAIN}"
        elif not self._tokenizer.chat_template:
            raise DataError(
                f"{self._name}: the tokenizer has no chat template; "
                f"add chat_template.jinja, or set {self.key}.template to the other model, to a Jinja file or to plain"
            )

    @property
    def _template_config(self) -> TemplateConfig:
        return self._config

    def text(self, problem: Problem) -> str:
        """Return the prompt as the model reads it, with special tokens."""
        return str(self._apply(self._turns(problem), problem.tools, tokenize=False))

    def token_ids(self, problem: Problem) -> IntArray:
        """Return the ids (P,) of the rendered prompt. Raises DataError if it is empty, which no server accepts."""
        return self.turn_ids(self._turns(problem), problem.tools, f"problem {problem.id!r}")

    def all_token_ids(self, problems: Sequence[Problem]) -> list[IntArray]:
        """Return what `token_ids` does for each problem, and raise as that does. Many are rendered in one call."""
        found: list[IntArray] = []
        for tools, alike in groupby(problems, lambda problem: problem.tools):
            while some := [*islice(alike, AT_ONCE)]:
                self._try_once(chats := [msgspec.to_builtins(self._turns(problem)) for problem in some], tools)
                try:
                    ids = self._ids(chats, tools)
                except Exception:  # noqa: BLE001 - the template is the user's own program; singly, the problem is named
                    ids = []
                if len(ids) == len(some) and all(ids):
                    found += (np.array(each, dtype=np.int32) for each in ids)
                else:
                    found += map(self.token_ids, some)
        return found

    def turn_ids(self, turns: Sequence[ChatTurn], tools: Tools = (), what: str = "these turns") -> IntArray:
        """Return the ids (P,) of a prompt made of turns; `what` names them in messages. Raises as `token_ids`."""
        ids = self._apply(turns, tools, tokenize=True, what=what)
        if not ids:
            raise DataError(
                f"{self._name}: the chat template makes an empty prompt of {what}: correct the "
                "template, which is to write messages[0].content"
            )
        return np.array(ids, dtype=np.int32)

    def check_differ(self, sources: Sequence[PromptSource]) -> None:
        """Raise DataError if problems with different texts all have the same prompt."""
        if len({source.problem.text.strip() for source in sources}) < 2:
            return
        if len({source.token_ids.tobytes() for source in sources}) > 1:
            return
        # Where texts differ and ids do not, the fault is the tokenizer's.
        if len({self.text(source.problem) for source in sources}) == 1:
            raise DataError(
                f"{self._name}: the chat template makes the same prompt of all {len(sources)} problems: correct the "
                "template, which is to write messages[0].content"
            )

    def check_rows(self, key: str, read: Iterable[tuple[Problem, IntArray]], rows: int, models: str) -> None:
        """Raise ConfigError for a token that `models` read of a problem, and whose embedding has no row for it.

        A tokenizer knows such a token if it was added and the embedding was not resized.
        """
        for problem, ids in read:
            if (largest := int(ids.max(initial=0))) >= rows:
                token = str(self._tokenizer.convert_ids_to_tokens(largest))
                where = f"{self.key}.template" if token in self._marked(problem) else key
                raise ConfigError(
                    f"{where}: what {models} read of problem {problem.id!r} holds token {token!r} ({largest}), and "
                    f"only ids below {rows} have a row in the embedding: resize that (resize_token_embeddings), or "
                    "take the token out of the chat template and the data"
                )

    def thinking_doubts(self, problem: Problem) -> list[str]:
        """Return a line if `thinking` says one thing, and the template does another."""
        wanted, behind = self._template_config.thinking, self.generation_prompt(problem)
        marks = _THINKING.findall(behind)
        begins = not marks[-1] if marks else None
        if wanted is None or begins is wanted:
            return []
        values = {name: pair[wanted] for name, pair in _OTHER_SWITCHES.items()}
        others = [f"{name}={json.dumps(value)}" for name, value in values.items() if self._heeds(problem, name, value)]
        knows_none = not wanted and not others
        is_set = not _OTHER_SWITCHES.keys().isdisjoint(self._arguments)
        if begins is None and (knows_none or is_set or self._heeds(problem, "enable_thinking", not wanted)):
            return []
        instead = f"set {self._arguments_key}.{others[0]}, and" if others else "give another template, or set"
        return [
            f"{self.key}.thinking={json.dumps(wanted)}: the chat template does not heed it, and begins responses with "
            f"{behind!r}: {instead} {self.key}.thinking=null"
        ]

    def _heeds(self, problem: Problem, name: str, value: object) -> bool:
        """Return whether the template makes another prompt with this variable. It may refuse the value."""
        try:
            return self._marked(problem, **{name: value}) != self._marked(problem)
        except DataError:
            return False

    def prompt(self, problem: Problem, ordinal: int = 0) -> Prompt:
        """Return a prompt outside of any schedule. Its seeds and priority derive from `ordinal`."""
        ids = self.token_ids(problem)
        return Prompt(ordinal=ordinal, problem=problem, token_ids=ids, message=self.message(problem))

    def generation_prompt(self, problem: Problem) -> str:
        """Return what the template writes behind the user's message."""
        return self._marked(problem).rpartition(_MARK)[2]

    def _marked(self, problem: Problem, **arguments: Any) -> str:
        """Return the prompt's text, with a mark in place of the user's message."""
        turns = [*problem.history, ChatTurn(role="user", content=_MARK)]
        return str(self._apply(turns, problem.tools, tokenize=False, **arguments))

    def template_text(self, tools: Tools) -> str:
        """Return the chat template itself, in Jinja. One may be for prompts with tools, another for those without."""
        return str(self._tokenizer.get_chat_template(self._arguments.get("chat_template"), _shown(tools)))

    @property
    def arguments(self) -> dict[str, Any]:
        """What `apply_chat_template` gets beside messages and tools: the template's variables, and what replaces it."""
        return dict(self._arguments)

    def reads_clock(self, problem: Problem) -> bool:
        """Return whether the problem's prompt contains today's date."""
        marked = _MARKED_CLOCK + self.template_text(problem.tools)
        return _MARK in self._apply(self._turns(problem), problem.tools, tokenize=False, chat_template=marked)

    def message(self, problem: Problem) -> str:
        """Return the user's message: the instruction stands behind its own white space, or behind a blank."""
        instruction = self.instruction(problem)
        gap = "" if instruction[:1].isspace() else " "
        return f"{_asked(problem)}{gap}{instruction}".strip()

    def instruction(self, problem: Problem) -> str:
        return (self._config.instruction if problem.instruction is None else problem.instruction).rstrip()

    def _turns(self, problem: Problem) -> list[ChatTurn]:
        return [*problem.history, ChatTurn(role="user", content=self.message(problem))]

    def _apply(
        self, turns: Sequence[ChatTurn], tools: Tools, *, tokenize: bool, what: str = "", **arguments: Any
    ) -> Any:
        messages = msgspec.to_builtins(turns)
        self._try_once([messages], tools)
        try:
            if tokenize:
                return self._ids([messages], tools)[0]
            return self._render(messages, tools, tokenize=False, **arguments)
        except Exception as error:  # noqa: BLE001 - the template is the user's own program
            where = f" in line {line}" if (line := template_line(error)) else ""
            why = f"{first_line(error)}{what and f' ({what})'}"
            raise DataError(f"{self._name}: the chat template fails{where}: {why}") from None

    def _ids(self, chats: Sequence[Sequence[dict[str, str]]], tools: Tools) -> list[list[int]]:
        """Return the tokens of each chat. Those that spell no control token are rendered together, which is faster."""
        in_tools = bool(tools and self._added.search(json.dumps(tools, ensure_ascii=False)))
        spelt = [in_tools or self._spells_control(chat) for chat in chats]
        harmless = [chat for chat, is_spelt in zip(chats, spelt, strict=True) if not is_spelt]
        together = iter(self._render(harmless, tools)["input_ids"] if harmless else ())
        return [
            self._render(chat, tools, sanitize_control_tokens=True)["input_ids"] if is_spelt else next(together)
            for chat, is_spelt in zip(chats, spelt, strict=True)
        ]

    def _spells_control(self, chat: Sequence[dict[str, str]]) -> bool:
        """Return whether a text spells an added token. Those of an assistant's own thinking are meant as tokens."""
        return any(
            self._added.search(_THINKING.sub(" ", turn["content"]) if turn["role"] == "assistant" else turn["content"])
            for turn in chat
        )

    def _render(self, messages: Sequence[object], tools: Tools, **arguments: Any) -> Any:
        """Apply the template to one chat, or to each of a list of chats."""
        return self._tokenizer.apply_chat_template(
            messages, tools=_shown(tools), add_generation_prompt=True, **{**self._arguments, **arguments}
        )

    def _try_once(self, chats: Sequence[Sequence[dict[str, str]]], tools: Tools) -> None:
        """Raise DataError if the template never comes to its end for the first chat, or takes all memory."""
        if tools in self._tried:
            return
        self._tried.append(tools)
        try:
            template = self.template_text(tools)
        except ValueError:
            return  # said when it is used
        variables = {**self._arguments, "tools": _shown(tools)}
        if (fault := overdoes(self._tokenizer, template, variables, chats[0])) is not None:
            raise DataError(f"{self._name}: the chat template {fault} for one problem: correct it, or give another")


class TeacherPromptRenderer(PromptRenderer):
    """Renders what a teacher reads in place of the student's prompt: the text of `prompt.teacher`, filled in.

    `name` is that of one of several, whose section is its own (`teachers.<name>.prompt`).
    """

    def __init__(self, vocabulary: Vocabulary, config: PromptConfig, name: str = "") -> None:
        self._teacher = name
        super().__init__(vocabulary, config, f"{teacher_role(name)}.prompt" if name else "prompt.teacher")

    @property
    def _template_config(self) -> TeacherPromptConfig:
        assert self._config.teacher is not None
        return self._config.teacher

    def beside(self, sources: Sequence[PromptSource]) -> list[PromptSource]:
        """Return the sources with the teacher's prompts, without those whose are longer than the section allows.

        Raises ConfigError if a problem lacks a part that the text names, if all are too long, or if the teacher would
        read the same of two problems that the student can tell apart.
        """
        name = self._teacher
        asked = [each.problem for each in sources if each.problem.asks(name)]
        ids_of = iter(self.all_token_ids(asked))
        rendered = [(each, next(ids_of) if each.problem.asks(name) else None) for each in sources]
        first_with: dict[bytes, PromptSource] = {}
        for each, own_ids in rendered:
            if own_ids is None:
                continue
            first = first_with.setdefault(own_ids.tobytes(), each)
            if not np.array_equal(first.token_ids, each.token_ids):
                raise ConfigError(
                    f"{self.key}.text: the teacher would read the same prompt of problems {first.problem.id!r} and "
                    f"{each.problem.id!r}, which differ: name {{problem}} in it"
                )
        most = self._template_config.max_tokens
        short = [self._with(each, own_ids) for each, own_ids in rendered if own_ids is None or len(own_ids) <= most]
        if rendered and not short:
            raise ConfigError(
                f"{self.key}.max_tokens={most}: all {len(rendered)} prompts of the teacher are longer: raise it, "
                f"or make {self.key}.text shorter"
            )
        return short

    def _with(self, source: PromptSource, ids: IntArray | None) -> PromptSource:
        if ids is None:
            return source
        own = {"own_ids": {**source.own_ids, self._teacher: ids}} if self._teacher else {"teacher_ids": ids}
        return msgspec.structs.replace(source, **own)

    def message(self, problem: Problem) -> str:
        def part(name: str) -> str:
            if name == "instruction":
                return self.instruction(problem).lstrip()
            value: str = _asked(problem) if name == "problem" else (getattr(problem, name) or "").strip()
            if not value:
                raise ConfigError(
                    f"{self.key}.text names {{{name}}}: problem {problem.id!r} has none; give "
                    f"data.train.fields.{name}, or leave it out"
                )
            return value

        return self._template_config.filled(part)


def _shown(tools: Tools) -> list[Any] | None:
    return list(tools) or None  # a template may tell an empty list from none


def _asked(problem: Problem) -> str:
    """Return the problem's text, with what an environment says of it."""
    return "\n\n".join(filter(None, [problem.text.strip(), problem.opening.strip()]))


def template_line(error: Exception) -> int | None:
    """Return the line of a Jinja template that an exception came from. Jinja writes it into the traceback."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)


def read_template(path: Path, key: str = "prompt") -> str:
    """Return the text of a Jinja file. Raises DataError if it cannot be read."""
    refuse_pointer(path)
    try:
        return read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{key}.template: cannot read {path}: {why}") from None


def render_all(
    problems: Sequence[Problem], renderer: PromptRenderer, max_prompt_tokens: int | None = None
) -> list[PromptSource]:
    """Render every problem and drop prompts longer than `max_prompt_tokens`.

    The caller can compare lengths to see how many were dropped. Raises DataError if a prompt is empty, or all are the
    same.
    """
    rendered = [
        PromptSource(problem=problem, token_ids=token_ids, message=renderer.message(problem))
        for problem, token_ids in zip(problems, renderer.all_token_ids(problems), strict=True)
    ]
    renderer.check_differ(rendered)
    if max_prompt_tokens is None:
        return rendered
    return [source for source in rendered if len(source.token_ids) <= max_prompt_tokens]


class PromptSchedule:
    """The order of a run's prompts. Iterating twice gives the same prompts."""

    def __init__(
        self,
        sources: Sequence[PromptSource],
        *,
        batch_size: int,
        run_seed: int,
        shuffle: bool,
        epochs: int | None = None,
        iterations: int | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Order the prompts of `sources`. `shares`: of the run's prompts, by `Problem.set_key`, with a sum of 1."""
        if len(sources) < batch_size:
            raise DataError(
                f"{len(sources)} usable problems make no batch of training.batch_size={batch_size}: "
                "lower it or add problems"
            )
        self.sources = sources
        self.shares = shares or {}
        self._batch_size = batch_size
        self._run_seed = run_seed
        self._shuffle = shuffle
        per_epoch = len(sources) // batch_size
        self.iterations = iterations if iterations is not None else (epochs or 1) * per_epoch
        self.left_over_per_epoch = 0 if self.shares else len(sources) - per_epoch * batch_size
        self.per_epoch = per_epoch * batch_size  # prompts

    def __iter__(self) -> Iterator[Prompt]:
        """Yield all prompts of the run, and after its last batch more, to replace prompts that are given up."""
        for ordinal, source in enumerate(self._by_share() if self.shares else self._epochs(self.sources, "epoch")):
            when = place_in_run(ordinal, self._batch_size, self.iterations)
            yield Prompt(ordinal=ordinal, **when, **msgspec.structs.asdict(source))

    def _by_share(self) -> Iterator[PromptSource]:
        """Yield the next source of the set that is furthest behind its share."""
        of_set = {
            key: self._epochs([each for each in self.sources if each.problem.set_key == key], "epoch", key)
            for key in self.shares
        }
        drawn: Counter[str] = Counter()
        for place in count(1):
            key = max(self.shares, key=lambda key: self.shares[key] * place - drawn[key])
            drawn[key] += 1
            yield next(of_set[key])

    def _epochs(self, sources: Sequence[PromptSource], *seeds: str) -> Iterator[PromptSource]:
        """Yield the sources epoch by epoch, each in an order of its own."""
        for epoch in count():
            indices = list(range(len(sources)))
            if self._shuffle:
                random.Random(derive_seed(self._run_seed, *seeds, epoch)).shuffle(indices)
            yield from (sources[index] for index in indices[: len(sources) - self.left_over_per_epoch])
