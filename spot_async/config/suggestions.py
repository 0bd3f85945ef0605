"""Suggests what was meant by a key, an option, a kind or a command that does not exist.

It may be misspelt, belong to another section, be another trainer's name for the same thing, or one that was ours. For
some features the answer is that they are not built yet, or were removed.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from pydantic import BaseModel

from spot_async.base.secrets import looks_secret, names_secret

TABLE = Path(__file__).with_name("other_names.yaml")
PLACES_SHOWN = 3
CLOSE = 0.75  # of names that are likely misspelt; less alike ones mislead
SAME_START = 5  # letters, as in `trainer` for `training`


class OtherName(msgspec.Struct, frozen=True):
    """Names that are none here, and what to say of them: the name here, or an answer where no one name is."""

    other: Sequence[str]
    here: str = ""
    note: str = ""  # what is different about ours
    says: str = ""

    @property
    def answer(self) -> str:
        return self.says or f"here it is `{self.here}`" + (f" ({self.note})" if self.note else "")


@functools.cache
def other_names() -> Mapping[str, Sequence[OtherName]]:
    """Return what `TABLE` holds, by what the names are of: `keys`, kinds of `policies`, ..."""
    return msgspec.yaml.decode(TABLE.read_bytes(), type=dict[str, list[OtherName]])


def other_name(name: str, of: str) -> OtherName | None:
    """Return what there is here in place of a name. The table may have patterns, such as `stages.*.timeout_s`."""
    return next((each for each in other_names()[of] if any(fnmatchcase(name, other) for other in each.other)), None)


def other_key(key: str) -> OtherName | None:
    """Return what there is here in place of a key, given with its sections: ours of before, or another trainer's."""
    return other_name(key, "keys_before") or other_name(key.rpartition(".")[2], "keys")


def unknown_key(key: str, known: Sequence[str], root: type[BaseModel]) -> str:
    """Return the complaint about a key, given with its sections, in a section of the `known` keys.

    It suggests what was most likely meant: a key of this section, or of any other below `root`.
    """
    name = key.rpartition(".")[2]
    if (meant := other_key(key)) is not None:
        return f"unknown key; {meant.answer}"
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
    meant = other_key(name)
    if meant is not None and meant.says:
        return f"{option}: no such option; {meant.says}"
    keys = [meant.here] if meant else [path for path in paths(root) if path.rpartition(".")[2] == name]
    if meant is None and name.partition(".")[0] in root.model_fields:
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
