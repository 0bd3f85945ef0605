"""A package that is imported later: who uses its stand-in gets the package, and nobody else sees the stand-in."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from spot_async.base.later import later

PACKAGE = "slow_package"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that can be imported, and is not yet."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("value = 7\n")
    (tmp_path / PACKAGE / "inner.py").write_text("value = 8\n")
    (tmp_path / "user.py").write_text(f"import {PACKAGE}\n\ndef value():\n    return {PACKAGE}.value\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in (PACKAGE, f"{PACKAGE}.inner", "user"):
        sys.modules.pop(name, None)


@pytest.fixture
def user(package: None) -> ModuleType:
    """A module that was imported while the package was to be imported later."""
    with later(PACKAGE):
        return importlib.import_module("user")


def test_who_imports_it_inside_gets_its_names_when_they_are_used(user: ModuleType) -> None:
    assert PACKAGE not in sys.modules
    assert user.value() == 7
    assert user.slow_package.value is sys.modules[PACKAGE].value
    with pytest.raises(AttributeError, match="'slow_package' has no attribute 'other'"):
        _ = user.slow_package.other


def test_after_an_exception_inside_the_package_itself_is_imported(package: None) -> None:
    with pytest.raises(KeyError), later(PACKAGE):
        raise KeyError
    assert importlib.import_module(PACKAGE).__path__


def test_names_and_modules_of_it_can_be_used_inside(package: None) -> None:
    with later(PACKAGE):
        assert importlib.util.find_spec(PACKAGE) is not None  # so one learns whether it is installed
        assert importlib.import_module(f"{PACKAGE}.inner").value == 8
        assert sys.modules[PACKAGE].value == 7
    assert sys.modules[PACKAGE].inner.value == 8


def test_a_thread_that_imports_it_meanwhile_gets_its_names(package: None) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(importlib.import_module(PACKAGE).value))
    with later(PACKAGE):
        thread.start()
        thread.join()
    assert found == [7]
    assert sys.modules[PACKAGE].value == 7


def test_what_is_imported_already_or_not_installed_is_left_alone(package: None) -> None:
    there = importlib.import_module(PACKAGE)
    with later(PACKAGE), later("no_such_package"):
        assert sys.modules[PACKAGE] is there
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_package")
    assert sys.modules[PACKAGE] is there
