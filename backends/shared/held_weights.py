"""Which weights a server's replies may come from, so that none passes for those of weights that it does not hold.

A server that was restarted by its operator, or that another run updates as well, goes on answering, with other
weights than this run gave it. The first such reply is found here, by the version that it names. Pure: adapters tell
when they send requests and updates, and read the names out of replies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from spot_async.errors import ServerRestartedError
from spot_async.types import WeightVersion

INITIAL = WeightVersion(0, 0)


class HeldWeights:
    """The versions that one server was given, oldest first, and the newest that it confirmed."""

    def __init__(self, server: str, first: WeightVersion = INITIAL) -> None:
        self._server = server
        self._versions = [first]
        self._confirmed = 0

    @contextlib.contextmanager
    def updating(self, version: WeightVersion) -> Iterator[None]:
        """Around an update: replies may name `version` from its start on, and nothing older once it has succeeded."""
        self._versions.append(version)
        index = len(self._versions) - 1
        yield
        self._confirmed = max(self._confirmed, index)

    def now(self) -> int:
        """To be noted before a request is sent, for `check`."""
        return self._confirmed

    def check(self, version: WeightVersion, since: int) -> WeightVersion:
        """The version itself. Raises `ServerRestartedError` where no weights since that moment were of this version."""
        if version not in self._versions[since:]:
            raise ServerRestartedError(
                f"{self._server}: the server holds weights {version} and was last given {self._versions[-1]}: was it "
                "restarted, or updated by another run?"
            )
        return version


class WeightNames:
    """The same for servers that call their weights by names. Other models than a student's have one version."""

    def __init__(self, server: str, *, is_student: bool) -> None:
        self._server = server
        self._is_student = is_student
        self._held = HeldWeights(server)
        self._first: str | None = None

    def start(self, name: str | None) -> None:
        """What the server calls the weights that it starts with; None where it does not say."""
        self._first = name

    def updating(self, version: WeightVersion) -> contextlib.AbstractContextManager[None]:
        """Around an update."""
        return self._held.updating(version)

    def now(self) -> SentNames:
        """To be taken before a request is sent: reads the names in its reply."""
        return SentNames(self, self._held.now())

    def read(self, name: str | None, since: int) -> WeightVersion:
        """The version that a name in a reply stands for; see `SentNames.version`."""
        if not self._is_student:
            return INITIAL
        if since == 0 and name in (None, self._first):  # some servers name none, and those take none
            return INITIAL
        try:
            version = WeightVersion.parse(name or "")
        except ValueError:
            raise ServerRestartedError(
                f"{self._server}: the server calls its weights {name!r}, which this run never sent: was it restarted?"
            ) from None
        return self._held.check(version, since)


class SentNames(NamedTuple):
    """What the names in a reply stand for, by when its request was sent."""

    names: WeightNames
    since: int

    def version(self, name: str | None) -> WeightVersion:
        """Raises `ServerRestartedError` for a student's weights that this run did not send, or replaced since."""
        return self.names.read(name, self.since)
