"""The garbage collector around long imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from spot_async.base.processes.memory import without_gc


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    gc.enable()


@without_gc()
def is_enabled_inside() -> bool:
    return gc.isenabled()


@without_gc()
def fail() -> None:
    raise ImportError


def test_the_collector_rests_during_an_import_and_is_as_it_was_afterwards(as_it_was: None) -> None:
    assert not is_enabled_inside()
    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
    gc.disable()
    assert not is_enabled_inside()
    assert not gc.isenabled()
