"""The wire contract between the local engine's server and its clients: paths, messages, error body.

Bodies are msgpack (`spot_async.base.wire`). A failed request gets an `ErrorReply` whose `error` names a class of
`spot_async.errors`, and the HTTP status that `STATUS` has for it. `timeout_s` is the time left until the caller's
deadline, since the two processes share no clock.

Requests may have to show secrets, which server and client read from their environments (`Credentials`). Every user of
the machine can see command lines, but not environments.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import struct
import zlib
from dataclasses import dataclass, field
from typing import Annotated, Self

import msgspec

from spot_async.base.secrets import SECRETS
from spot_async.errors import (
    DataError,
    DeadlineExceededError,
    PermanentError,
    PoisonedReplyError,
    RequestTooLargeError,
    ServerRestartedError,
    SpotError,
    ThrottledError,
    TransientError,
    VersionMismatchError,
)
from spot_async.types import FloatArray, IntArray, SamplingSettings, WeightSnapshot, WeightVersion

HEALTH = "/health"
CAPABILITIES = "/capabilities"
STATS = "/stats"
GENERATE = "/generate"
SCORE = "/score"
CANDIDATE_LOGPROBS = "/candidate_logprobs"
MANY = "/many"
UPDATE_WEIGHTS = "/update_weights"
LOAD_ADAPTER = "/load_adapter"
UNLOAD_ADAPTER = "/unload_adapter"

CONTENT_TYPE = "application/msgpack"
# Names the process that a request is meant for. Any other process, such as the same server started again with other
# weights, refuses the request with `ServerRestartedError`.
INSTANCE_HEADER = "X-Spot-Async-Instance"
UPDATE_TOKEN_HEADER = "X-Spot-Async-Update-Token"  # required for new weights; see `Credentials`
FRAME_HEADER = struct.Struct(">II")  # the frame's size in bytes, and its CRC-32
MAX_TOGETHER = 64  # requests in one `ManyRequest`
DIGEST_HEADER = "Content-Digest"  # RFC 9530: shows whether a proxy or the network has changed a number
API_KEY_VARIABLE = "SPOT_ASYNC_API_KEY"
UPDATE_TOKEN_VARIABLE = "SPOT_ASYNC_UPDATE_TOKEN"

STATUS: dict[type[SpotError], int] = {
    PermanentError: 400,
    RequestTooLargeError: 413,
    DataError: 422,
    VersionMismatchError: 409,
    ThrottledError: 503,
    DeadlineExceededError: 504,
    PoisonedReplyError: 500,
    ServerRestartedError: 412,
    TransientError: 500,
}
SERVER_ERROR = 500


def digest(body: bytes) -> str:
    """Return the value of `DIGEST_HEADER` for a body."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def frame(body: bytes) -> bytes:
    """Return a message of a stream: `FRAME_HEADER`, then the body."""
    return FRAME_HEADER.pack(len(body), zlib.crc32(body)) + body


def status_of(error: Exception) -> int:
    """Return the HTTP status of the reply to a request that failed with this error."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), SERVER_ERROR)


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str
    message: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered with a `Generation`."""

    prompt_ids: IntArray  # (P,)
    sampling: SamplingSettings
    top_k: int = 0
    adapter: str | None = None  # the name of one that is loaded; None: the server's own weights
    timeout_s: float


class _ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: IntArray  # (P,)
    response_ids: IntArray  # (T,)
    temperature: float = 1.0
    adapter: str | None = None
    timeout_s: float


class ScoreRequest(_ScoringRequest, frozen=True, kw_only=True, tag=True):
    """Answered with `TokenScores`."""

    top_k: int


class CandidateRequest(_ScoringRequest, frozen=True, kw_only=True, tag=True):
    """Answered with a `CandidateReply`."""

    positions: IntArray  # (N,) 0-based response positions
    candidate_ids: IntArray  # (N, k)
    expected_version: WeightVersion | None  # None: those that it holds then


class CandidateReply(msgspec.Struct, frozen=True, kw_only=True):
    logprobs: FloatArray  # (N, k)
    version: WeightVersion


EngineRequest = GenerateRequest | ScoreRequest | CandidateRequest


class ManyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Answered with one frame per request: a `FRAME_HEADER`, then a `ManyReply`. Those done first are sent first."""

    requests: Annotated[list[EngineRequest], msgspec.Meta(min_length=1, max_length=MAX_TOGETHER)]


class ManyReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to the request at `index`, or its error."""

    index: int
    reply: msgspec.Raw = msgspec.Raw(b"\xc0")  # what it would be answered with alone; nil if there is an `error`
    error: ErrorReply | None = None


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Answered with a `VersionReply` once all later tokens will come from the new weights."""

    snapshot: WeightSnapshot
    digests: dict[str, str] = {}  # SHA-256 of some of its tensors, by name: others are refused
    timeout_s: float


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Load the adapter in the snapshot's directory under a new name. Answered with a `VersionReply`."""

    name: str
    snapshot: WeightSnapshot
    timeout_s: float


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Forget an adapter. Requests that name it already continue with it. Answered with a `VersionReply`."""

    name: str
    timeout_s: float


class VersionReply(msgspec.Struct, frozen=True, kw_only=True):
    version: WeightVersion


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to /health."""

    version: WeightVersion
    instance: str  # names this process; see `INSTANCE_HEADER`


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the server started."""

    waiting: int  # generation requests without a slot
    active: int  # slots in use
    scoring: int  # scoring requests not yet run
    tokens_generated: int
    tokens_scored: int  # prompt and response tokens read by scoring
    tokens_prefilled: int
    cpu_s: float
    version: WeightVersion


@dataclass(frozen=True)
class Credentials:
    """A server's secrets. None: not required. Printing the object does not show them."""

    api_key: str | None = field(default=None, repr=False)  # required for every request
    update_token: str | None = field(default=None, repr=False)  # required for new weights, besides the key

    @classmethod
    def of_environment(cls) -> Self:
        """Return the credentials of a server that was started by hand."""
        SECRETS.learn(os.environ.get(API_KEY_VARIABLE, ""))
        return cls(os.environ.get(API_KEY_VARIABLE) or None, os.environ.get(UPDATE_TOKEN_VARIABLE) or None)

    @classmethod
    def of_new_server(cls) -> Self:
        """Return the credentials of a server that we start. The user may know the key, but only we know the token."""
        SECRETS.learn(os.environ.get(API_KEY_VARIABLE, ""))
        return cls(os.environ.get(API_KEY_VARIABLE) or new_secret(), new_secret())

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for the server's process."""
        given = {API_KEY_VARIABLE: self.api_key, UPDATE_TOKEN_VARIABLE: self.update_token}
        return {name: value for name, value in given.items() if value is not None}


def new_secret() -> str:
    """Return a text that nobody can guess, any header can carry, and no command line takes for an option."""
    made = secrets.token_hex(32)
    SECRETS.learn(made)
    return made
