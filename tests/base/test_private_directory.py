"""Temporary directories of processes that are killed, and of those that are not."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spot_async.base.processes.private_directory import private_directory

OWNER = """
from spot_async.base.processes.private_directory import private_directory

with private_directory("spot-async-") as path:
    (path / "http").touch()
    print(path, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_is_swept_by_the_next_and_nothing_else(temporary_directory: Path) -> None:
    others = temporary_directory / "spot-async-main"  # somebody's copy of the sources, say
    (others / "kept").mkdir(parents=True)
    (temporary_directory / "spot-async-link").symlink_to(others)
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().decode().strip())
        with private_directory("spot-trainer-"):
            assert (left / "http").exists(), "its owner is there"
        owner.kill()
        owner.wait()
        assert (left / "http").exists()
        with private_directory("spot-trainer-") as ours, private_directory("spot-async-"):
            assert not left.exists()
            assert ours.exists()
    assert sorted(path.name for path in temporary_directory.iterdir()) == ["spot-async-link", "spot-async-main"]
    assert (others / "kept").exists()


@pytest.mark.parametrize("characters", [30, 72, 120])
def test_a_socket_has_room_in_a_private_directory_however_long_tmpdir_is(tmp_path, monkeypatch, characters):
    long = tmp_path / ("j" * characters)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_directory("spot-trainer-") as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "published.sock"))
    assert not path.exists()
