"""Writes docs/configuration.md from the code, and the last part of docs/coming-from.md. `make docs` runs it.

Everything on the first page comes from `config/schema.py` and from the plug-ins that spot-async itself registers: keys,
types, defaults, and meanings, which are the fields' descriptions. Other trainers' names for them come from
`config/other_names.yaml`. A test compares both pages with what this writes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spot_async.base import registry
from spot_async.config import Config, PluginSettings, Section
from spot_async.config.suggestions import OtherName, other_names

DOCS = Path(__file__).parents[2] / "docs"
GROUP_OF_KEY: dict[str, registry.Group] = {"backend": "backends", "policy": "policies", "verifier": "verifiers"}
KEYS_OF_GROUP: dict[registry.Group, str] = {
    "policies": "`policy`",
    "backends": "`student.backend`, `teacher.backend` and `reference.backend`",
    "verifiers": "`verifier` and `evaluation.verifier`",
}
UNIT_OF_ENDING = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_nats": "nats",
    "_prompts": "prompts",
    "batch_size": "prompts",
    "iterations": "iterations",
    "eval_every": "iterations",
    "staleness": "iterations",
    "epochs": "epochs",
}
BOUNDS = {"exclusiveMinimum": "> ", "minimum": "≥ ", "exclusiveMaximum": "< ", "maximum": "≤ "}
NONE = "–"

INTRODUCTION = """\
# Configuration

<!-- Generated: edit the descriptions in the code, then `make docs`. -->

A run is one YAML file. `spot-async train FILE section.key=value ...` overrides any key; `--dry-run` shows the file
with every default filled in, and so does `config.yaml` in each run directory. A key that does not exist, a value of
the wrong type and a combination that cannot work are refused in one line before anything starts.

Sections with a `kind` (policy, backends, verifiers) hold the settings of a plug-in. `kind` names an installed plug-in,
or is `module:Class`. `policy: opd` is short for `policy: {kind: opd}`.

`base: FILE` at the top lays the file over another one (relative to its own folder). Sections merge key by key. A
section that names its `kind` replaces the other file's section as a whole. Overrides do the same: `policy.kind=opd`
over a file with another method drops that method's keys.
"""
OTHER_NAMES = """\
## Names of keys

<!-- Generated: edit spot_async/config/other_names.yaml, then `make docs`. -->

Where one of these keys is given, the error says the same. So it is with a `kind`, in the second table.

"""


def coming_from() -> str:
    """Return docs/coming-from.md with its last part as `config/other_names.yaml` has it."""
    written = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    found = other_names()
    kinds = [each for group in KEYS_OF_GROUP for each in found[group]]
    tables = [
        _table([(", ".join(f"`{name}`" for name in each.other), _here(each)) for each in rows], (header, "here"))
        for header, rows in (("key", found["keys"]), ("kind", kinds))
    ]
    return written.partition(OTHER_NAMES)[0] + OTHER_NAMES + "\n".join(tables)


def _here(row: OtherName) -> str:
    return row.says or f"`{row.here}`" + (f", {row.note}" if row.note else "")


def page() -> str:
    """Return the whole page, as Markdown."""
    return "\n".join([INTRODUCTION, *_core_sections(), *_plugin_sections()]).rstrip() + "\n"


def _core_sections() -> Iterator[str]:
    defaults = _defaults(Config)
    values = {name: field for name, field in Config.model_fields.items() if _section_of(field) is None}
    yield "## Top level\n"
    yield _table(_rows(Config, only=set(values)))
    shared: dict[type[BaseModel], list[str]] = {}
    for name, field in Config.model_fields.items():
        if section := _section_of(field):
            shared.setdefault(section, []).append(name)
    for section, names in shared.items():
        yield f"## {', '.join(f'`{name}`' for name in names)}\n"
        yield "\n".join(_about(name, Config.model_fields[name]) for name in names) + "\n"
        default = defaults.get(names[0])
        yield _table(_rows(section, default if isinstance(default, BaseModel) else None))


def _about(name: str, field: FieldInfo) -> str:
    """Return what a top-level section is for, and whether it may be left out."""
    if field.is_required():
        presence = "required"
    else:
        presence = "none unless given" if field.default is None else "may be left out"
    return f"* `{name}` ({presence}): {field.description}"


def _plugin_sections() -> Iterator[str]:
    for group, keys in KEYS_OF_GROUP.items():
        yield f"## {group.capitalize()}\n\nThe settings of {keys}, by `kind`.\n"
        kinds: dict[tuple[Sequence[str], ...], list[str]] = {}  # those that have the same keys share a table
        for name, place in _own_plugins(group):
            kinds.setdefault(tuple(_rows(registry.load(group, place).Settings)), []).append(name)
        for rows, names in kinds.items():
            yield f"### {' and '.join(f'`kind: {name}`' for name in names)}\n"
            yield _table(rows) if rows else "No further keys.\n"


def _own_plugins(group: registry.Group) -> list[tuple[str, str]]:
    """Return the plug-ins that this checkout registers, each with its `module:Class`, whatever is installed."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    return sorted(project["entry-points"][f"spot_async.{group}"].items())


