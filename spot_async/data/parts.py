"""Finds the parts of a problem in a row: by column, inside nested columns, inside chat messages.

The result is a draft. Layouts mend it and decide whether its parts are right (`layouts.py`). Chat messages have
OpenAI's form: the question is the last message of a user, those before it are the history, those after it the answer.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import msgspec

from spot_async.base.text import DOUBLED, EATEN, EATEN_IN_ANSWER, place_of, shortened
from spot_async.config.problems import Part
from spot_async.data.keys import setting
from spot_async.data.rows import Columns, Row, literal, only_value
from spot_async.errors import DataError
from spot_async.types import ChatTurn, Problem
from spot_async.verification.normalization import extract_boxed

EXACT_FLOATS = 1e15  # a float with a whole value below this has lost no digits
SHOWN_CHARS = 80
_ABSENT = object()
_shown = reprlib.Repr()  # shortens values that are huge, or nested without end
_shown.maxstring = SHOWN_CHARS
_LABEL = (str | int | float | list[str], "text, a number or a list of texts")
_ACCEPTED: dict[Part, tuple[Any, str]] = {  # types, and what they are called
    "problem": (str, "text, or chat messages with one of a user"),
    "answer": (str | int | float, "text or a number"),
    "id": (str | int | float, "text or a number"),
    "tier": _LABEL,
    "category": _LABEL,
    "domain": _LABEL,
    "choices": (list[str | int | float], "a list of texts or numbers"),
    "solution": (str, "text"),
    "response": (str, "text"),
}
Messages: TypeAlias = list[dict[str, Any]]
_SPOKEN: tuple[Part, ...] = ("problem", "answer", "solution", "response")  # parts that chat messages may hold
_OF_QUESTION = re.compile(  # names of columns
    r"(?:(?:decoded_)?(?:image|picture|figure|diagram|video|audio|table)s?(?:_?[0-9]+|_path|_url)?|contexts?|passage|body|"
    r"paragraph|article|documents?|story|background|evidence|premises?|inputs?|options|choices|system(?:_prompt|_message)?|"
    r"history|tools|starter_code)",
    re.IGNORECASE,
)
# Keys of a message beside its content that templates write: what the model thought, and what else was said.
_THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking",
    "thought",
    "thoughts",
    "analysis",
    "cot",
    "chain_of_thought",
    "think",
)
_BESIDE_CONTENT = ("tool_calls", "function_call", "images", "image", "videos", "audio")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # as templates know them


class Draft(msgspec.Struct, kw_only=True):
    """What a row says about a problem, before anything is mended."""

    problem: str
    answer: str | int | float = ""
    id: str | None = None
    tier: str | None = None
    category: str | None = None
    domain: str | None = None
    choices: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # of the choices, where the file has them
    solution: str | None = None
    response: str | None = None
    history: tuple[ChatTurn, ...] = ()
    doubts: dict[str, str] = {}  # what the row may not mean, and where in its text, if that is known
    chat_in_string: bool = False  # a column holds its chat messages as text
    lacks_box: bool = False  # the answer should be in the assistant's last message, but that has no box

    @property
    def gold(self) -> str:
        """The answer as text."""
        return as_text(self.answer).strip()

    def finish(self, prefix: str, number: int) -> Problem:
        """Return the problem. Without an id it is named after its row's number, where a header does not count."""
        return Problem(
            id=prefix + (f"row-{number}" if self.id is None else self.id),
            text=self.problem,
            answer=self.gold,
            tier=self.tier,
            category=self.category,
            domain=self.domain,
            choices=self.choices,
            solution=self.solution,
            response=self.response,
            history=self.history,
        )


