"""A directory whose disk may be full, and may lose with the power what was not flushed to it.

    disk = CrashingDisk(directory, random.Random(17))
    with disk:
        disk.crash_at = 40       # at the 40th change
        ...                      # real code, which raises Crash there
    disk.begin_life(loses_power=True)

The program is the real one. While the disk is entered, the functions of `os` that change a directory, `open` and
`sqlite3.connect` tell it of every change inside its directory. After a crash nothing changes any more, whatever the
program still does as it is torn down.

What a power cut leaves is weaker than what common file systems promise. A file has the contents of its last flush, or
those and a part of what was written since. A directory has the entries of its last flush, and the changes since up to
some moment, which is another one for every directory. SQLite is the real one too: its log of writes is cut at any byte
behind its last flush.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from crashes.ledger import SQLITE_LOG, LedgerConnection, LedgerFiles

ROOT = 0  # the directory's own node


class Crash(KeyboardInterrupt):
    """The process ends here."""


class _Entry(NamedTuple):
    """What a name in a directory stands for from now on. None: nothing."""

    directory: int
    name: str
    node: int | None


@dataclass(eq=False)
class _Node:
    """A file, directory or link, and what of it outlives a power cut for certain."""

    is_directory: bool = False
    target: str | None = None  # of a link
    flushed: bytes = b""  # of a file
    entries: dict[str, int] = field(default_factory=dict)  # of a directory
    deleted: bytes | None = None  # contents of a file that lost its name, which a power cut may give back


class CrashingDisk:
    """The disk of one directory, over several lives of the program that writes there."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.path = directory
        self.changes = 0  # in this life
        self.crash_at: int | None = None  # the number of a change
        self.full_from: int | None = None  # the number of the change from which on nothing more fits
        self.is_frozen = False
        self.renamed: Callable[[Path], None] = lambda path: None  # is told of new names
        self._rng = rng
        self._root = f"{directory}/"
        self._ledgers: dict[str, LedgerFiles] = {}
        self._stack = contextlib.ExitStack()
        self._nodes: list[_Node] = []
        self._numbers: dict[tuple[int, int], int] = {}  # of nodes, by device and inode
        self._changed: list[tuple[_Entry, ...]] = []  # of directories, and not flushed
        self.take_as_flushed()

    def begin_life(self, *, loses_power: bool) -> None:
        """Let another process begin, after one that ended or crashed. The dead one's ledgers are closed."""
        if loses_power:
            self._lose_power()
        for ledger in self._ledgers.values():
            ledger.restore(self._rng if loses_power else None)
        self.changes, self.crash_at, self.full_from, self.is_frozen = 0, None, None, False
        self.renamed = lambda path: None

    def freeze(self) -> None:
        """Let nothing change from now on."""
        if not self.is_frozen:
            for ledger in self._ledgers.values():
                ledger.hold()
            self.is_frozen = True

    def change(self, *, grows: bool = False) -> None:
        """Note that something is about to change. Raises Crash where the process ends, and OSError on a full disk."""
        if self.is_frozen:  # whoever is torn down comes here
            raise Crash
        self.changes += 1
        if self.changes == self.crash_at:
            self.freeze()
            raise Crash
        if grows and self.is_full:
            raise _error(errno.ENOSPC)

    def damage(self, path: Path) -> None:
        """Spoil what a file has on the disk."""
        descriptor = os.open(path, os.O_RDWR)
        os.pwrite(descriptor, b"#", 0)
        self._nodes[self._node(path)].flushed = _contents(descriptor)
        os.close(descriptor)

    @property
    def is_full(self) -> bool:
        return self.full_from is not None and self.changes >= self.full_from

    def write(self, write: Callable[[memoryview], int], data: memoryview) -> int:
        """Write to a file. A crash or a full disk may let a part of it through."""
        was_full, part = self.is_full, data[: self._rng.randint(0, len(data))]
        is_last = self.changes + 1 == self.crash_at
        try:
            self.change(grows=True)
        except Crash:
            if is_last:
                write(part)
            raise
        except OSError:
            if was_full or not part:
                raise
            return write(part)
        return write(data)

    # What stands in for the functions of the system

    def __enter__(self) -> Self:
        replaced: dict[Any, dict[str, Any]] = {
            os: {
                "replace": self._replace,
                "rename": self._replace,
                "unlink": self._unlink,
                "remove": self._unlink,
                "rmdir": self._rmdir,
                "mkdir": self._mkdir,
                "symlink": self._symlink,
                "link": self._link,
                "truncate": self._truncate,
                "fsync": self._fsync,
            },
            io: {"open": self._open},
            builtins: {"open": self._open},
            sqlite3: {"connect": self._connect},
        }
        for module, functions in replaced.items():
            for name, mine in functions.items():
                self._stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, mine)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _replace(self, source: Any, target: Any, **more: Any) -> None:
        if not self._has(source):
            return _replace(source, target, **more)
        self.change()
        moved, before, after = self._node(source), self._place(source), self._place(target)
        if os.path.lexists(target):
            self._keep_contents(target)
        _replace(source, target)
        self._changed.append((_Entry(*before, None), _Entry(*after, moved)))
        self.renamed(Path(target))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove(_unlink, path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove(_rmdir, path, dir_fd)

    def _remove(self, remove: Callable[..., None], path: Any, dir_fd: int | None) -> None:
        if not self._has(path, dir_fd):
            return remove(path, dir_fd=dir_fd)
        self.change()
        os.lstat(path, dir_fd=dir_fd)  # raises FileNotFoundError
        place = self._place(path, dir_fd)
        self._keep_contents(path, dir_fd)
        remove(path, dir_fd=dir_fd)
        self._changed.append((_Entry(*place, None),))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._make(lambda: _mkdir(path, mode, dir_fd=dir_fd), path, _Node(is_directory=True))

    def _symlink(self, source: Any, path: Any, *more: Any) -> None:
        self._make(lambda: _symlink(source, path, *more), path, _Node(target=os.fspath(source)))

    def _link(self, source: Any, path: Any, **more: Any) -> None:
        self._make(lambda: _link(source, path, **more), path, None)

    def _make(self, make: Callable[[], None], path: Any, node: _Node | None) -> None:
        """Make a new name, of a new node or else of one that has another name already."""
        if not self._has(path):
            return make()
        self.change(grows=True)
        make()
        self._note(path, node)

    def _truncate(self, path: Any, length: int) -> None:
        if self._has(path):
            self.change()
        _truncate(path, length)

    def _fsync(self, descriptor: int) -> None:
        number = self._numbers.get(_key(os.fstat(descriptor)))
        if number is None:
            return _fsync(descriptor)
        self.change()
        node = self._nodes[number]
        if not node.is_directory:
            node.flushed = _contents(descriptor)
            return
        for change in self._changed:
            if any(entry.directory == number for entry in change):
                self._settle(change)
        self._changed = [each for each in self._changed if all(entry.directory != number for entry in each)]

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **more: Any) -> Any:
        if not set(mode) & set("wax+") or not self._has(file):
            return _open(file, mode, buffering, *arguments, **more)
        is_new = not os.path.lexists(file)
        if is_new or "w" in mode:
            self.change(grows=is_new)
        raw = _File(file, mode.replace("b", "").replace("t", ""), self)
        if is_new:
            self._note(file, _Node())
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments, **more)

    def _connect(self, path: Any, **more: Any) -> Any:
        if not self._has(path):
            return _connect(path, **more)
        ledger = self._ledgers.setdefault(os.fspath(path), LedgerFiles(Path(path)))

        def connection(*given: Any, **settings: Any) -> sqlite3.Connection:
            return LedgerConnection(self, ledger, *given, **settings)

        self.change()
        return _connect(path, factory=cast(Any, connection), **more)

    # Names and nodes

    def _has(self, path: Any, dir_fd: int | None = None) -> bool:
        if dir_fd is not None:
            return _key(os.fstat(dir_fd)) in self._numbers
        return not isinstance(path, int) and os.fspath(path).startswith(self._root)

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str]:
        """Return a path's directory, and the name in it."""
        directory, name = os.path.split(os.fspath(path))
        return self._numbers[_key(Path(directory).stat() if dir_fd is None else os.fstat(dir_fd))], name

    def _node(self, path: Any) -> int:
        return self._numbers[_key(os.lstat(path))]

    def _note(self, path: Any, node: _Node | None) -> None:
        """Note a new name of a new node, or of the one that it is."""
        if node is not None:
            self._nodes.append(node)
            self._numbers[_key(os.lstat(path))] = len(self._nodes) - 1
        self._changed.append((_Entry(*self._place(path), self._node(path)),))

    def _keep_contents(self, path: Any, dir_fd: int | None = None) -> None:
        found = os.lstat(path, dir_fd=dir_fd)
        if stat.S_ISREG(found.st_mode):
            descriptor = os.open(path, os.O_RDONLY, dir_fd=dir_fd)
            self._nodes[self._numbers[_key(found)]].deleted = os.pread(descriptor, found.st_size, 0)
            os.close(descriptor)

    def _settle(self, change: tuple[_Entry, ...]) -> None:
        for directory, name, node in change:
            if node is None:
                self._nodes[directory].entries.pop(name, None)
            else:
                self._nodes[directory].entries[name] = node

    # Power cuts

    def _lose_power(self) -> None:
        """Leave what was flushed, and some of the rest."""
        ends: dict[int, int] = {}
        for number, change in enumerate(self._changed):
            # Once a directory has lost one change, it has lost those after it.
            if all(number < ends.setdefault(each.directory, self._end()) for each in change):
                self._settle(change)
        now = {self._numbers[_key(each.lstat())]: each for each in self._walk()}
        left = {place: self._left(number, now) for place, number in self._named(ROOT, self.path)}
        for each in list(self.path.iterdir()):
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        for place, contents in left.items():  # directories come before what is in them
            if contents is None:
                place.mkdir()
            elif isinstance(contents, str):
                place.symlink_to(contents)
            else:
                place.write_bytes(contents)
        self.take_as_flushed()

    def _end(self) -> int:
        """Return how many of the changes a directory has at most."""
        return self._rng.choice([0, len(self._changed), self._rng.randint(0, len(self._changed))])

    def _named(self, number: int, path: Path) -> list[tuple[Path, int]]:
        """Return all that a directory has, with the places of it."""
        found = []
        for name, each in self._nodes[number].entries.items():
            found.append((path / name, each))
            found += self._named(each, path / name)
        return found

    def _left(self, number: int, now: dict[int, Path]) -> bytes | str | None:
        """Return a file's contents after the cut, or a link's target; None for a directory."""
        node, path = self._nodes[number], now.get(number)
        if node.is_directory or node.target is not None:
            return node.target
        written = path.read_bytes() if path is not None else node.deleted or b""
        if written == node.flushed or self._rng.random() < 0.3:
            return node.flushed
        same = 0
        while written[same : same + 1] == node.flushed[same : same + 1]:
            same += 1
        return written[: self._rng.choice([same, len(written), self._rng.randint(same, len(written))])]

    def _walk(self) -> list[Path]:
        """Return everything in the directory but SQLite's files."""
        found: list[Path] = []
        todo = [self.path]
        for directory in todo:
            for each in directory.iterdir():
                if str(each).removesuffix(SQLITE_LOG) not in self._ledgers:
                    found.append(each)
                    if each.is_dir() and not each.is_symlink():
                        todo.append(each)
        return found

    def take_as_flushed(self) -> None:
        """Take what is there now as what outlives a power cut."""
        self._nodes = [_Node(is_directory=True)]
        self._numbers = {_key(self.path.lstat()): ROOT}
        self._changed = []
        for path in self._walk():
            if path.is_symlink():
                self._note(path, _Node(target=str(path.readlink())))
            else:
                self._note(path, _Node(path.is_dir(), flushed=b"" if path.is_dir() else path.read_bytes()))
        for change in self._changed:
            self._settle(change)
        self._changed.clear()


class _File(io.FileIO):
    """A file that is written to."""

    def __init__(self, path: Any, mode: str, disk: CrashingDisk) -> None:
        super().__init__(path, mode)
        self._disk = disk

    def write(self, data: Any) -> int:
        return self._disk.write(super().write, memoryview(data).cast("B"))

    def truncate(self, size: int | None = None) -> int:
        self._disk.change()
        return super().truncate(size)


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _contents(descriptor: int) -> bytes:
    """Return all of an open file, which may be open for writing only."""
    with _open(f"/proc/self/fd/{descriptor}", "rb") as file:
        contents: bytes = file.read()
    return contents


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# The real functions.
_replace, _unlink, _rmdir, _mkdir, _symlink, _link = os.replace, os.unlink, os.rmdir, os.mkdir, os.symlink, os.link
_truncate, _fsync, _open, _connect = os.truncate, os.fsync, io.open, sqlite3.connect
