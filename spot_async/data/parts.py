"""A problem in the making, and finding its parts in a row: by column, inside nested columns, inside chat messages.

Whether a part is right is the layouts' business (`layouts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from spot_async.data.rows import Columns, Row
from spot_async.errors import DataError
from spot_async.types import Problem
from spot_async.vocabulary import first_line

Part: TypeAlias = Literal["problem", "answer", "id", "tier", "category", "choices", "solution"]
_ABSENT = object()


class Draft(msgspec.Struct, kw_only=True):
    """What a row says of a problem, before anything is mended."""

    problem: str
    answer: str | int = ""
    id: str | int | None = None
    tier: str | int | None = None
    category: str | None = None
    choices: tuple[str, ...] = ()
    solution: str | None = None

    @property
    def gold(self) -> str:
        """The answer as text."""
        return str(self.answer).strip()

    def finish(self, prefix: str, line: int) -> Problem:
        """The problem. Without an id it is called after its line."""
        return Problem(
            id=prefix + (f"line-{line}" if self.id is None else str(self.id)),
            text=self.problem,
            answer=self.gold,
            tier=None if self.tier is None else str(self.tier),
            category=self.category,
            choices=self.choices,
            solution=self.solution,
        )


def read_draft(
    row: Row, columns_of: Mapping[Part, tuple[str, ...]], chosen: Mapping[Part, str], key: str, *, needs_answer: bool
) -> Draft:
    """The parts of `row`, each from the first of its columns that is there; `chosen` ones must be there.

    Raises DataError naming the row and the part that is missing or of a wrong type.
    """
    parts: dict[str, Any] = {}
    for part in columns_of.keys() | chosen.keys():
        names = (chosen[part],) if part in chosen else columns_of[part]
        value = next((found for name in names if (found := _look_up(row.columns, name)) is not _ABSENT), _ABSENT)
        if value is _ABSENT:
            if part in chosen:
                raise DataError(
                    f"{row.where}: no column {chosen[part]!r}, which {key}.fields.{part} names; {_has(row)}"
                )
            if part == "problem" or (part == "answer" and needs_answer):
                raise DataError(f"{row.where}: no `{part}`; name its column in {key}.fields.{part}; {_has(row)}")
            continue
        parts[part] = _message(value) if part == "problem" else str(value) if isinstance(value, float) else value
    try:
        return msgspec.convert(parts, Draft)
    except msgspec.ValidationError as error:
        raise DataError(f"{row.where}: {first_line(error)}") from None


def _look_up(columns: Columns, name: str) -> Any:
    """The value of a column, or of `b` inside `a` for `a.b`. One that is null is as good as not there."""
    value: Any = columns.get(name, _ABSENT)
    if value is _ABSENT and "." in name:
        head, _, rest = name.partition(".")
        inside = columns.get(head)
        value = _look_up(inside, rest) if isinstance(inside, dict) else _ABSENT
    return _ABSENT if value is None else value


def _message(value: Any) -> Any:
    """What the user says last, where a column holds chat messages; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        said = [each.get("content") for each in value if each.get("role") == "user"]
        return said[-1] if said else value
    return value


def _has(row: Row) -> str:
    return f"the row has {', '.join(row.columns) or 'no columns'}"
