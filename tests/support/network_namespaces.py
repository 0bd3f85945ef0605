"""Network namespaces of a test's own, which are gone after it. They need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def namespace(word: str) -> Iterator[str]:
    """Make a namespace; yield its name. Skips where none can be made."""
    name = f"spot-{word}-{os.getpid()}"
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        run("ip", "netns", "del", name)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