def as_text(value: str | int | float) -> str:
    """Return the value as text, `3` for 3.0: some programs turn a column of integers with gaps into floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_FLOATS:
        return str(int(value))
    return str(value)


def read_draft(
    row: Row,
    columns_of: Mapping[Part, tuple[str, ...]],
    chosen: Mapping[Part, str | None],
    key: str,
    needs: Collection[Part],
) -> Draft:
    """Return the parts of `row`, each from the first of its columns that is not empty. `chosen` columns must exist.

    A part whose chosen column is None is not read.

    Raises DataError naming the row and the part that is missing or has a wrong type.
    """
    parts: dict[str, Any] = {}
    read: set[str] = set()  # columns
    for part in dict.fromkeys([*columns_of, *chosen]):
        column = chosen.get(part)
        names = columns_of[part] if part not in chosen else (column,) if column is not None else ()
        found = {name: value for name in names if (value := _look_up(row.columns, name)) is not _ABSENT}
        if not found and column is not None:
            named_by = "policy.route.by" if part == "domain" else setting(key, f"fields.{part}")
            raise DataError(f"{row.where}: no column {column!r}, which {named_by} names; {_has(row)}")
        name, value = next((each for each in found.items() if not _is_empty(each[1])), ("", None))
        read.add(name.partition(".")[0])
        if part in _SPOKEN and isinstance(value, str) and "role" in value and is_chat(chat := literal(value)):
            value, parts["chat_in_string"] = chat, True
        if part in _SPOKEN and is_chat(value):
            parts |= _of_chat(part, value, name, row)
        elif part == "choices" and value is not None:
            labels, choices = (_typed(part, each, name, row, key) for each in _labelled(name, value, row.columns))
            parts |= {"labels": labels, part: choices}
        elif value is not None:
            parts[part] = _typed(part, value, name, row, key)
        elif part in needs and found:
            raise DataError(f"{row.where}: `{part}` (column {next(iter(found))!r}) is empty; correct or remove the row")
        elif part in needs and row.number > 1:  # all rows before have it, so this row is at fault and not the layout
            raise DataError(
                f"{row.where}: no `{part}`, which all rows before have; {_has(row)}: correct or remove the row"
            )
        elif part in needs:
            raise DataError(
                f"{row.where}: no `{part}`, for which this layout takes {' or '.join(map(repr, names))}; {_has(row)}: "
                f"{_remedy(part, row, key)}"
            )
    draft = Draft(**parts)
    question = draft.finish("", row.number).shown
    for name, value in row.columns.items():
        is_thought = draft.response is not None and name.lower() in _THOUGHTS
        if name in read or _says_nothing(value) or not (is_thought or _OF_QUESTION.fullmatch(name)):
            continue
        part, whole = ("response", draft.response or "") if is_thought else ("problem", question)
        texts = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else [value]
        if not all(isinstance(each, str | int | float) and str(each).strip() in whole for each in texts):
            owner = "response" if is_thought else "question"
            draft.doubts[f"column {name!r} may belong to the {owner} and is not read (write it into the {part})"] = ""
    _doubt_texts(draft)
    return draft


def _doubt_texts(draft: Draft) -> None:
    """Doubt the texts whose escapes were eaten, or whose backslashes are doubled; `golds.py` names such answers."""
    texts: dict[str, str] = {part: str(getattr(draft, part) or "") for part in _SPOKEN}
    texts |= {"choices": " ".join(draft.choices), "history": " ".join(each.content for each in draft.history)}
    for part, text in texts.items():
        is_short = part == "answer" and "\n" not in text.strip()  # and no program, where tabs are meant
        if (place := place_of(EATEN_IN_ANSWER if is_short else EATEN, text)) is not None:
            what = rf"`{part}` holds control characters, as where JSON reads `\f` of `\frac` (write `\\frac`)"
            draft.doubts[what] = f" ({place})"
        if part != "answer" and (place := place_of(DOUBLED, text)) is not None:
            draft.doubts[f"`{part}` has two backslashes before a command (write one)"] = f" ({place})"


def _remedy(part: Part, row: Row, key: str) -> str:
    """Say what to do about a part for which the layout found no column."""
    field, layout = setting(key, f"fields.{part}"), setting(key, "layout")
    if part != "answer":
        return f"name its column in {field}, or another {layout}"
    chat = next((name for name, value in row.columns.items() if is_chat(value)), None)
    box = f" ({chat}: the box in the assistant's last message)" if chat is not None else ""
    return (
        f"name its column in {field}{box}, or another {layout}; only policies that learn from no outcome, such as opd, "
        "train without"
    )


def _of_chat(part: Part, messages: Messages, name: str, row: Row) -> dict[str, Any]:
    """Read a part from chat messages: the question is the user's last, the answer the assistant's last behind it."""
    end = max((number for number, each in enumerate(messages, start=1) if each["role"] == "user"), default=0)
    before, behind = messages[:end], messages[end:]
    if part == "problem":
        try:
            if not before:
                raise ValueError("has no message of a user")
            *history, question = [_turn(number, each) for number, each in enumerate(before, start=1)]
        except ValueError as error:
            raise DataError(f"{row.where}: column {name!r} {error}; correct or remove the row") from None
        lost = {key for each in before for key in _THOUGHTS if not _says_nothing(each.get(key))}
        doubts = {f"`{key}` of earlier messages is not read": "" for key in sorted(lost)}
        return {"problem": question.content, "history": tuple(history), "doubts": doubts}
    if part == "response" and behind and (beside := _beside_content(behind)) is not None:
        raise DataError(
            f"{row.where}: column {name!r}: the assistant's last message has {beside}, which would not be learnt: "
            "write all that is to be learnt into its content, or remove it"
        )
    said = next((_text(each.get("content")) or "" for each in reversed(behind) if each["role"] == "assistant"), "")
    if part != "answer":
        return {part: said or None}
    box = extract_boxed(said)
    return {"answer": box or "", "lacks_box": not box}


def _beside_content(behind: Messages) -> str | None:
    """Return what there is of a response beside the text of its last message."""
    last = behind[-1]
    if len(behind) > 1:
        return "other messages beside it"
    if not _is_empty(last.get("content")) and _text(last["content"]) is None:
        return "content that is not text"
    return next((repr(key) for key in (*_THOUGHTS, *_BESIDE_CONTENT) if not _says_nothing(last.get(key))), None)


def _typed(part: Part, value: Any, name: str, row: Row, key: str) -> str | int | float | tuple[str, ...]:
    """Convert `value` of the column `name` to the type that a draft has for `part`."""
    types, words = _ACCEPTED[part]
    try:
        found = msgspec.convert(only_value(value) if part == "answer" else value, types)
    except msgspec.ValidationError:
        shown = shortened(_shown.repr(value), SHOWN_CHARS)
        raise DataError(
            f"{row.where}: column {name!r} is {shown}, but `{part}` is {words}; name another in "
            f"{setting(key, f'fields.{part}')}, or correct the file"
        ) from None
    if part == "answer":
        return found  # type: ignore[no-any-return]  # a number may be the place of a choice
    if not isinstance(found, list):
        return as_text(found)
    texts = tuple(map(as_text, found))
    return texts if part == "choices" else ", ".join(texts)  # a problem of two kinds is a kind of its own


def _labelled(name: str, value: Any, columns: Columns) -> tuple[Any, Any]:
    """Return the labels of choices, if the file has some, and the choices: beside them, as in ARC, or by label."""
    both = _look_up(columns, name.removesuffix(".text"))
    if isinstance(both, dict) and both.keys() >= {"label", "text"}:
        return both["label"] or (), both["text"]
    return ([*value], [*value.values()]) if isinstance(value, dict) else ((), value)


def _is_empty(value: Any) -> bool:
    """Return whether a value is null or what programs write for it: an empty cell or list, or NaN."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return value is None or value == [] or (isinstance(value, str) and value.strip().lower() in ("", "nan"))


