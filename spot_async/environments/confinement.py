"""Shuts a forked process in: namespaces and limits of its own. For `worker.py`, under any interpreter.

In namespaces it sees no other process, no network, and files that it cannot change, but for an empty `/dev/shm`. That
keeps in what a model's code does by accident, not an attacker: it reads what its user may read. Memory is limited for
each process, and root may have as many of them as it likes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import tempfile
from typing import Any

PROCESSES = 64  # at a time; the kernel does not count root's
FILES = 256  # open in one process
# From the kernel's headers. A mount's attributes need Linux 5.12, and are call 442 on all machines.
_NEW_NETWORK, _NEW_OTHERS = 0x40000000, 0x20000 | 0x8000000 | 0x10000000 | 0x20000000  # mount, IPC, user, PID
_READ_ONLY, _NO_SUID, _NO_DEVICES, _PRIVATE = 1, 2, 4, 1 << 18
_SET_ATTRIBUTES, _FROM_HERE, _RECURSIVE = 442, -100, 0x8000
_DEATH_SIGNAL, _DUMPABLE, _SECURE_BITS, _NO_NEW_PRIVILEGES = 1, 4, 28, 38
_ROOT_IS_NOBODY, _NO_CAPABILITIES = 3, (struct.pack("Ii", 0x20080522, 0), bytes(24))
_NO_RANDOM_ADDRESSES = 0x40000


def end_with(parent: int, by: signal.Signals) -> None:
    """Let a signal end this process when its parent dies. Linux only; does nothing elsewhere."""
    if sys.platform == "linux":
        _call("prctl", _DEATH_SIGNAL, by)
        if os.getppid() != parent:
            os._exit(1)  # it died before we asked


def confine(memory_bytes: int, in_namespaces: bool, network: bool, parent: int) -> None:
    """Return in a process that is shut in, and dies with `parent`, which forked it. Raises OSError, ValueError.

    `memory_bytes` limit its address space, beyond what it has already. In namespaces it is a child of this process,
    which stays outside, where nothing reaches it, and ends all inside when it gets SIGTERM or the child ends.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    if sys.platform != "linux" and not in_namespaces:
        return  # neither memory nor lives are bound there
    with open("/proc/self/statm") as file:  # noqa: PTH123 - a builtin is quick, and each child does this
        most = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if in_namespaces:
        _enter_namespaces(network)
    end_with(parent, signal.SIGTERM if in_namespaces else signal.SIGKILL)
    if in_namespaces:
        _become_first_process()
        _mount_own(memory_bytes)
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
        _call("prctl", _SECURE_BITS, _ROOT_IS_NOBODY, 0, 0, 0)
        _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call("capset", *_NO_CAPABILITIES)
        _call("personality", _NO_RANDOM_ADDRESSES)  # a program that prints one prints it again
    _call("prctl", _DUMPABLE, 0, 0, 0, 0)  # no program that it starts can reach into it


def _enter_namespaces(network: bool) -> None:
    """Leave all others' namespaces. The user stays who it is."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_OTHERS | (0 if network else _NEW_NETWORK))
    for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)


def _become_first_process() -> None:
    """Return in a child, with which all processes of the namespace end."""
    ends = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    if child := os.fork():
        os.closerange(0, 1 << 16)  # the child's end closes its files
        signal.sigwait(ends)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    _call("prctl", _DEATH_SIGNAL, signal.SIGKILL)


def _mount_own(memory_bytes: int) -> None:
    """Make all files read-only, and mount what can be written to, and what shows no other processes."""
    attributes = struct.pack("QQQQ", _READ_ONLY | _NO_SUID, 0, _PRIVATE, 0)
    _call("syscall", _SET_ATTRIBUTES, _FROM_HERE, b"/", _RECURSIVE, attributes, len(attributes))
    flags = _NO_SUID | _NO_DEVICES
    _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", flags, b"mode=1777,size=%d" % memory_bytes)
    tempfile.tempdir = os.environ["TMPDIR"] = "/dev/shm"
    try:
        _call("mount", b"proc", b"/proc", b"proc", flags | _READ_ONLY, None)
    except OSError:  # in a container that hides some of it
        _call("mount", b"tmpfs", b"/proc", b"tmpfs", flags | _READ_ONLY, None)


def _call(name: str, *given: Any) -> None:
    """Call the C library. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*given) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
