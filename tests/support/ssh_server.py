"""A real sshd on loopback, with keys and settings of its own in a temporary directory."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from spot_async.base.processes.guard import process_tree

PRIVILEGE_SEPARATION = Path("/run/sshd")  # an empty directory that each sshd of root wants, so nobody removes it
SETTINGS = """
Port {port}
ListenAddress {address}
HostKey {directory}/host
AuthorizedKeysFile {directory}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""


@contextlib.contextmanager
def ssh_server(directory: Path, port: int, *, address: str = "127.0.0.1", within: Sequence[str] = ()) -> Iterator[Path]:
    """Run an sshd; yield its settings for clients, so that `ssh -F FILE there` leads to it. Skips where there is none.

    `within` is a command that runs another one where the sshd belongs, such as `ip netns exec NAME`.
    """
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd here")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)], check=True)
    (directory / "sshd").write_text(SETTINGS.format(port=port, address=address, directory=directory))
    client = directory / "client"
    client.write_text(
        f"Host there\n HostName {address}\n Port {port}\n User {getpass.getuser()}\n IdentityFile {directory}/user\n"
        " StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n BatchMode yes\n"
    )
    if getpass.getuser() == "root":
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    words = directory / "sshd.log"
    with words.open("w") as log:
        process = subprocess.Popen([*within, sshd, "-D", "-e", "-f", str(directory / "sshd")], stderr=log)
    try:
        _until_it_listens(words, process)
        yield client
    finally:
        below = process_tree(process.pid)  # a session whose client is out of reach waits for it
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def ssh_client() -> int:
    """Return the ssh of this process that holds the link to its only server."""
    tree = process_tree(os.getpid())
    guards = {pid for pid, fields in tree.items() if int(fields[1]) == os.getpid() and "guard.py" in _command_line(pid)}
    return next(pid for pid, fields in tree.items() if int(fields[1]) in guards)


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _until_it_listens(words: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait for its own words: nobody here may have a way to its address."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if "Server listening on" in words.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"the sshd does not listen: {words.read_text()}")
