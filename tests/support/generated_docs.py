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

from spot_async.backends.shared.settings import EndpointSettings
from spot_async.base import registry
from spot_async.config import Config, EnvironmentConfig, PluginSettings, Section
from spot_async.config.plugins import RoutedSettings
from spot_async.config.problems import ProblemSetConfig, TeacherPromptConfig, TemplateConfig
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
# Sections that several places hold, or that several kinds begin with: each has one table, and a link from each place.
SHARED: dict[type[BaseModel], tuple[str, str]] = {
    ProblemSetConfig: ("A data set", "Where problems come from. A plain value is its `path`."),
    TemplateConfig: ("A template", "How a kind of prompt is rendered."),
    TeacherPromptConfig: ("A teacher's prompt", "What a teacher reads in place of the student's prompt."),
    RoutedSettings: ("Every method with a teacher", "Of `distill`, `eopd`, `kd`, `opd` and `spot`."),
    EndpointSettings: ("Every kind with a url", "Of `openai`, `sglang`, `vllm` and, among verifiers, `http`."),
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
    return "\n".join([INTRODUCTION, *_core_sections(), *_shared_sections(), *_plugin_sections()]).rstrip() + "\n"


def every_key() -> Iterator[tuple[str, str]]:
    """Yield every key behind the kind of plug-in that it is of (empty for none), whether or not tables share its row.

    Sections that are alike count once: `reference` as `student`, and `teachers` as `teacher`.
    """
    seen: set[type[BaseModel]] = set()
    for name, field in Config.model_fields.items():
        section, default = _section_of(field), field.default
        if section is None:
            yield "", name
        elif section not in seen:
            seen.add(section)
            given = default if isinstance(default, BaseModel) else None
            yield from (("", f"{name}.{key}") for key in _names(_rows(section, given, is_whole=True)))
    for group in KEYS_OF_GROUP:
        for kind, place in _own_plugins(group):
            yield from ((kind, key) for key in _names(_rows(registry.load(group, place).Settings, is_whole=True)))


def _names(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    return (key.strip("`") for key, *_ in rows)


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
        given = default if isinstance(default, BaseModel) else None
        base = next((each for each in shared if each is not section and issubclass(section, each)), None)
        also = f"Also the keys of [`{shared[base][0]}`](#{'-'.join(shared[base])}).\n\n" if base else _also(section)
        own = set(section.model_fields) - set(base.model_fields if base else ())
        yield also + _table(_rows(section, given, only=own))


def _shared_sections() -> Iterator[str]:
    for section, (title, about) in SHARED.items():
        yield f"## {title}\n\n{about}\n"
        yield _also(section) + _table(_rows(section))


def _also(schema: type[BaseModel]) -> str:
    """Return a line that names the shared tables whose keys a section has besides its own."""
    links = [_link(each) for each in SHARED if each is not schema and issubclass(schema, each)]
    return f"Also the keys of {' and '.join(links)}.\n\n" if links else ""


def _link(section: type[BaseModel]) -> str:
    title = SHARED[section][0].lower()
    return f"[{title}](#{title.replace(' ', '-').replace(chr(39), '')})"


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
        kinds: dict[tuple[Any, ...], list[str]] = {}  # those that have the same keys share a table
        for name, place in _own_plugins(group):
            schema = registry.load(group, place).Settings
            kinds.setdefault((_also(schema), *_rows(schema)), []).append(name)
        for (also, *rows), names in kinds.items():
            yield f"### {' and '.join(f'`kind: {name}`' for name in names)}\n"
            yield also + (_table(rows) if rows else "No further keys.\n")


def _own_plugins(group: registry.Group) -> list[tuple[str, str]]:
    """Return the plug-ins that this checkout registers, each with its `module:Class`, whatever is installed."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    return sorted(project["entry-points"][f"spot_async.{group}"].items())


def _rows(
    schema: type[BaseModel],
    instance: BaseModel | None = None,
    prefix: str = "",
    only: set[str] | None = None,
    *,
    is_whole: bool = False,
) -> Iterator[Sequence[str]]:
    """Return key, type, default, unit and meaning of each field. Sections inside become dotted keys.

    What `SHARED` has a table for is left out, unless the rows are to be whole.
    """
    elsewhere = {
        name for each in SHARED if each is not schema and issubclass(schema, each) for name in each.model_fields
    }
    properties = schema.model_json_schema()["properties"]
    defaults = _defaults(schema) if instance is None else {name: getattr(instance, name) for name in properties}
    for name, field in schema.model_fields.items():
        names_plugin = name == "kind" and issubclass(schema, PluginSettings)
        if names_plugin or (only is not None and name not in only) or (name in elsewhere and not is_whole):
            continue
        if not field.description:
            raise ValueError(f"{schema.__name__}.{name} has no description")
        key, section = prefix + name, _section_of(field)
        if section is None:
            default = _default_text(name, field, defaults)
            yield f"`{key}`", _type_text(name, field, properties[name]), default, _unit(name), field.description
            continue
        if section is EnvironmentConfig:  # of a set; the section at the top has the table, and its keys count once
            yield f"`{key}`", "[section](#environment) or `null`", "`null`", NONE, field.description
            continue
        inner, shared = defaults.get(name), None if is_whole else _shared(section)
        form = "section" if shared is None else _link(shared)
        if _is_mapping(field):
            form = "mapping" if shared is None else f"mapping to {form}"
            yield f"`{key}`", form, f"`{_plain(inner)}`", NONE, field.description
            yield from _rows(section, None, f"{key}.<name>.", is_whole=is_whole)
            continue
        if (inner is None and name in defaults) or shared is not None:
            may_be = [" or a list of them" if _may_be_list(field) else "", " or `null`" if name in defaults else ""]
            yield f"`{key}`", form + "".join(may_be), _default_text(name, field, defaults), NONE, field.description
        if section is not shared:
            yield from _rows(section, inner, f"{key}.", is_whole=is_whole)


def _shared(section: type[BaseModel]) -> type[BaseModel] | None:
    """Return the section with a table of its own that this one is, or begins with."""
    return next((each for each in reversed(SHARED) if issubclass(section, each)), None)


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