def _rows(
    schema: type[BaseModel], instance: BaseModel | None = None, prefix: str = "", only: set[str] | None = None
) -> Iterator[Sequence[str]]:
    """Return key, type, default, unit and meaning of each field. Sections inside become dotted keys."""
    properties = schema.model_json_schema()["properties"]
    defaults = _defaults(schema) if instance is None else {name: getattr(instance, name) for name in properties}
    for name, field in schema.model_fields.items():
        names_plugin = name == "kind" and issubclass(schema, PluginSettings)
        if names_plugin or (only is not None and name not in only):
            continue
        if not field.description:
            raise ValueError(f"{schema.__name__}.{name} has no description")
        key, section = prefix + name, _section_of(field)
        if section is None:
            default = _default_text(name, field, defaults)
            yield f"`{key}`", _type_text(name, field, properties[name]), default, _unit(name), field.description
            continue
        inner = defaults.get(name)
        if _is_mapping(field):
            yield f"`{key}`", "mapping", f"`{_plain(inner)}`", NONE, field.description
            yield from _rows(section, None, f"{key}.<name>.")
            continue
        if inner is None and name in defaults:
            form = "section, a list of them or `null`" if _may_be_list(field) else "section or `null`"
            yield f"`{key}`", form, "`null`", NONE, field.description
        yield from _rows(section, inner, f"{key}.")


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the plain section that a field holds; None for values and for plug-ins' settings."""
    for candidate in _types(field.annotation):
        if isinstance(candidate, type) and issubclass(candidate, Section) and not issubclass(candidate, PluginSettings):
            return candidate
    return None


def _may_be_list(field: FieldInfo) -> bool:
    return any(get_origin(each) is list for each in _types(field.annotation))


def _is_mapping(field: FieldInfo) -> bool:
    """Whether the field maps names, which users choose, to sections."""
    return get_origin(field.annotation) is dict


def _types(annotation: Any) -> Iterator[Any]:
    """Return an annotation and all annotations inside it."""
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def _is_plugin(field: FieldInfo) -> bool:
    return any(isinstance(each, type) and issubclass(each, PluginSettings) for each in _types(field.annotation))


def _defaults(schema: type[BaseModel]) -> dict[str, Any]:
    fields = schema.model_fields.items()
    return {name: field.default for name, field in fields if field.default is not PydanticUndefined}


def _default_text(name: str, field: FieldInfo, defaults: dict[str, Any]) -> str:
    if _is_plugin(field) and defaults.get(name, PydanticUndefined) is not None:
        section: Any = Annotated[(field.annotation, *field.metadata)]
        try:
            return f"`{TypeAdapter(section).validate_python({}).kind}`"
        except ValidationError:
            return "required"
    return f"`{_plain(defaults[name])}`" if name in defaults else "required"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _type_text(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    if _is_plugin(field):
        return f"[`kind`](#{GROUP_OF_KEY[name]}) or section"
    return _schema_text(schema)


def _schema_text(schema: dict[str, Any]) -> str:
    """Return a JSON schema in words: `integer > 0`, `"a" or "b"`, `number or null`."""
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            return " or ".join(dict.fromkeys(_schema_text(each) for each in schema[alternatives]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "null":
        return "`null`"
    if schema["type"] == "object":
        return "mapping"
    bounds = [f"{sign}{schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
    return " ".join([schema["type"], ", ".join(bounds)]).strip()


def _unit(name: str) -> str:
    return next((unit for ending, unit in UNIT_OF_ENDING.items() if name.endswith(ending)), NONE)


def _table(
    rows: Iterator[Sequence[str]] | Sequence[Sequence[str]],
    header: Sequence[str] = ("key", "type", "default", "unit", "meaning"),
) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(page(), encoding="utf-8")
    (DOCS / "coming-from.md").write_text(coming_from(), encoding="utf-8")
