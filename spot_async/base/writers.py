"""Who, beside this user and root, could change a file or directory: the rule by which weights are read.

It is that of ssh's StrictModes: the owner of a file, and of each directory on the way to it, is this user or root, and
nobody else may write it. Links are followed, and the way to their targets counts too. Two things are no danger:

* A directory of others on the way that has the sticky bit, such as /tmp: nobody can replace what belongs to us there.
* A group that nobody else is in, as each user has one of their own where the umask is 002.

Directories are looked at from the root down. Nobody can change the way to a file below what was found to be safe, so
what is opened afterwards is what was looked at. Access-control lists are not read: only the owner and root
can give another user access by one, and they are trusted.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spot_async.errors import ConfigError, DataError

TRUSTED_VARIABLE = "SPOT_ASYNC_TRUSTED_USERS"
EVERYBODY = "*"
MAX_LINKS = 40  # as Linux follows


def refuse_foreign_writers(paths: Iterable[Path]) -> None:
    """Raise `DataError`, in one line, if another user can change one of `paths` or put another in its place.

    Those that are missing are left to whoever reads them.
    """
    stated = os.environ.get(TRUSTED_VARIABLE, "").replace(",", " ").split()
    if EVERYBODY in stated:
        return
    trusted = _trusted_users(tuple(stated), os.geteuid())
    is_safe: set[Path] = set()
    for path in paths:
        for each, is_last in _way(path.absolute()):
            if each in is_safe:
                continue
            if (fault := _fault(each, is_last=is_last, trusted=trusted)) is not None:
                said = "" if each == path else f"{path}: "
                raise DataError(f"{said}{each} {fault}, or name in ${TRUSTED_VARIABLE} whom you trust")
            if not is_last:  # a directory is stricter where it is what is read
                is_safe.add(each)


def _way(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each directory and link from the root to `path`, and whether it is what `path` means in the end."""
    done, todo, links = Path("/"), list(path.parts), 0
    while todo:
        name = todo.pop(0)
        done = done.parent if name == ".." else done / name  # the root's name is absolute
        try:
            target = done.readlink() if done.is_symlink() else None
            done.lstat()
        except OSError:
            return
        yield done, not todo and target is None
        if target is not None:
            links += 1
            if links > MAX_LINKS:
                return
            done, todo = done.parent, [*target.parts, *todo]


def _fault(path: Path, *, is_last: bool, trusted: frozenset[int]) -> str | None:
    """Return who could change `path`, as the middle of a sentence, and what to do; None if nobody else can.

    `is_last` is false for what is on the way only.
    """
    found = path.lstat()
    mode = found.st_mode
    owner, group = _name(pwd.getpwuid, found.st_uid), _name(grp.getgrgid, found.st_gid)
    shown = f"(mode {stat.S_IMODE(mode):04o}, owner {owner}, group {group})"
    if found.st_uid not in trusted:
        return f"belongs to another user {shown}, who could change what is loaded: copy it"
    if stat.S_ISLNK(mode) or (not is_last and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWOTH:
        return f"can be written by everybody {shown}: chmod o-w {path}"
    if mode & stat.S_IWGRP and not _is_private(found.st_gid, trusted):
        return f"can be written by its group {shown}: chmod g-w {path}"
    return None


@functools.lru_cache(maxsize=64)
def _is_private(group: int, trusted: frozenset[int]) -> bool:
    """Whether nobody is in a group but those who are trusted. One without a name is private if it is this process's."""
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:  # no such group, or no such member
        if group not in {os.getegid(), *os.getgroups()}:
            return False
        members = set()
    members |= {each.pw_uid for each in pwd.getpwall() if each.pw_gid == group}
    return members <= trusted


@functools.lru_cache(maxsize=4)
def _trusted_users(stated: Sequence[str], own: int) -> frozenset[int]:
    """Return the ids of root, of whoever owns the root directory, of this user, and of those that are `stated`."""
    found = {0, own, Path("/").stat().st_uid}
    for name in stated:
        try:
            if name.startswith("@"):
                found |= {pwd.getpwnam(each).pw_uid for each in grp.getgrnam(name[1:]).gr_mem}
            else:
                found.add(int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise ConfigError(
                f"{TRUSTED_VARIABLE}: no user or group here is called {name}: give names or ids of users, @group, or "
                f"{EVERYBODY} for everybody"
            ) from None
    return frozenset(found)


def _name(find: Callable[[int], Sequence[Any]], number: int) -> str:
    """Return the name of a user or group; its number where it has none here."""
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)
