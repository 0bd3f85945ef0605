"""Reads a YAML file and `section.key=value` overrides into a validated `Config`.

Every problem is a line `key: what is wrong (value); what to do` of a `ConfigError`. For a misspelt key the line has the
nearest valid name.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spot_async.base.files import read_bounded
from spot_async.base.text import DOUBLED, EATEN, first_line, kind_of_value, place_of
from spot_async.config import Config
from spot_async.config.base import ONE, SEVERAL, as_yaml, plain_json
from spot_async.config.plugins import BackendSettings, PluginSettings, PluginSettingsError
from spot_async.config.saved_secrets import saved_secrets
from spot_async.config.schema import EvaluationOnly
from spot_async.config.suggestions import classes, unknown_key
from spot_async.errors import ConfigError

S = TypeVar("S", bound=BaseModel)

# A resolved configuration has about 10 KB. YAML's aliases make many values of few bytes.
MAX_YAML_BYTES, MAX_YAML_VALUES, MAX_MERGED, MAX_BASES = 1 << 18, 100_000, 1000, 16
OF_KEY = "[key]"  # pydantic's mark for an error in a key rather than in its value
FORMS = {"model_type": "a section", "dict_type": "a mapping", "list_type": "a list"}  # pydantic's words: YAML's words
# Pydantic's names of the types of a plain value that may have one of several.
CHOICE = re.compile(r"bool|int|float|str|constrained-\w+|literal\[.*\]")
READ_BY_MODELS = {"instruction", "text", "system"}  # other texts may be patterns, where a backslash is doubled
KEYS_OF_PLUGINS = ("backend", "policy", "verifier")  # a plain value here is short for `kind`, elsewhere for `path`


class _RepeatedKeyError(yaml.MarkedYAMLError):
    """Raised for a key that one mapping has twice."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads `3e-6` as a number, which YAML 1.1 would not, and refuses a key that stands twice."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        if sum(len(each.value) for each in merged) > MAX_MERGED:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} merges more than {MAX_MERGED:,} mappings")
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} merges more than {MAX_MERGED:,} keys")

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue  # several `<<` are all merged, so a second one loses nothing
            if (other := first.setdefault(key.value, key)) is not key:
                lines = [each.start_mark.line + 1 for each in (other, key)]
                twice = "twice" if lines[0] == lines[1] else f"here and in line {lines[0]}"
                raise _RepeatedKeyError(problem=f"`{key.value}` stands {twice}", problem_mark=key.start_mark)
        return node


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and validate a configuration. Relative paths in it are relative to the working directory."""
    return validate(_overridden(read_tree(path), overrides))


def read_tree(path: Path, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file's plain values, laid over those of the files that its `base` names (relative to its own folder).

    Each base lies over those before it. `readers` are the files that led here: one of them again is a circle.
    """
    if path.resolve() in readers:
        raise ConfigError(f"{path}: is its own `base`, through {', '.join(reader.name for reader in readers)}")
    if len(readers) >= MAX_BASES:
        raise ConfigError(f"{path}: is the `base` of more than {MAX_BASES} files in a row")
    tree = read_plain(path)
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else kind_of_value(tree)
        raise ConfigError(f"{path}: expected sections such as `student:` at the top, found {found}")
    bases = tree.pop("base", [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{path}: `base` must name a configuration file, or several in a list, but is {as_yaml(bases)}"
        )
    below: dict[str, Any] = {}
    for name in names:
        below = laid_over(read_tree(path.parent / name, (*readers, path.resolve())), below)
    return laid_over(tree, below)


def read_plain(path: Path) -> Any:
    """Return a YAML file's plain values as they stand there. Raises ConfigError; no code is imported or run."""
    try:
        text = read_bounded(path, MAX_YAML_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the configuration is not UTF-8 text") from None
    return parse_yaml(text, str(path))


def _unshared(tree: Any, left: Iterator[int]) -> Any:
    """Return a copy in which sections that share a YAML alias are separate, so that an override changes only one.

    Aliases of aliases may stand for more values than memory holds, so `left` is taken from for each.
    """
    if next(left, None) is None:
        raise yaml.YAMLError(f"has more than {MAX_YAML_VALUES:,} values")
    if isinstance(tree, dict):
        return {key: _unshared(value, left) for key, value in tree.items()}
    return [_unshared(each, left) for each in tree] if isinstance(tree, list) else tree


def laid_over(tree: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `tree` in place of its own.

    Sections are merged key by key. One that names its `kind` replaces the whole section, whose keys may be of another.
    """
    merged = dict(base)
    for key, value in tree.items():
        below = base.get(key)
        is_part = isinstance(value, dict) and "kind" not in value and isinstance(below, dict)
        merged[key] = laid_over(value, below) if is_part and isinstance(below, dict) else value
    return merged


def config_from(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Override and validate plain values, such as a YAML file would hold. `tree` itself stays as it is."""
    return validate(_overridden(copy.deepcopy(dict(tree)), overrides))


def evaluation_from(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> EvaluationOnly:
    """As `config_from`, for `eval`: sections that only training needs may be missing."""
    return validate_as(EvaluationOnly, _overridden(copy.deepcopy(dict(tree)), overrides))


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply all overrides to `tree` itself, and return it.

    An override that gives a plug-in's section another `kind` first empties that section, since its keys were meant for
    the kind before (`laid_over` does the same for a file). Other overrides of the section count, whatever their order.
    """
    for override in overrides:
        name, _, text = override.partition("=")
        *keys, last = name.strip().split(".")
        if last != "kind" or keys[-1:] == [] or keys[-1] not in KEYS_OF_PLUGINS:
            continue
        kind = parse_yaml(text, f"override {name!r}")
        section: Any = tree
        for key in keys:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get("kind", kind) != kind:
            section.clear()
    for override in overrides:
        apply_override(tree, override)
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `tree`; the value is read as YAML. Errors do not show it: it may be a key.

    In a list of sections, such as one of several servers to launch, it is set in each, or in that of a number:
    `launch.0.devices=1`.
    """
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"override {override!r}: expected section.key=value")
    sections = [tree]
    for depth, key in enumerate(keys[:-1]):
        found = [each for section in sections for each in _below(section, key)]
        if not found or not all(isinstance(each, dict | list) for each in found):
            raise ConfigError(f"override {name!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        sections = found
    last = keys[-1]
    for section in sections:
        for each in section if isinstance(section, list) else [section]:
            each[last] = parse_yaml(text, f"override {name!r}") if text.strip() else ""


def _below(section: Any, key: str) -> list[Any]:
    """Return what is under a key of a section, or of each section of a list. A missing section is added."""
    if isinstance(section, list):
        if key.isdecimal():
            return section[int(key) : int(key) + 1]
        return [found for each in section for found in _below(each, key)]
    below = section.get(key)
    if below is None:  # missing, or an optional section that is null
        below = section[key] = {}
    if isinstance(below, str):  # the short forms `verifier: boxed_match` and `train: problems.jsonl`
        below = section[key] = {"kind" if key in KEYS_OF_PLUGINS else "path": below}
    if isinstance(below, list) and not (below and all(isinstance(each, dict) for each in below)):
        return [None]  # a list of plain values
    return [below]


def validate(tree: dict[str, Any]) -> Config:
    """Return the configuration that plain values make. Raises ConfigError with a line for each problem."""
    return validate_as(Config, tree)


def validate_as(schema: type[S], tree: dict[str, Any]) -> S:
    """Return the section that plain values make. Raises ConfigError with a line for each problem.

    They are validated as JSON, where a list may become a tuple but "1" is not 1.
    """
    if lines := list(dict.fromkeys(saved_secrets(tree))):  # first, because other lines show values
        raise ConfigError("\n".join(lines))
    if eaten := list(_holding(EATEN, tree)):
        remedy = "as YAML reads an escape in double quotes: write the text in single quotes"
        raise ConfigError("\n".join(f"{where}: holds {place}, {remedy}" for where, place in eaten))
    try:
        return schema.model_validate_json(plain_json(tree))
    except ValidationError as errors:
        lines = list(dict.fromkeys(_describe(errors, schema, ())))
        raise ConfigError("\n".join(lines)) from None
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigError(f"configuration holds a value that is no plain YAML value: {error}") from None


def _holding(pattern: re.Pattern[str], tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the key of each text in which the pattern finds something, and that. A key is a text too."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _holding(pattern, key, path)
            yield from _holding(pattern, value, (*path, str(key)))
    elif isinstance(tree, str) and (place := place_of(pattern, tree)) is not None:
        yield ".".join(path) or "configuration", place


def doubled_backslashes(config: Config) -> list[str]:
    """Return a line for each text for models with doubled backslashes. One that asks for JSON may mean them."""
    return [
        f"{where}: holds {place}, two backslashes before a command: write one, unless models are to read two"
        for where, place in _holding(DOUBLED, config.model_dump(mode="json"))
        if where.rpartition(".")[2] in READ_BY_MODELS
    ]


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to the same values."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain values of a YAML text; messages call it `source`. Raises ConfigError."""
    try:
        return _unshared(yaml.load(text, Loader=_Loader), iter(range(MAX_YAML_VALUES)))  # noqa: S506 - it is safe
    except _RepeatedKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise ConfigError(f"{source}: line {line}: {error.problem}, in the same section: keep one") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}:{where} not valid YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise ConfigError(f"{source}: sections or lists stand too deep within each other: take some away") from None
    except (ValueError, TypeError, OverflowError) as error:  # what stands for a number or a date that there is not
        raise ConfigError(f"{source}: not valid YAML: {first_line(error)}") from None


def _describe(
    errors: ValidationError, schema: type[BaseModel], prefix: tuple[str, ...], explained: Collection[str] = ()
) -> Iterator[str]:
    for error in _with_choices_joined(errors.errors(include_url=False)):
        location = (*prefix, *(str(part) for part in error["loc"] if part not in (ONE, SEVERAL, OF_KEY)))
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, PluginSettingsError):
            keys, kinds = cause.keys_of_other_kinds()
            if keys:
                yield f"{'.'.join(location)}: {_belongs_elsewhere(keys, kinds, '.'.join(location), cause.kind)}"
            yield from _describe(cause.errors, cause.schema, location, explained=keys)
        elif len(error["loc"]) == 1 and error["loc"][0] in explained:
            continue
        else:
            yield f"{'.'.join(location) or 'configuration'}: {_explain(error, schema, location)}"


def _with_choices_joined(errors: Sequence[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Make one error of those that name one by one the types that a value does not have, each at a key of its own."""

    def chosen(error: ErrorDetails) -> tuple[int | str, ...] | None:
        is_choice = error["loc"] and CHOICE.fullmatch(str(error["loc"][-1])) and error["type"] != "value_error"
        return error["loc"][:-1] if is_choice else None

    for location, same in itertools.groupby(errors, chosen):
        if location is None:
            yield from same
        else:
            choices = list(same)
            words = " or ".join(each["msg"].removeprefix("Input should be ") for each in choices)
            yield {**choices[0], "loc": location, "type": "choice", "msg": f"Input should be {words}"}


def _belongs_elsewhere(keys: Sequence[str], kinds: Sequence[str], section: str, kind: str) -> str:
    several = len(keys) > 1
    return (
        f"{', '.join(keys)} {'belong' if several else 'belongs'} to kind {' or '.join(kinds)}, but {section}.kind is "
        f"{kind}: take {'them' if several else 'it'} out, or set {section}.kind to {kinds[0]}"
    )


def _explain(error: ErrorDetails, schema: type[BaseModel], location: Sequence[str]) -> str:
    value = error.get("input")
    match error["type"]:
        case "extra_forbidden":
            owner = _schema_at(schema, error["loc"][:-1])
            return unknown_key(".".join(location), list(owner.model_fields) if owner else [], Config)
        case "literal_error" if error["loc"][-1] == OF_KEY:
            expected = error["ctx"]["expected"]
            close = difflib.get_close_matches(str(value), re.findall("'([^']*)'", expected), n=1, cutoff=0.5)
            return "unknown key; " + (f"did you mean `{close[0]}`?" if close else f"known keys: {expected}")
        case "missing":
            return "required, but not given"
        case "value_error":
            return str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        case "json_invalid":  # values that YAML could hold are always valid JSON, except where they are nested too deep
            return "sections or lists stand too deep within each other: take some away"
        case _:
            message = f"input should be {words}" if (words := FORMS.get(error["type"])) else error["msg"]
            message = message[:1].lower() + message[1:]
            return f"{message}, but got {as_yaml(value)}" if not isinstance(value, dict) else message


def _schema_at(schema: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the section that a location leads to, through optional annotations; None where it leads to no section."""
    current: type[BaseModel] | None = schema
    is_name = False
    for key in location:
        if key in (ONE, SEVERAL) or isinstance(key, int) or is_name:  # chooses among sections of the schema we are at
            is_name = False
            continue
        field = current.model_fields.get(str(key)) if current else None
        if field is None:
            return None
        is_name = typing.get_origin(field.annotation) is dict  # then the next key is a name that the user gave
        current = next((c for c in classes(field.annotation) if issubclass(c, BaseModel)), None)
    return current if current not in (BackendSettings, PluginSettings) else None
