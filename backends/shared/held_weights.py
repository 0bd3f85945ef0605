"""Notices replies of weights that this run did not send.

A server that its operator restarted, or that another run updates too, goes on answering, but with other weights. The
first such reply is found here by the version that it names. Pure: backends tell when they send requests and updates,
and read the names in replies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from spot_async.errors import ServerRestartedError, VersionMismatchError
from spot_async.types import VersionSpan, WeightVersion

INITIAL = WeightVersion(0, 0)

ReadName = Callable[[str | None], WeightVersion]  # given a server's name for its weights, returns the version it means


class HeldWeights:
    """The versions that one server was sent, oldest first, and the newest that it confirmed."""

    def __init__(self, server: str, first: WeightVersion = INITIAL) -> None:
        self._server = server
        self._versions = [first]
        self._confirmed = 0

    @contextlib.contextmanager
    def updating(self, version: WeightVersion) -> Iterator[None]:
        """Note an update during the `with` block.

        Replies may name `version` from its start on. Once it has succeeded, later requests' replies may name nothing
        older.
        """
        self._versions.append(version)
        index = len(self._versions) - 1
        yield
        self._confirmed = max(self._confirmed, index)

    def now(self) -> int:
        """Return the present moment for `check`. Take it before sending a request."""
        return self._confirmed

    def check(self, version: WeightVersion, since: int) -> WeightVersion:
        """Return the version. Raises `ServerRestartedError` if the server held no such weights since that moment."""
        if version not in self._versions[since:]:
            raise ServerRestartedError(
                f"{self._server}: the server holds weights {version} and was last given {self._versions[-1]}: was it "
                "restarted, or updated by another run?"
            )
        return version

    def require(self, versions: Collection[WeightVersion | None], expected: WeightVersion | None) -> None:
        """Raise `VersionMismatchError` unless all parts of an answer are of `expected`, or of any one version if None.

        The parts may be of several versions because the weights were updated in between. Then the answer may be asked
        for again, as it may while an update to `expected` is under way.
        """
        other = next((version for version in versions if version != expected), None)
        if expected is None:
            if len(set(versions)) > 1:
                raise VersionMismatchError(f"{self._server}: the weights changed while it answered", may_pass=True)
        elif other is not None:
            is_coming = expected in self._versions[self._confirmed + 1 :]
            raise VersionMismatchError(
                f"{self._server}: holds weights {other}, not the {expected} asked for", may_pass=is_coming
            )


class WeightNames(HeldWeights):
    """The same for servers that name their weights. A model that is not a student has only one version."""

    def __init__(self, server: str, *, is_student: bool) -> None:
        super().__init__(server)
        self._is_student = is_student
        self._first: str | None = None

    def start(self, name: str | None) -> None:
        """Note the server's name for the weights that it starts with; None if it does not say."""
        self._first = name

    def reader(self) -> ReadName:
        """Return the reader of the names in a reply. Take it before sending the request."""
        return functools.partial(self.read, since=self.now())

    def read(self, name: str | None, since: int) -> WeightVersion:
        """Return the version that a name in a reply means.

        Raises `ServerRestartedError` if a student could not have had it since that moment.
        """
        if not self._is_student:
            return INITIAL
        if since == 0 and name in (None, self._first):  # servers that name no weights accept none
            return INITIAL
        try:
            version = WeightVersion.parse(name or "")
        except ValueError:
            raise ServerRestartedError(
                f"{self._server}: the server calls its weights {name!r}, which this run never sent: was it restarted?"
            ) from None
        return self.check(version, since)


class NamedSpan(msgspec.Struct):
    """Tokens [start, end) were sampled by the weights that the server names `version`."""

    version: str
    start: int
    end: int


def version_spans(
    names: ReadName, spans: Sequence[NamedSpan] | None, count: int, name: str | None = None
) -> tuple[VersionSpan, ...]:
    """Return the version spans of a reply of `count` tokens.

    Without `spans`, which servers had not always, one `name` is of all of them; None if the server names no weights.
    """
    if not spans:
        return (VersionSpan(0, count, names(name)),)
    return tuple(VersionSpan(span.start, span.end, names(span.version)) for span in spans)
