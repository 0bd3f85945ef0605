"""What sections of the configuration are made of: their base class, bounded numbers, a value or a list of such."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]


def spelled(pattern: str, words: str) -> pydantic.AfterValidator:
    """Refuses texts that a regular expression does not match as a whole, with words for what it says."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{words}, but got {text!r}")
        return text

    return pydantic.AfterValidator(check)


class Section(BaseModel):
    """Base of every configuration section: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


def plain_json(value: Any) -> bytes:
    """Plain values as JSON to validate. Msgspec would make null of `.nan` and `.inf`, which are to be refused."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False).encode()


def as_yaml(value: Any) -> str:
    """A plain value on one line, as a configuration has it: `null`, `true`, `[1, 2]`."""
    if isinstance(value, str):
        return repr(value)
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]


T = TypeVar("T")

# A value, or a list of such values: for what may be said of each of several servers. The tags keep errors readable:
# those of the form that was given and of no other, under the key itself (`loading.py` leaves the tags out).
ONE, SEVERAL = "<one>", "<several>"


def _form(value: Any) -> str:
    return SEVERAL if isinstance(value, list) else ONE


OneOrMore: TypeAlias = Annotated[
    Annotated[T, Tag(ONE)] | Annotated[list[T], Field(min_length=1), Tag(SEVERAL)], Discriminator(_form)
]


def as_list(value: T | list[T] | None) -> list[T]:
    """The values of a `OneOrMore`, or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
