"""Suggests the key that was meant by one that does not exist.

It may be misspelt, belong to another section, or be another trainer's name for the same thing. For some features the
answer is that they are not built yet, or were removed.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from pydantic import BaseModel

from spot_async.base import registry
from spot_async.base.secrets import looks_secret, names_secret

TABLE = Path(__file__).with_name("other_trainers.yaml")
PLACES_SHOWN = 3
CLOSE = 0.75  # of names that are likely misspelt; less alike ones mislead
SAME_START = 5  # letters, as in `trainer` for `training`


class OtherName(msgspec.Struct, frozen=True):
    """A key of ours, and its names in other trainers."""

    here: str
    other: Sequence[str]
    note: str = ""  # what is different about ours


class Answer(msgspec.Struct, frozen=True):
    """What to say of keys or kinds of other trainers that have no one counterpart here."""

    other: Sequence[str]
    says: str


class OtherTrainers(msgspec.Struct, frozen=True):
    """What people who come from other trainers write. `TABLE` holds it."""

    keys: Sequence[OtherName]
    answers: Sequence[Answer]
    kinds: Mapping[registry.Group, Sequence[Answer]]

    def key(self, name: str) -> OtherName | None:
        return next((each for each in self.keys if name in each.other), None)

    def answer(self, name: str, group: registry.Group | None = None) -> str | None:
        """Return what to say of a key, or of a kind of a group's plug-ins."""
        answers = self.answers if group is None else self.kinds[group]
        return next((each.says for each in answers if name in each.other), None)


@functools.cache
def other_trainers() -> OtherTrainers:
    return msgspec.yaml.decode(TABLE.read_bytes(), type=OtherTrainers)


def unknown_key(name: str, known: Sequence[str], root: type[BaseModel]) -> str:
    """Return the complaint about the key `name` in a section of the `known` keys.

    It suggests what was most likely meant: a key of this section, or of any other below `root`.
    """
    if (says := other_trainers().answer(name)) is not None:
        return f"unknown key; {says}"
    if (meant := other_trainers().key(name)) is not None:
        return f"unknown key; here it is `{meant.here}`" + (f" ({meant.note})" if meant.note else "")
    section = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if not section and (places := [path for path in paths(root) if path.rpartition(".")[2] == name]):
        listed = " or ".join(f"`{path}`" for path in places[:PLACES_SHOWN])
        return f"unknown key; did you mean {listed}?"
    close = section or difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
    close = close or [key for key in known if key.startswith(name[:SAME_START])][:1]
    return "unknown key; " + (f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(known)}")


def unknown_option(option: str, value: str, root: type[BaseModel]) -> str:
    """Return the complaint about an option such as `--lr` of a command that takes keys of the configuration."""
    name = option.lstrip("-").replace("-", "_")
    if name in ("config", "config_file"):
        return f"{option}: no such option; the file is given without one: {value or 'CONFIG'}"
    if (says := other_trainers().answer(name)) is not None:
        return f"{option}: no such option; {says}"
    keys = [path for path in paths(root) if path.rpartition(".")[2] == name]
    if (meant := other_trainers().key(name)) is not None:
        keys = [meant.here]
    if name.partition(".")[0] in root.model_fields:
        keys = [name]
    shown = "..." if not value or names_secret(name) or looks_secret(value) else value
    given = " or ".join(f"{key}={shown}" for key in keys[:PLACES_SHOWN])
    return f"{option}: no such option; keys are given without dashes: {given or 'section.key=value'}"


def paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Return every key below a section as a dotted path, without the plug-ins' own.

    Sections that users name themselves (`benchmarks.<name>`) are not entered.
    """
    for name, field in schema.model_fields.items():
        yield prefix + name
        if typing.get_origin(field.annotation) is dict:
            continue
        for section in classes(field.annotation):
            if issubclass(section, BaseModel) and section.model_fields:
                yield from paths(section, f"{prefix}{name}.")


def classes(annotation: object) -> Iterator[type]:
    """Return all classes of an annotation, those inside unions and containers too."""
    if isinstance(annotation, type):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from classes(argument)
