"""Building blocks of configuration sections: their base class, bounded numbers, and "one value or a list of them"."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, TypeAlias, TypeVar

import msgspec
import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

SMALLEST = 1e-30  # what float32 can still divide by


def _not_almost_zero(value: float) -> float:
    if value < SMALLEST:
        raise ValueError(f"{value:g} is as good as 0: at least {SMALLEST:g}")
    return value


PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), pydantic.AfterValidator(_not_almost_zero)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1), pydantic.AfterValidator(_not_almost_zero)]


def spelled(pattern: str, words: str) -> pydantic.AfterValidator:
    """Return a validator that refuses a text unless the whole of it matches `pattern`; `words` explain the pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{words}, but got {text!r}")
        return text

    return pydantic.AfterValidator(check)


def check_attempt_timeout(attempt_timeout_s: float | None, timeout_s: float) -> None:
    if attempt_timeout_s is not None and attempt_timeout_s > timeout_s:
        raise ValueError(
            f"attempt_timeout_s={attempt_timeout_s:g} is longer than timeout_s={timeout_s:g}, which is the time of all "
            "attempts together: lower it, raise timeout_s, or leave it out"
        )


class Section(BaseModel):
    """Base of every configuration section: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)

    def _check(self) -> None:
        """Raise ValueError unless the values fit together."""

    @pydantic.model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self


def plain_json(value: Any) -> bytes:
    """Return plain values as JSON for pydantic to validate.

    `json` writes the values inside, since msgspec would write `.nan` and `.inf` as null, and pydantic must refuse them.
    """
    return json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False).encode()


def as_yaml(value: Any) -> str:
    """Return a plain value on one line, as a configuration has it: `null`, `true`, `[1, 2]`."""
    if isinstance(value, str):
        return repr(value)
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a tree of mappings, each with its key: `training.ranks`."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


T = TypeVar("T")

# `OneOrMore[T]` is a value, or a list of such values for a role with several servers. The tags keep errors readable:
# pydantic then reports only those of the form that was given. `loading.py` leaves the tags out of the key.
ONE, SEVERAL = "<one>", "<several>"


def _form(value: Any) -> str:
    return SEVERAL if isinstance(value, list) else ONE


OneOrMore: TypeAlias = Annotated[
    Annotated[T, Tag(ONE)] | Annotated[list[T], Field(min_length=1), Tag(SEVERAL)], Discriminator(_form)
]


def as_list(value: T | list[T] | None) -> list[T]:
    """Return the values of a `OneOrMore` as a list; an empty one for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
