"""Classifies failed requests: one pure function from what came back, or did not, to a class of `spot_async.errors`.

Every 429, 5xx, broken connection and unreadable reply over HTTP gets its class here; `local/server.py` has the classes
that our own server names. The class decides what is done (`RetryPolicy.delay_s` in `spot_async.base.retry`). A backend
may reword an error in its server's terms (`http.ReadError`). If its server uses a status in an unusual way, that is
handled here. Messages say which setting to change, where a refusal tells.

Statuses were measured with vLLM 0.32.0 and SGLang 0.5.23. Those of hosted endpoints are from their documentation as of
November 2026: OpenAI and Azure (`retry-after-ms`, `insufficient_quota`), Anthropic (529,
`enforced_spend_limit_reached`), DeepSeek (402). Their `x-ratelimit-reset-*` headers are not read, because they say when
a limit is fully restored, which is long after the next request would be allowed.
"""

from __future__ import annotations

import contextlib
import email.utils
import math
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.client_exceptions import UnixClientConnectorError
from aiohttp.http_exceptions import BadStatusLine

from spot_async.base.text import rough_time
from spot_async.errors import (
    LONG_PAUSE_S,
    LONGEST_PAUSE_S,
    DeadlineExceededError,
    PermanentError,
    PoisonedReplyError,
    RequestError,
    ThrottledError,
    TransientError,
    UnreachableError,
)

from .excerpts import UNREADABLE, is_page, page_text

ERROR_EXCERPT_CHARACTERS = 300
SHOWN_BYTES = re.compile(r"""b(['"]).*\1""")
PAGE_HEAD_BYTES = 256
THROTTLED = (429, 503, 529)  # servers say 503 while they are full or start, and that is over by waiting, too
# 4xx that pass: timeouts, a lock that another request holds, a request that came too early.
TRANSIENT = (408, 409, 425)
NOT_IMPLEMENTED = (501, 505)
NO_CREDIT = 402
# Codes in the body of a 429 for which waiting does not help, because the money is gone.
SPENT = frozenset(
    {"insufficient_quota", "billing_not_active", "billing_hard_limit_reached", "enforced_spend_limit_reached"}
)
# SGLang's answer to a request that was sent again after its connection broke, while it still works on the first.
STILL_THERE = b"Duplicate request ID"
NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
# The words of nginx, Apache, Go's servers, Jetty and Tomcat. Others close the connection or send a TLS alert.
WANTS_TLS = re.compile(
    r"plain HTTP request was sent to HTTPS|HTTP request to an HTTPS|plain HTTP to an SSL|host and port requires TLS",
    re.I,
)
TLS_ALERT = r"b'\x15\x03"  # the beginning of a TLS alert, as errors show bytes
OLD_TLS = ("TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")  # OpenSSL's words
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
# Gateways that refuse a key with 400: LiteLLM without a database, Google.
WRONG_KEY = re.compile(
    r"no connected db|authentication[ _]?error|\b(invalid|incorrect|wrong|malformed|missing|no)[ _-]api[ _-]?key"
    r"|api[ _-]?key (is )?(not valid|invalid|expired|missing|required)",
    re.I,
)
BASIC = re.compile(r"(^|,)\s*basic\b", re.IGNORECASE)
BEARER = re.compile(r"(^|,)\s*bearer\b", re.IGNORECASE)


@dataclass(frozen=True)
class Access:
    """How a server is reached, according to its settings."""

    section: str = "backend"  # the settings' place in the configuration
    scheme: Literal["http", "https", "unix"] = "unix"
    # The settings given that name its credentials; None if it has no such settings.
    credentials: Sequence[str] | None = None


UNKNOWN_ACCESS = Access()