def _says_nothing(value: Any) -> bool:
    """Return whether a value is empty, or holds nothing else: what Parquet writes for a field that some rows have."""
    if isinstance(value, dict | list):
        return all(map(_says_nothing, value.values() if isinstance(value, dict) else value))
    return _is_empty(value)


def _look_up(columns: Columns, name: str) -> Any:
    """Return the value of a column, or for `a.b` that of `b` inside `a`."""
    value: Any = columns.get(name, _ABSENT)
    if value is _ABSENT and "." in name:
        head, _, rest = name.partition(".")
        inside = columns.get(head)
        if isinstance(inside, dict):
            return _look_up(inside, rest)
        return None if head in columns and inside is None else _ABSENT
    return value


def _has(row: Row) -> str:
    names = (name if name.isprintable() else repr(name) for name in row.columns)
    return f"the row has {', '.join(names) or 'no columns'}"


def is_chat(value: object) -> bool:
    """Return whether a column holds chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def _turn(number: int, message: dict[str, Any]) -> ChatTurn:
    """Return a turn. Raises ValueError, whose text continues a column's name, where no template could render it."""
    role, text = _ROLES.get(str(message["role"])), _text(message.get("content"))
    if role is None:
        raise ValueError(f"has message {number} of another role than system, user or assistant")
    if text is None:
        raise ValueError(f"has message {number} with a content that is not text")
    if beside := [key for key in _BESIDE_CONTENT if not _says_nothing(message.get(key))]:
        raise ValueError(f"has message {number} with {beside[0]!r}, which no prompt holds")
    return ChatTurn(role=role, content=text)


def _text(content: object) -> str | None:
    """Return the text of a message, which may be a list of parts; None if it holds anything but text."""
    if isinstance(content, list):
        texts = [each.get("text") for each in content if isinstance(each, dict) and each.get("type") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(content) else None
    return content if isinstance(content, str) else None
