"""The schema of problem sets and of prompts: where problems come from, and how each becomes a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import pydantic
from pydantic import Field

from spot_async.config.base import OneOrMore, PositiveInt, Section, as_list, as_yaml, spelled
from spot_async.config.environment import EnvironmentConfig
from spot_async.config.plugins import BenchmarkVerifier

Thinking = Annotated[
    bool | None,
    Field(description="`enable_thinking` for chat templates that know it; `null` leaves it to the template's default"),
]
Layout: TypeAlias = Literal[
    "auto",
    "plain",
    "messages",
    "math",
    "dapo",
    "math500",
    "amc23",
    "minerva",
    "hmmt",
    "aime",
    "gpqa_diamond",
    "mmlu_pro",
    "alpaca_eval",
]
Part: TypeAlias = Literal["problem", "answer", "id", "tier", "category", "choices", "solution", "response", "domain"]
ENVIRONMENT = "answers turns about its problems; default: `environment`, and without that a response is one turn"
_MAY_BE_NULL = ("id", "tier", "category")
Duplicates: TypeAlias = Literal["conflicting", "exact", "spacing", "keep"]


class ProblemSetConfig(Section):
    """A set of problems and how its rows are read. A plain value is short for `path`."""

    path: OneOrMore[str] = Field(
        description="file (.jsonl, .json, .csv or .parquet, also .gz), a data set of the Hugging Face hub (`org/name`, "
        "`org/name@revision`), or a list of such"
    )
    layout: Layout = Field("auto", description="how a row becomes a problem; `auto` goes by its columns")
    subset: str | None = Field(None, description="which subset, for a data set on the hub that has several")
    split: str | None = Field(None, description="which split, for a data set on the hub that has several")
    fields: dict[Part, str | None] = Field(
        {},
        description="columns that hold a problem's parts, if they are not those of the layout; `a.b` is b inside a. In "
        "chat messages, `answer` is the box in the assistant's last message, and `response` that message: what a "
        "policy may learn from as written. `id: null` numbers the rows, whatever columns they have; `tier` and "
        "`category` may be null too",
    )
    duplicates: Duplicates | None = Field(
        None,
        description="which rows with the same text are dropped. `conflicting`: all rows whose answers differ; `exact`: "
        "these, and all but the first of equal rows; `spacing`: as `exact`, with any white space as one space; `keep`: "
        "none. Default: `exact` for DAPO, `keep` for benchmarks that are taken whole, else `conflicting`",
    )

    @pydantic.field_validator("fields")
    @classmethod
    def _null_leaves_out(cls, fields: dict[str, str | None]) -> dict[str, str | None]:
        if needed := [part for part, column in fields.items() if column is None and part not in _MAY_BE_NULL]:
            raise ValueError(f"{needed[0]}: null, but only {', '.join(_MAY_BE_NULL)} may be; name a column")
        return fields

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        if isinstance(value, str | list):
            return {"path": value}
        if not isinstance(value, dict):
            raise ValueError(f"input should be a valid string, a list of them or a section, but got {as_yaml(value)}")
        return value

    @property
    def paths(self) -> list[str]:
        return as_list(self.path)


class TrainingSetConfig(ProblemSetConfig):
    """A set of problems to train on, and where its prompts and verdicts differ from other sets'."""

    share: float | None = Field(
        None,
        ge=1e-6,
        le=1,
        description="with several sets: the share of the run's prompts that are its problems. All sets have one, which "
        "add up to 1, or none: every problem then counts once in an epoch",
    )
    category: str | None = Field(None, description="of its problems, whatever a column says; default: the column's")
    verifier: BenchmarkVerifier = Field(
        None, description="judges responses to its problems; default: `verifier`; settings need a `kind`"
    )
    environment: EnvironmentConfig | None = Field(None, description=ENVIRONMENT)
    instruction: str | None = Field(None, description="default: `prompt.instruction`; empty for none")


