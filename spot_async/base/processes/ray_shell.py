"""Runs a shell where Ray has placed a server: the prefix (`far_side.py`) of such a server.

    python -I -S ray_shell.py SOCKET PLACE sh

It hands its own input and outputs to the helper that holds the places (`ray_helper.py`), and exits as the shell did.
This file imports none of our modules and no ray, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import socket
import sys

UNREACHED = 255  # exit code where Ray lost the shell, as ssh's


def main(path: str, place: str) -> int:
    """Return the shell's exit code."""
    with socket.socket(socket.AF_UNIX) as helper:
        try:
            helper.connect(path)
            socket.send_fds(helper, [place.encode()], [0, 1, 2])
            told = helper.recv(16)
        except OSError:
            told = b""
    if not told:
        os.write(2, b"error: the process that speaks to Ray has ended\n")
        return UNREACHED
    return int(told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
