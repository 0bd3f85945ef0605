"""Keeps a package that is slow to import from being imported by others that may never use it.

A stand-in takes its place while they are imported. Whoever bound the stand-in gets every name from the package itself,
which is imported when the first is asked for. So this can be slow, but not wrong.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """A package in whose place it stands in `sys.modules`.

    It has no `__path__` of its own. So who imports a submodule asks for one, and finds the package imported.
    """

    def __getattr__(self, name: str) -> Any:
        _take_out(self)
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def later(package: str) -> Iterator[None]:
    """Let imports of a package inside wait until one of its names is used. Does nothing where it is imported already.

    Another thread that imports the package meanwhile gets the same: names that are the package's.
    """
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None:
        yield
        return
    stand_in = _StandIn(package)
    stand_in.__spec__ = spec  # who looks whether the package is installed finds it here
    sys.modules.setdefault(package, stand_in)  # another thread may have begun to import it
    try:
        yield
    finally:
        _take_out(stand_in)


def _take_out(stand_in: _StandIn) -> None:
    if sys.modules.get(stand_in.__name__) is stand_in:
        sys.modules.pop(stand_in.__name__, None)