class DataConfig(Section):
    """The problems to train on."""

    train: OneOrMore[TrainingSetConfig] = Field(description="problems to train on, in one or several sets")
    shuffle: bool = Field(True, description="draw problems in a new seeded order every epoch")

    @pydantic.field_validator("train", mode="before")
    @classmethod
    def _one_of_paths(cls, train: Any) -> Any:
        """Read a list of paths as one set of several files."""
        return {"path": train} if isinstance(train, list) and all(isinstance(each, str) for each in train) else train

    @pydantic.field_validator("train")
    @classmethod
    def _check_shares(cls, train: TrainingSetConfig | list[TrainingSetConfig]) -> Any:
        shares = [each.share for each in as_list(train)]
        given = [share for share in shares if share is not None]
        if given and len(given) < len(shares):
            raise ValueError(
                f"set {shares.index(None)} has no share, and others have (the first is set 0): give all one, or none"
            )
        if given and round(sum(given), 2) != 1:
            raise ValueError(f"shares {', '.join(map('{:g}'.format, given))} add up to {sum(given):g}, and not to 1")
        return train

    @property
    def sets(self) -> Mapping[str, TrainingSetConfig]:
        """The sets to train on by their key: `data.train`, or `data.train.0`, `data.train.1` and so on."""
        if isinstance(self.train, list):
            return {f"data.train.{index}": each for index, each in enumerate(self.train)}
        return {"data.train": self.train}

    @property
    def shares(self) -> Mapping[str, float]:
        """The sets' shares by key, of a sum of 1; empty where none are given."""
        given = {key: each.share for key, each in self.sets.items() if each.share is not None}
        return {key: share / sum(given.values()) for key, share in given.items()}


TEMPLATES = r"teacher|teachers\.[a-z][a-z0-9_]*|student|plain|.+\.jinja"
TEMPLATE_WORDS = "give teacher, teachers.NAME, student, plain or the path of a Jinja file that ends in .jinja"


class TemplateConfig(Section):
    """Whose chat template renders a kind of prompt, and with which variables."""

    template: Annotated[str, spelled(TEMPLATES, TEMPLATE_WORDS)] = Field(
        "teacher",
        description="whose chat template renders these prompts: `teacher` (of several, the one that all have, or "
        "`teachers.<name>`), `student`, a Jinja file's path, or for base models `plain`: the texts, then `Answer:`",
    )
    thinking: Thinking = False
    template_arguments: dict[str, bool | int | str] = Field({}, description="extra variables for the chat template")

    def _check(self) -> None:
        if "enable_thinking" in self.template_arguments:
            raise ValueError("template_arguments.enable_thinking is what thinking sets: remove it")


_PARTS = ("problem", "instruction", "solution", "answer", "category")
_PART = re.compile(r"\{([a-z_]+)\}")


class TeacherPromptConfig(TemplateConfig):
    """What the teacher reads in place of the student's prompt: the same problem, with more or other words."""

    text: str = Field(
        "{problem} {instruction}",
        description="the user's message, in quotes; `{problem}`, `{instruction}` (that of `prompt`), `{solution}`, "
        "`{answer}` and `{category}` are filled in",
    )
    max_tokens: PositiveInt = Field(2048, description="problems with longer ones are filtered and counted")

    @pydantic.field_validator("text", mode="before")
    @classmethod
    def _check_quotes(cls, text: Any) -> Any:
        if isinstance(text, dict):
            raise ValueError("braces are a mapping in YAML: write the text in quotes, as in text: '{problem}'")
        return text

    @pydantic.field_validator("text")
    @classmethod
    def _check_parts(cls, text: str) -> str:
        if unknown := [part for part in _PART.findall(text) if part not in _PARTS]:
            known = ", ".join(f"{{{part}}}" for part in _PARTS)
            raise ValueError(
                f"{{{unknown[0]}}} is no part of a problem: give {known}, or put a space behind a brace that is meant"
            )
        return text

    @property
    def names_solution(self) -> bool:
        return "solution" in _PART.findall(self.text)

    def filled(self, part: Callable[[str], str]) -> str:
        """Return the text, and in it what `part` gives for each name. What it gives may hold braces of its own."""
        return _PART.sub(lambda found: part(found[1]), self.text).strip()


class PromptConfig(TemplateConfig):
    """How a problem becomes a prompt. Evaluation always uses the student's own template."""

    instruction: str = Field(
        "Please reason step by step, and put your final answer within \\boxed{}.",
        description="appended to the problem, behind a blank or behind its own white space; empty for none",
    )
    teacher: TeacherPromptConfig | None = Field(
        None,
        description="what the teacher reads in place of the student's prompt, such as the solution beside the problem; "
        "null: the student's prompt",
    )
