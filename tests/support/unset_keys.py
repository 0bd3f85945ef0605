"""Lists the keys of the configuration that nothing which ships sets: no file in `configs/`, `examples/`, `benchmarks/`,
`experiments/` or `deploy/`, and no page.

`python tests/support/unset_keys.py` prints them. Few users can miss one of these, so a new key has to be worth it:
`tests/test_unset_keys.py` holds their number.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from generated_docs import every_key

ROOT = Path(__file__).parents[2]
FOLDERS = ("configs", "examples", "benchmarks", "experiments", "deploy")
FENCE = re.compile(r"```ya?ml\n(.*?)```", re.DOTALL)
OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-zA-Z0-9_<>*-]+)+)=(\S*)")
PLUGINS = ("backend", "policy", "verifier")


def set_keys() -> set[tuple[str, str]]:
    """Return the keys that something sets, each behind its kind of plug-in: `*` where that is not said."""
    found: set[tuple[str, str]] = set()
    for path in _files():
        text = path.read_text(encoding="utf-8")
        for written in [text] if path.suffix == ".yaml" else FENCE.findall(text):
            found.update(leaves(plain(written)))
        for key, value in OVERRIDE.findall(text):
            tree = plain(value)
            for name in reversed(key.split(".")):
                tree = {name: tree}
            found.update(leaves(tree))
    return found


def unset() -> list[str]:
    given = set_keys()
    return [f"{kind}: {key}" if kind else key for kind, key in every_key() if not {(kind, key), ("*", key)} & given]


def _files() -> Iterator[Path]:
    yield from [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in (".yaml", ".md", ".py", ".sh"))


def plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # no YAML, such as a page's example with words in between
        return None


def leaves(value: Any, path: tuple[str, ...] = (), kind: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key of each value in a tree, and of each section."""
    if path:
        yield kind, ".".join(_as_on_the_page(path))
    if isinstance(value, list):
        for each in value:
            yield from leaves(each, path, kind)
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name in PLUGINS:
            yield kind, ".".join(_as_on_the_page((*path, name)))
            named = inner.get("kind", "*") if isinstance(inner, dict) else "*"
            yield from leaves(inner if isinstance(inner, dict) else None, (), str(named))
        else:
            yield from leaves(inner, (*path, str(name)), kind)


def _as_on_the_page(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a key as the page has it: without a user's own names and numbers, and for like sections the first's."""
    if path[0] == "teachers" and len(path) > 1:
        return ("teacher", *path[2:])
    if path[:2] == ("evaluation", "benchmarks") and len(path) > 2:
        return (*path[:2], "<name>", *path[3:])
    return tuple("student" if name == "reference" else name for name in path if not name.isdecimal())


if __name__ == "__main__":
    found = unset()
    sys.stdout.write("".join(f"{each}\n" for each in [*found, f"{len(found)} of {len([*every_key()])} keys"]))
