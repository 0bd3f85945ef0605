"""The class of a failed request, for every status, body and exception that servers were seen to give."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from deadlines import soon
from raw_server import listening

from spot_async import errors
from spot_async.backends.shared.excerpts import page_text, shortened
from spot_async.backends.shared.failures import Access, FailedReply, classify, retry_after_s
from spot_async.backends.shared.http import HttpEndpoint
from spot_async.base.retry import RetryPolicy
from spot_async.errors import FailureClass, RequestError, ThrottledError

SENT_S = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT
KEY = SimpleNamespace(host="10.0.0.5", port=8000, ssl=True, is_ssl=True)


def body(message: str, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, **more}}).encode()


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (400, body("The decoder prompt (length 5000) is longer than the maximum model length of 4096."), "permanent"),
        (401, b'{"error":"Unauthorized"}', "permanent"),
        (402, body("Insufficient Balance"), "permanent"),
        (403, body("Scale-out endpoints are disabled."), "permanent"),
        (404, b'{"detail":"Not Found"}', "permanent"),
        (405, b"", "permanent"),
        (413, b"<html>Request Entity Too Large</html>", "permanent"),
        (422, b"", "permanent"),
        (302, b"", "permanent"),
        (501, b"", "permanent"),
        (400, body("Duplicate request ID detected: 0123"), "transient"),  # SGLang, of a request that was sent again
        (408, b"", "transient"),
        (409, b"", "transient"),
        (500, body("EngineCore encountered an issue. See stack trace (above) for the root cause."), "transient"),
        (502, b"<html><h1>502 Bad Gateway</h1></html>", "transient"),
        (504, b"", "transient"),
        (599, b"\xff\xfe", "transient"),
        (429, body("Rate limit reached", type="requests", code="rate_limit_exceeded"), "throttled"),
        (429, body("Please retry after 3 s; see insufficient_quota in the manual"), "throttled"),
        (429, b"[[[" * 100_000, "throttled"),
        (503, b'{"object":"error","message":"The request queue is full.","code":503}', "throttled"),
        (529, body("Overloaded", type="overloaded_error"), "throttled"),
        (429, body("You exceeded your current quota", code="insufficient_quota"), "permanent"),
        (429, body("quota", type="insufficient_quota", code=None), "permanent"),
        (
            429,
            body("limit", type="rate_limit_error", details={"error_code": "enforced_spend_limit_reached"}),
            "permanent",
        ),
    ],
)
def test_a_status_and_its_body_decide_the_class(status: int, content: bytes, kind: str) -> None:
    error = classify("teacher/x", FailedReply(status, content))
    assert error.failure_class == kind
    assert str(error).startswith(f"teacher/x: HTTP {status}: ")
    assert "\n" not in str(error)


PROXY = SimpleNamespace(real_url="http://10.0.0.6:3128")
CERTIFICATE = ssl.SSLCertVerificationError("certificate verify failed")


@pytest.mark.parametrize(
    ("failure", "first", "later"),
    [
        (TimeoutError(), "transient", "transient"),
        (ConnectionResetError(), "transient", "transient"),
        (aiohttp.ServerDisconnectedError(), "transient", "transient"),
        (aiohttp.ClientPayloadError("not enough data"), "transient", "transient"),
        (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(111, "refused")), "transient", "transient"),
        (
            aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(socket.EAI_NONAME, "")),
            "permanent",
            "transient",
        ),
        (
            aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(socket.EAI_AGAIN, "")),
            "transient",
            "transient",
        ),
        (aiohttp.ClientConnectorCertificateError(KEY, CERTIFICATE), "permanent", "permanent"),
        (
            aiohttp.ClientConnectorSSLError(KEY, ssl.SSLError(1, "WRONG_VERSION_NUMBER")),
            "permanent",
            "transient",
        ),
        (aiohttp.ClientHttpProxyError(PROXY, (), status=407), "permanent", "permanent"),  # type: ignore[arg-type]
        (aiohttp.ClientHttpProxyError(PROXY, (), status=502), "transient", "transient"),  # type: ignore[arg-type]
        (json.JSONDecodeError("", "", 0), "poisoned", "poisoned"),
        (RecursionError(), "poisoned", "poisoned"),
        (OverflowError("out of bounds for int32"), "poisoned", "poisoned"),
    ],
)
def test_an_exception_decides_the_class_and_so_does_whether_the_endpoint_ever_answered(
    failure: BaseException, first: str, later: str
) -> None:
    assert classify("teacher/x", failure, has_answered=False).failure_class == first
    assert classify("teacher/x", failure, has_answered=True).failure_class == later


def test_an_address_where_nothing_listens_is_said_in_plain_words() -> None:
    refused = ConnectionRefusedError(111, "Connect call failed ('10.0.0.5', 8000)")
    failure = aiohttp.ClientConnectorError(KEY, refused)  # type: ignore[arg-type]
    first, later = [classify("teacher/x", failure, has_answered=answered) for answered in (False, True)]
    assert str(first) == str(later) == "teacher/x: nothing answers at 10.0.0.5:8000: Connection refused"
    assert isinstance(first, errors.UnreachableError)
    assert not isinstance(later, errors.UnreachableError)  # it may come back
    nobody = aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(socket.EAI_NONAME, ""))
    said = str(classify("teacher/x", nobody, has_answered=False, access=HTTP))
    assert said.endswith("there is no such host: correct teacher.backend.url")


@pytest.mark.parametrize(
    ("header", "kept_s", "said"),
    [
        ("7", 7.0, ""),
        ("1800", 1800.0, "; it asks to be left alone for 30 min"),
        ("31536000", None, "; it asks to be left alone for 365 days, which is too long to wait for"),
        ("Fri, 31 Dec 9999 23:59:59 GMT", None, "; it asks to be left alone for 2,923,822 days, which is too long to "
         "wait for"),
        ("1" * 300, None, "; it asks to be left alone for 1e+294 days, which is too long to wait for"),
    ],
)  # fmt: skip
def test_who_asks_for_a_long_pause_is_told_to_people_and_a_year_is_not_waited(
    header: str, kept_s: float | None, said: str
) -> None:
    reply = FailedReply(429, b"slow down", {"retry-after": header})
    error = classify("teacher/x", reply, now_s=SENT_S)
    assert isinstance(error, errors.ThrottledError)
    assert (error.retry_after_s, str(error)) == (kept_s, f"teacher/x: HTTP 429: slow down{said}")


NGINX = (
    b"<html>\r\n<head><title>%s</title></head>\r\n<body>\r\n<center><h1>%s</h1></center>\r\n<hr><center>nginx/1.24.0"
    b"</center>\r\n</body>\r\n</html>\r\n<!-- a padding to disable MSIE and Chrome friendly error page -->\r\n"
)
TO_TLS = b"400 The plain HTTP request was sent to HTTPS port"
BASIC = {"www-authenticate": 'Basic realm="models"'}
HTTP = Access("teacher.backend", "http", ())


@pytest.mark.parametrize(
    ("status", "content", "headers", "access", "said"),
    [
        (401, NGINX % ((b"401 Authorization Required",) * 2), BASIC, HTTP,
         "401 Authorization Required nginx/1.24.0; it wants a user and a password: name a variable that holds 'Basic ' "
         "and the base64 of user:password in teacher.backend.secret_headers, as {Authorization: VARIABLE}"),
        (401, b"no", BASIC, Access("teacher.backend", "https", ("api_key_env",)),
         "no; it wants a user and a password: name a variable that holds 'Basic ' and the base64 of user:password in "
         "teacher.backend.secret_headers, as {Authorization: VARIABLE}"),
        (401, b"no", BASIC, Access("teacher.backend", "https", ("secret_headers",)),
         "no; check the key that teacher.backend.secret_headers names"),
        (401, b"no", {"www-authenticate": 'Bearer realm="x", Basic realm="x"'}, HTTP,
         "no; it wants a key: name the environment variable that holds it in teacher.backend.api_key_env"),
        (403, b"no", {}, HTTP,
         "no; it may want a key: name the environment variable that holds it in teacher.backend.api_key_env"),
        (403, b"no", {}, Access("teacher.backend", "http", ("api_key_env", "secret_headers")),
         "no; check the key that teacher.backend.api_key_env and teacher.backend.secret_headers names"),
        *(
            (400, said, {}, Access("teacher.backend", "http", ("api_key_env",)),
             "no; check the key that teacher.backend.api_key_env names")
            for said in (
                b'{"error": {"message": "no", "code": "invalid_api_key"}}',
                b'{"error": {"message": "no", "type": "authentication_error"}}',
                b'{"message": "no", "code": "invalid_api_key"}',
            )
        ),
        (401, b"no", BASIC, Access(), "no"),  # a server whose settings hold no keys
        (308, b"moved", {"location": "https://user:pw@gpu.example:8443/version?key=sk-1"}, HTTP,
         "moved; it redirects to https://gpu.example:8443: if that is the server, write it in teacher.backend.url"),
        (302, b"found", {"location": "/login?next=/version"}, HTTP,
         "found; it redirects to another path, perhaps to log in: give the server's own address in "
         "teacher.backend.url"),
        (413, NGINX % ((b"413 Request Entity Too Large",) * 2), {}, HTTP,
         "413 Request Entity Too Large nginx/1.24.0; the request is larger than the server, or a proxy before it, "
         "takes: raise that limit (of nginx client_max_body_size), or lower sampling.max_response_tokens"),
        (502, NGINX % ((b"502 Bad Gateway",) * 2), {}, HTTP,
         "502 Bad Gateway nginx/1.24.0; a gateway says so: does the server behind it run?"),
        (502, body("model is loading"), {}, HTTP, "model is loading"),
        (400, NGINX % (TO_TLS, b"400 Bad Request"), {}, HTTP,
         f"{TO_TLS.decode()} 400 Bad Request nginx/1.24.0; it speaks TLS: write https:// in teacher.backend.url"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", {}, HTTP,
         "Client sent an HTTP request to an HTTPS server.; it speaks TLS: write https:// in teacher.backend.url"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", {}, Access("teacher.backend", "https", ()),
         "Client sent an HTTP request to an HTTPS server."),  # says somebody behind who was asked
    ],
)  # fmt: skip
def test_a_refusal_is_shown_without_its_tags_and_with_the_setting_that_it_is_about(
    status: int, content: bytes, headers: dict[str, str], access: Access, said: str
) -> None:
    error = classify("teacher/x", FailedReply(status, content, headers), access=access)
    assert str(error) == f"teacher/x: HTTP {status}: {said}"


def test_of_a_page_the_words_are_left_whatever_its_tags_are() -> None:
    page = (
        "<!DOCTYPE html>\n<!--[if lt IE 7]> <html class='ie6'> <![endif]-->\n<head><title>m.example | 502: Bad gateway"
        "</title><style>body{margin:0}</style><script>if (a<b) { f('<p>') }</script></head><body><h1>Bad&nbsp;gateway"
        "</h1><p>Error code 502 &amp; more</p><p>Error code 502 &amp; more</p><script src=x></script>the end</body>"
    )
    assert page_text(page) == "m.example | 502: Bad gateway Bad gateway Error code 502 & more the end"
    assert page_text("<html>it ends <b") == "it ends <b"
    assert page_text("< >" * 10 + "<html>x") == "x"
    assert page_text("<" * 10_000_000) == "<" * (1 << 14)  # and at once


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (
            "TLSV1_ALERT_PROTOCOL_VERSION",
            "it speaks TLS 1.1 or older only: have it speak TLS 1.2, or a proxy before it",
        ),
        ("UNSUPPORTED_PROTOCOL", "it speaks TLS 1.1 or older only: have it speak TLS 1.2, or a proxy before it"),
        ("WRONG_VERSION_NUMBER", "is it http, not https?"),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", ""),
    ],
)
def test_a_handshake_that_fails_says_what_the_other_side_speaks(reason: str, advice: str) -> None:
    handshake = ssl.SSLError(1, f"[SSL: {reason}]")
    handshake.reason = reason
    cause = aiohttp.ClientConnectorSSLError(KEY, handshake)  # type: ignore[arg-type]
    error = classify("teacher/x", cause, has_answered=False, access=Access("teacher.backend", "https", ()))
    assert str(error) == f"teacher/x: ClientConnectorSSLError: {cause}{': ' if advice else ''}{advice}"
    assert error.failure_class is FailureClass.PERMANENT


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "Sun, 06 Nov 1994 08:50:37 GMT"}, 60.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:48:37 GMT"}, 0.0),
        # by a clock of its own, which is a minute ahead
        ({"retry-after": "Sun, 06 Nov 1994 08:50:57 GMT", "date": "Sun, 06 Nov 1994 08:50:37 GMT"}, 20.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:50:37 GMT", "date": "yesterday"}, 60.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "Sun, 99 Nov 99999999999 08:50:37 GMT"}, None),
    ],
)
def test_a_throttled_endpoint_is_left_alone_for_as_long_as_it_says(
    headers: dict[str, str], wait_s: float | None
) -> None:
    assert retry_after_s(headers, SENT_S) == wait_s
    error = classify("teacher/x", FailedReply(429, b"", headers), now_s=SENT_S)
    assert isinstance(error, ThrottledError)
    assert error.retry_after_s == wait_s


def sendings(error: RequestError, attempts: int, *, limit: int = 50) -> int:
    policy = RetryPolicy(attempts)
    return next((n for n in range(1, limit) if policy.delay_s(error, n, 0.5) is None), limit)


def test_each_class_of_failure_has_a_budget_of_its_own() -> None:
    assert sendings(errors.PermanentError("400"), 8) == 1
    assert sendings(errors.VersionMismatchError("other weights"), 8) == 1
    assert sendings(errors.VersionMismatchError("other weights", may_pass=True), 8) == 8
    assert sendings(errors.DeadlineExceededError("late"), 8) == 1
    assert sendings(errors.TransientError("reset"), 8) == 8
    assert sendings(errors.PoisonedReplyError("NaN"), 8) == 2
    assert sendings(errors.PoisonedReplyError("NaN"), 1) == 1
    assert sendings(errors.ThrottledError("429"), 1) == 50  # the deadline ends it
    assert sendings(errors.ThrottledError("429"), 0) == sendings(errors.TransientError("reset"), 0) == 1
    told = [RetryPolicy(1).delay_s(ThrottledError("429", 30.0), 1, jitter) for jitter in (0.0, 0.5, 0.999)]
    assert told == sorted(told)
    assert told[0] == 30.0  # never sooner, and not all at once
    assert {each.failure_class for each in (errors.PermanentError(""), errors.TransientError(""))} == {
        FailureClass.PERMANENT,
        FailureClass.TRANSIENT,
    }


async def test_an_error_carries_what_was_sent_and_what_came_back_without_the_key() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        said = b"no such thing as sk-secret"
        writer.write(b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
        await writer.drain()
        writer.close()

    sent = json.dumps({"input_ids": list(range(1000)), "sampling_params": {"temperature": 0.5}, "k": "sk-secret"})
    async with listening(answer) as url, HttpEndpoint("teacher", url, api_key="sk-secret") as endpoint:
        with pytest.raises(errors.PermanentError) as caught:
            await endpoint.post("/x", sent.encode(), content_type="application/json", deadline=soon())
    exchange = caught.value.exchange
    assert exchange is not None
    assert (exchange.endpoint, exchange.method, exchange.path, exchange.status) == (url, "POST", "/x", 400)
    assert exchange.sent_bytes == len(sent)
    assert exchange.sent == {
        "input_ids": [0, 1, 2, 3, 4, 5, 6, 7, "... 1000 in all"],
        "sampling_params": {"temperature": 0.5},
        "k": "***",
    }
    assert exchange.received == "no such thing as ***"
    assert caught.value.reworded("x").exchange == exchange


def test_bodies_are_legible_whatever_they_are() -> None:
    deep: Any = "bottom"
    for _ in range(20):
        deep = [deep]
    assert shortened(json.dumps(deep).encode()) == [[[[[["..."]]]]]]
    assert shortened(b"\xff\xfe\x01 text") == "\\xff\\xfe\x01 text"
    assert shortened(b"[" * 100_000) == "[" * 500
    assert shortened(b"") is None