@dataclass(frozen=True)
class FailedReply:
    """A reply with any status but success."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case

    @property
    def is_page(self) -> bool:
        """Whether the body is a page for people, as gateways and proxies write."""
        return is_page(self.body[:PAGE_HEAD_BYTES].decode(errors="replace"))

    @property
    def said(self) -> str:
        """What the server says, in one short line."""
        return " ".join(error_message(self.body).split())[:ERROR_EXCERPT_CHARACTERS]

    @property
    def answer(self) -> str:
        """The status, and what the server says."""
        return f"HTTP {self.status}: {self.said}"


def classify(
    request: str,
    failure: FailedReply | BaseException,
    *,
    has_answered: bool = True,
    now_s: float = 0.0,
    access: Access = UNKNOWN_ACCESS,
) -> RequestError:
    """Return the error with which `request` (role and path) failed.

    `failure` is a reply, or the exception that connecting, sending or reading raised. `has_answered` says whether the
    endpoint ever answered. If not, a host without an address, a server without TLS or a missing proxy is a wrong
    setting, else a fault that passes. `now_s` is Unix time, for replies without a date. `access` is for advice.
    """
    if isinstance(failure, FailedReply):
        return _of_status(request, failure, now_s, access)
    return _of_exception(request, failure, has_answered, access)


def _of_status(request: str, reply: FailedReply, now_s: float, access: Access) -> RequestError:
    status = reply.status
    advice = advice_on(reply, access)
    message = f"{request}: {reply.answer}" + (f"; {advice}" if advice else "")
    if status == NO_CREDIT or (status == 429 and not SPENT.isdisjoint(_codes(reply.body))):
        return PermanentError(f"{message}; the account has no credit left")
    if status in THROTTLED:
        pause_s = retry_after_s(reply.headers, now_s)
        if pause_s is not None and pause_s >= LONG_PAUSE_S:
            message += f"; it asks to be left alone for {rough_time(pause_s)}"
            message += ", which is too long to wait for" if pause_s > LONGEST_PAUSE_S else ""
        return ThrottledError(message, pause_s)
    if status in TRANSIENT or (status == 400 and STILL_THERE in reply.body):
        return TransientError(message)
    if status < 500 or status in NOT_IMPLEMENTED:
        return PermanentError(message)
    return TransientError(message)


def _of_exception(request: str, error: BaseException, has_answered: bool, access: Access) -> RequestError:
    causes = list(_causes(error))
    named = error.__cause__ if type(error) is aiohttp.ClientResponseError else error  # the parser's own
    message = f"{request}: {type(named).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, TimeoutError):
        return DeadlineExceededError(f"{request}: no reply before the deadline")
    for cause in causes:
        match cause:
            case ssl.SSLCertVerificationError() | aiohttp.ClientConnectorCertificateError():
                return PermanentError(f"{message}: its certificate is not trusted: see ca_certificates")
            case aiohttp.ClientHttpProxyError(status=407):
                return PermanentError(f"{message}: the proxy wants a password")
            case aiohttp.ClientProxyConnectionError() if not has_answered:
                return PermanentError(
                    f"{request}: nothing answers at {_address(cause)}: {_reason(cause.os_error)}: correct "
                    "backend.proxy, or HTTPS_PROXY"
                )
            case ssl.SSLError() if not has_answered:
                reasons = [getattr(each, "reason", None) for each in causes if isinstance(each, ssl.SSLError)]
                reason = next(filter(None, reasons), None)  # OpenSSL's
                if reason in OLD_TLS:
                    message += ": it speaks TLS 1.1 or older only: have it speak TLS 1.2, or a proxy before it"
                return PermanentError(f"{message}: is it http, not https?" if reason in NO_TLS else message)
            case BadStatusLine():
                came = _shown_bytes(cause.message)
                if came.startswith(TLS_ALERT) and access.scheme == "http" and not has_answered:
                    return PermanentError(f"{request}: it speaks TLS: write https:// in {access.section}.url")
                return TransientError(f"{request}: what comes back is no HTTP: {came}")
            case aiohttp.ServerDisconnectedError() if access.scheme == "http" and not has_answered:
                return TransientError(f"{message} without an answer: is it https, not http?")
            case socket.gaierror() if cause.errno in NO_SUCH_HOST and not has_answered:
                return PermanentError(f"{message}: there is no such host: correct {access.section}.url")
    for cause in causes:
        if isinstance(cause, aiohttp.ClientConnectorError) and not isinstance(cause, aiohttp.ClientSSLError):
            reason = _reason(cause.os_error)
            if isinstance(cause.os_error, ConnectionResetError) and access.scheme == "https":
                reason = "the connection was closed before TLS was agreed on: does it speak TLS 1.2 or newer?"
            message = f"{request}: nothing answers at {_address(cause)}: {reason}"
            refused = TransientError(message) if has_answered else UnreachableError(message, reason)
            refused.in_short = UnreachableError.in_short
            return refused
    if isinstance(error, UNREADABLE) and not isinstance(error, aiohttp.ClientError):  # some are ValueErrors too
        return PoisonedReplyError(f"{request}: cannot read the reply: {type(error).__name__}: {error}")
    broken = TransientError(message)
    if isinstance(error, aiohttp.ClientPayloadError):
        broken.in_short = "reply cut off"
    return broken


def advice_on(reply: FailedReply, access: Access) -> str:
    """Return which setting to change after a refusal; empty if that is not known."""
    said = " ".join([reply.said, *sorted(_codes(reply.body))])
    match reply.status:
        case 301 | 302 | 307 | 308:
            return _of_redirect(reply.headers.get("location", ""), access.section)
        case 400 | 401 | 403 if access.credentials is not None and (reply.status != 400 or WRONG_KEY.search(said)):
            return _of_credentials(reply, access.section, access.credentials)
        case 407:
            return "the proxy wants a password: give it in HTTP_PROXY"
        case 413:
            return (
                "the request is larger than the server, or a proxy before it, takes: raise that limit (of nginx "
                "client_max_body_size), or lower sampling.max_response_tokens"
            )
        case 502 | 504 if reply.is_page:  # inference servers send none
            return "a gateway says so: does the server behind it run?"
        case _ if WANTS_TLS.search(said) and access.scheme == "http":
            return f"it speaks TLS: write https:// in {access.section}.url"
    return ""


def _of_redirect(location: str, section: str) -> str:
    """Name no more of the new address than its place: the rest may hold what was sent."""
    with contextlib.suppress(ValueError):
        url = urlsplit(location)  # whatever bytes it is of, which httpx would refuse
        if url.hostname is not None:
            place = f"{url.scheme or 'https'}://{url.netloc.rpartition('@')[2]}"
            return f"it redirects to {place}: if that is the server, write it in {section}.url"
    return f"it redirects to another path, perhaps to log in: give the server's own address in {section}.url"


def _of_credentials(reply: FailedReply, section: str, given: Sequence[str]) -> str:
    wanted = reply.headers.get("www-authenticate", "")
    wants_password = BASIC.search(wanted) and not BEARER.search(wanted)
    if wants_password and "secret_headers" not in given:
        return (
            "it wants a user and a password: name a variable that holds 'Basic ' and the base64 of user:password in "
            f"{section}.secret_headers, as {{Authorization: VARIABLE}}"
        )
    if given:
        return f"check the key that {' and '.join(f'{section}.{each}' for each in given)} names"
    wants = "wants" if reply.status == 401 else "may want"
    return f"it {wants} a key: name the environment variable that holds it in {section}.api_key_env"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and its causes, outermost first."""
    while error is not None:
        yield error
        if isinstance(error, aiohttp.ClientConnectorError):  # it has the system's error as an attribute, not as cause
            yield error.os_error
        elif isinstance(error, aiohttp.ClientConnectorCertificateError):
            yield error.certificate_error
        error = error.__cause__


