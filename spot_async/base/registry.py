"""Finds backends, policies and verifiers by name, so that the core imports none of them.

A name is looked up in the entry-point group `spot_async.<group>`; `module:Class` names a class
directly. Every plug-in class has a nested `Settings`, a subclass of `config.PluginSettings`, or `BackendSettings`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

Group = Literal["backends", "policies", "verifiers"]


def _installed(group: Group) -> Mapping[str, EntryPoint]:
    """Return the installed plug-ins by name. Of two with one name the first on the path counts."""
    return _declared(group, tuple(sys.path))


@functools.cache
def _declared(group: Group, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Look through what all packages on the path declare, which takes tens of milliseconds."""
    return {point.name: point for point in reversed([*entry_points(group=f"spot_async.{group}")])}


def names(group: Group) -> list[str]:
    """Return the names of installed plug-ins, sorted."""
    return sorted(_installed(group))


def load(group: Group, kind: str) -> Any:
    """Return the plug-in class called `kind`. Raises ValueError, with the nearest name, when there is none."""
    if ":" not in kind and kind not in _installed(group):
        _declared.cache_clear()  # in a notebook a plug-in may be installed in between
    if ":" in kind:
        found = named(kind)
    elif kind in _installed(group):
        found = _installed(group)[kind].load()
    else:
        known = names(group)
        close = difflib.get_close_matches(kind.lower(), known, n=1, cutoff=0.75)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise ValueError(f"{unknown(group, kind)}; {hint}")
    if not hasattr(found, "Settings"):
        raise ValueError(f"{kind!r} has no Settings class, so it is no plug-in of spot-async")
    return found


def named(name: str) -> Any:
    """Return what `module:Class` or `module:function` names. Raises ValueError when there is none."""
    module_name, _, inner = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), inner)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load {name!r}: {error}{_where_to_look(error, module_name)}") from None


def unknown(group: Group, kind: str) -> str:
    """Say that there is no such plug-in."""
    return f"no {group[:-1] if group != 'policies' else 'policy'} called {kind!r}"


def _where_to_look(error: Exception, module_name: str) -> str:
    """Say how to make Python find the user's module: commands do not search the directory they are run in."""
    first = module_name.partition(".")[0]
    if not (isinstance(error, ModuleNotFoundError) and error.name == first):
        return ""
    if Path(f"{first}.py").exists() or Path(first).is_dir():
        return "; it lies in the working directory: put PYTHONPATH=. before the command"
    return "; install it, or put PYTHONPATH=FOLDER before the command, with the folder that it lies in"
