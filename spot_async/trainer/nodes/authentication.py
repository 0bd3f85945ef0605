"""How nodes show each other that they know the run's secret without telling it. Pure: no socket, no clock.

    node 0 -> node k   a challenge
    node k -> node 0   what the connection is for, a challenge of its own, its proof
    node 0 -> node k   its proof

A proof is an HMAC over who gives it, the purpose and both challenges. So a recorded one proves nothing later. From then
on each message has an HMAC over its number and its bytes, with a key of this connection and direction. A message that
was changed, left out, sent twice or sent back does not have it. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from spot_async.base.files import open_regular
from spot_async.base.secrets import SECRETS
from spot_async.config import ClusterConfig
from spot_async.errors import ConfigError

SECRET_VARIABLE = "SPOT_ASYNC_CLUSTER_SECRET"
SHORTEST_SECRET, LONGEST_SECRET = 16, 1024  # bytes
CHALLENGE_BYTES = TAG_BYTES = 32
ANSWER_BYTES = 1 + CHALLENGE_BYTES + TAG_BYTES
_HOW = "`openssl rand -hex 32` makes one, and all nodes need the same"


class ForgedError(Exception):
    """The other end does not know the secret, or somebody else wrote into the connection."""


class Purpose(IntEnum):
    """What a connection to node 0 is for."""

    NODE = 1  # a node joins
    STORE = 2  # one of its ranks asks the store of the process group


@dataclass(frozen=True)
class Secret:
    """What all nodes of a run know, and nobody else."""

    value: bytes = field(repr=False)


def new_secret() -> Secret:
    """Return one that nobody knows yet."""
    return Secret(secrets.token_hex(32).encode())


def cluster_secret(environ: Mapping[str, str], cluster: ClusterConfig) -> Secret:
    """Return the run's secret, from `cluster.secret_file` or the environment. Raises ConfigError in one line."""
    if (path := cluster.secret_file) is not None:
        where, value = f"cluster.secret_file={path}", _read(path)
    else:
        where, value = SECRET_VARIABLE, os.fsencode(environ.get(SECRET_VARIABLE, "").strip())
        if not value and cluster.kind == "ray":  # the run itself starts the other nodes, and tells them
            return new_secret()
        if not value:
            raise ConfigError(
                f"{SECRET_VARIABLE} is not set: nodes let nobody in who does not know the run's secret; set it, or "
                f"give cluster.secret_file: {_HOW}"
            )
    if not SHORTEST_SECRET <= len(value) <= LONGEST_SECRET:
        raise ConfigError(
            f"{where}: the secret has {len(value)} bytes, it must have {SHORTEST_SECRET} to {LONGEST_SECRET}: {_HOW}"
        )
    if not (value.isascii() and value.decode().isprintable()):  # agents get it as a variable
        raise ConfigError(f"{where}: the secret must be printable ASCII: {_HOW}")
    SECRETS.learn(value, SECRET_VARIABLE)
    return Secret(value)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"cluster.secret_file={path}: belongs to another user: give a file of your own")
            if status.st_mode & 0o077:
                raise ConfigError(f"cluster.secret_file={path}: other users can read or write it: chmod 600 {path}")
            return file.read(LONGEST_SECRET + 2).strip()
    except OSError as error:
        raise ConfigError(f"cluster.secret_file={path}: {error.strerror}: {_HOW}") from None


class Seal:
    """Tags the messages of one direction of a connection, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def tag(self, message: bytes) -> bytes:
        """Return the tag of the next message."""
        self._number += 1
        return _mac(self._key, self._number.to_bytes(8, "big"), message)

    def check(self, message: bytes, tag: bytes) -> None:
        """Raise `ForgedError` unless this is the next message."""
        if not hmac.compare_digest(self.tag(message), tag):
            raise ForgedError


class Seals(NamedTuple):
    """Those of both directions, as one end sees them."""

    sending: Seal
    receiving: Seal


Said = tuple[bytes, bytes, bytes]  # the purpose, node 0's challenge, node k's; a challenge is random and used once


def answer_of(secret: Secret, said: Said) -> bytes:
    """Return node k's answer to node 0's challenge."""
    purpose, _, own = said
    return purpose + own + _mac(secret.value, b"node k", *said)


def admitted(secret: Secret, challenge: bytes, answer: bytes) -> tuple[Purpose, bytes, Seals]:
    """Return node 0's: what the connection is for, the proof to send, and the seals. Raises `ForgedError`."""
    purpose, theirs, proof = answer[:1], answer[1 : 1 + CHALLENGE_BYTES], answer[1 + CHALLENGE_BYTES :]
    said = (purpose, challenge, theirs)
    if not hmac.compare_digest(_mac(secret.value, b"node k", *said), proof):
        raise ForgedError
    seals = Seals(_seal(secret, b"from node 0", *said), _seal(secret, b"from node k", *said))
    try:
        return Purpose(purpose[0]), _mac(secret.value, b"node 0", *said), seals
    except ValueError:  # of another version
        raise ForgedError from None


def proven(secret: Secret, said: Said, proof: bytes) -> Seals:
    """Return node k's seals. Raises `ForgedError` if the other end is not node 0."""
    if not hmac.compare_digest(_mac(secret.value, b"node 0", *said), proof):
        raise ForgedError
    return Seals(_seal(secret, b"from node k", *said), _seal(secret, b"from node 0", *said))


def _seal(secret: Secret, direction: bytes, *said: bytes) -> Seal:
    return Seal(_mac(secret.value, direction, *said))


def _mac(key: bytes, *parts: bytes) -> bytes:
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(len(part).to_bytes(4, "big") + part)
    return made.digest()