def _shown_bytes(message: str) -> str:
    """Return the bytes that a message of the HTTP parser quotes, or else the message in one line."""
    shown = SHOWN_BYTES.search(message)
    return (shown[0] if shown else " ".join(message.split()))[:ERROR_EXCERPT_CHARACTERS]


def _address(error: aiohttp.ClientConnectorError) -> str:
    if isinstance(error, UnixClientConnectorError):
        return error.path
    proxy = "the proxy " if isinstance(error, aiohttp.ClientProxyConnectionError) else ""
    return f"{proxy}{error.host}:{error.port}"


def _reason(error: OSError) -> str:
    """Return the system's message. asyncio's own would name every address that was tried."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error) or type(error).__name__
    return os.strerror(error.errno)


def error_message(body: bytes) -> str:
    """Return what a JSON error body says, in any of the forms that inference servers use; else the body as text."""
    reply = _json(body)
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        if isinstance(message, str):
            return message
    text = body.decode(errors="replace")
    return page_text(text) if is_page(text) else text


def _codes(body: bytes) -> set[str]:
    """Return the codes in an error body, from all places where hosted endpoints put them."""
    reply = _json(body)
    if not isinstance(reply, dict):
        return set()
    error = each if isinstance(each := reply.get("error"), dict) else {}
    details = error.get("details")
    named = [
        *(error.get("code"), error.get("type"), details.get("error_code") if isinstance(details, dict) else None),
        *(reply.get("code"), reply.get("error")),
    ]
    return {each for each in named if isinstance(each, str)}


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Return the pause that an endpoint asks for, in seconds. None if there is none, or it makes no sense.

    It is in `retry-after-ms`, or in `Retry-After` as seconds or a date. A date is compared with the server's own clock
    if the reply has one.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000.0
    told = headers.get("retry-after")
    seconds = _number(told)
    if seconds is not None or told is None:
        return seconds
    until_s, sent_s = _date_s(told), _date_s(headers.get("date"))
    return None if until_s is None else max(0.0, until_s - (now_s if sent_s is None else sent_s))


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0.0 <= number < math.inf else None


def _date_s(text: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp() if text else None
    except (ValueError, TypeError, OverflowError):
        return None
