"""Advises which setting to change when a server could not be reached, or refused us. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

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


def of_reply(status: int, said: str, headers: Mapping[str, str], access: Access, *, is_page: bool = False) -> str:
    """Return advice on a refusal; empty if there is none. `headers` have names in lower case.

    `is_page` says that the body was a page for people, which gateways send and inference servers do not.
    """
    match status:
        case 301 | 302 | 307 | 308:
            return _of_redirect(headers.get("location", ""), access.section)
        case 400 | 401 | 403 if access.credentials is not None and (status != 400 or WRONG_KEY.search(said)):
            return _of_credentials(status, headers.get("www-authenticate", ""), access.section, access.credentials)
        case 407:
            return "the proxy wants a password: give it in HTTP_PROXY"
        case 413:
            return (
                "the request is larger than the server, or a proxy before it, takes: raise that limit (of nginx "
                "client_max_body_size), or lower sampling.max_response_tokens"
            )
        case 502 | 504 if is_page:
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


def _of_credentials(status: int, wanted: str, section: str, given: Sequence[str]) -> str:
    wants_password = BASIC.search(wanted) and not BEARER.search(wanted)
    if wants_password and "secret_headers" not in given:
        return (
            "it wants a user and a password: name a variable that holds 'Basic ' and the base64 of user:password in "
            f"{section}.secret_headers, as {{Authorization: VARIABLE}}"
        )
    if given:
        return f"check the key that {' and '.join(f'{section}.{each}' for each in given)} names"
    wants = "wants" if status == 401 else "may want"
    return f"it {wants} a key: name the environment variable that holds it in {section}.api_key_env"


def of_handshake(reason: str | None) -> str:
    """Return advice on a failed TLS handshake. `reason` is OpenSSL's."""
    if reason in OLD_TLS:
        return "it speaks TLS 1.1 or older only: have it speak TLS 1.2, or a proxy before it"
    return "is it http, not https?" if reason in NO_TLS else ""
