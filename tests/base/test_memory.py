"""The garbage collector around long imports, and which files are in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_async.base.processes.memory import available_bytes, is_in_memory, without_gc


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


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no memory with a name")
def test_files_of_dev_shm_are_in_memory_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert is_in_memory(Path("/dev/shm"))
    assert is_in_memory(tmp_path / "link")
    assert not is_in_memory(Path("/proc"))
    assert 0 < available_bytes() < 1 << 50
