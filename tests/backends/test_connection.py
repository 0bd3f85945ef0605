"""How remote endpoints are reached: real TLS, real proxies, and keys that show up nowhere."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from deadlines import soon
from raw_server import listening

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.shared.connection import access, proxy_for, tls_context
from spot_async.backends.shared.http import HttpEndpoint, Route
from spot_async.backends.shared.remote import RemoteServer
from spot_async.backends.shared.settings import AttachedSettings
from spot_async.config.loading import dump_yaml, validate
from spot_async.errors import (
    ConfigError,
    PermanentError,
    RequestError,
    ThrottledError,
    TransientError,
    UnreachableError,
)

KEY = "sk-a-key-that-nobody-may-read"
PROXY_VARIABLES = [
    name for stem in ("http", "https", "all", "no") for name in (f"{stem}_proxy", f"{stem}_PROXY".upper())
]

Answer = Callable[[str, dict[str, str]], tuple[int, dict[str, str], bytes]]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*PROXY_VARIABLES, *(name.upper() for name in PROXY_VARIABLES), "SSL_CERT_FILE", "SSL_CERT_DIR"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed one for 127.0.0.1, and its key beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    paths = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *paths]
    subprocess.run(argv, check=True, capture_output=True)
    return folder / "certificate.pem"


@contextlib.asynccontextmanager
async def http_server(answer: Answer, certificate: Path | None = None) -> AsyncIterator[str]:
    """A real server; `answer` maps a target and its headers to status, headers and body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = dict(line.split(": ", 1) for line in head[1:] if line)
            headers = {name.lower(): value for name, value in fields.items()}
            await reader.readexactly(int(headers.get("content-length", 0)))
            status, more, body = answer(head[0].split()[1], headers)
            lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in more.items())]
            lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
            writer.write("\r\n".join(lines).encode(errors="surrogateescape") + body)
            await writer.drain()
        writer.close()

    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    with contextlib.closing(server):
        scheme = "http" if certificate is None else "https"
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def proxy_server(seen: list[str]) -> AsyncIterator[str]:
    """Tunnels (CONNECT) and forwards plain requests; `seen` gets each request's first line and its credentials."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        with contextlib.suppress(ConnectionError, RuntimeError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        seen.extend([first, *(line for line in rest if line.lower().startswith("proxy-authorization"))])
        method, target, _ = first.split()
        host, _, port = target.removeprefix("http://").split("/")[0].partition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            there_writer.write(head)
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(reader, there_writer))
            group.create_task(pump(there_reader, writer))

    async with listening(serve) as url:
        yield url


def hello(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, f"hello {target}".encode()


async def test_only_certificates_that_are_trusted_are_spoken_to(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(url: str, ca_certificates: str | None) -> bytes:
        async with HttpEndpoint(
            "teacher", url, route=Route(verify=tls_context("teacher.backend", ca_certificates))
        ) as endpoint:
            return await endpoint.get("/x", deadline=soon())

    async with http_server(hello, certificate) as url:
        with pytest.raises(PermanentError, match="certificate verify failed"):
            await ask(url, None)
        assert await ask(url, str(certificate)) == b"hello /x"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert await ask(url, None) == b"hello /x"


@contextlib.asynccontextmanager
async def mute_server(first_bytes: bytes) -> AsyncIterator[str]:
    """One that says these bytes to whatever it is sent, and closes; yields host and port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(first_bytes)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with listening(serve) as url:
        yield url.removeprefix("http://")


TLS_ALERT = bytes.fromhex("15030200020246")  # of TLS 1.1: the version is not supported


@pytest.mark.parametrize(
    ("scheme", "first_bytes", "kind", "said"),
    [
        ("https", TLS_ALERT, PermanentError,
         "it speaks TLS 1.1 or older only: have it speak TLS 1.2, or a proxy before it"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", PermanentError, "is it http, not https?"),
        ("https", b"", UnreachableError,
         "the connection was closed before TLS was agreed on: does it speak TLS 1.2 or newer?"),
        ("http", TLS_ALERT, PermanentError, "it speaks TLS: write https:// in teacher.backend.url"),
        ("http", b"", TransientError, "Server disconnected without an answer: is it https, not http?"),
        ("http", b"SSH-2.0-OpenSSH_9.2\r\n", TransientError, "what comes back is no HTTP: b'SSH-2.0-OpenSSH_9.2'"),
    ],
)  # fmt: skip
async def test_who_speaks_something_else_than_the_address_says_is_told_so(
    scheme: str, first_bytes: bytes, kind: type[Exception], said: str
) -> None:
    async with mute_server(first_bytes) as address:
        url = f"{scheme}://{address}"
        reached = access("teacher.backend", url, None, {})
        async with HttpEndpoint("teacher", url, route=Route(access=reached)) as endpoint:
            with pytest.raises(kind) as caught:
                await endpoint.get("/x", deadline=soon())
    assert type(caught.value) is kind
    assert str(caught.value).endswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_used_are_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"teacher\.backend\.ca_certificates={path}: cannot be used"):
        tls_context("teacher.backend", str(path))


async def test_a_proxy_tunnels_tls_and_forwards_the_rest(certificate: Path) -> None:
    seen: list[str] = []
    async with (
        proxy_server(seen) as proxy,
        http_server(hello, certificate) as secure,
        http_server(hello) as plain,
    ):
        for url in (secure, plain):
            verify, through = tls_context("teacher.backend", str(certificate)), proxy_for("teacher.backend", url, proxy)
            async with HttpEndpoint("teacher", url, route=Route(verify=verify, proxy=through)) as endpoint:
                assert (await endpoint.get("/x", deadline=soon())).startswith(b"hello ")
    assert seen == [f"CONNECT {secure.removeprefix('https://')} HTTP/1.1", f"GET {plain}/x HTTP/1.1"]


async def test_a_proxys_password_goes_to_the_proxy_only_and_into_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    arrived: list[dict[str, str]] = []

    def refuse(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        arrived.append(headers)
        return 400, {}, b"user:word-of-pass is no good"

    async with proxy_server(seen) as proxy, http_server(refuse) as url:
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//user:word-of-pass@"))
        through = proxy_for("teacher.backend", "http://models.example/v1", None)
        assert through is not None
        async with HttpEndpoint("teacher", url, route=Route(proxy=through)) as endpoint:
            with pytest.raises(PermanentError) as caught:
                await endpoint.get("/x", deadline=soon())
    assert any(line.startswith("Proxy-Authorization: Basic ") for line in seen)
    assert "word-of-pass" not in str(caught.value)


async def test_a_tunnels_password_goes_to_the_proxy_and_not_through_the_tunnel(certificate: Path) -> None:
    seen: list[str] = []
    arrived: list[dict[str, str]] = []

    def answer(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        arrived.append(headers)
        return 200, {}, b"hello"

    async with proxy_server(seen) as proxy, http_server(answer, certificate) as url:
        through = proxy_for("teacher.backend", url, proxy.replace("//", "//user:p%40ss@"))
        verify = tls_context("teacher.backend", str(certificate))
        route = Route(verify=verify, proxy=through)
        for address in (url, url.replace("https:", "HTTPS:")):
            async with HttpEndpoint("teacher", address, api_key=KEY, route=route) as endpoint:
                assert await endpoint.get("/x", deadline=soon()) == b"hello"
    encoded = base64.b64encode(b"user:p@ss").decode()
    assert seen == 2 * [f"CONNECT {url.removeprefix('https://')} HTTP/1.1", f"Proxy-Authorization: Basic {encoded}"]
    assert [each["authorization"] for each in arrived] == 2 * [f"Bearer {KEY}"]
    assert not any("proxy-authorization" in each for each in arrived)


async def test_a_redirect_is_not_followed_and_names_its_place_whatever_bytes_it_is_of() -> None:
    asked: list[str] = []

    def move(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        asked.append(target)
        return 307, {"Location": "http://elsewhere\udcfc.example/"}, b""

    async with http_server(move) as url, HttpEndpoint("teacher", url) as endpoint:
        with pytest.raises(PermanentError, match=r"it redirects to http://elsewhere.\.example: if"):
            await endpoint.post("/x", b"{}", content_type="application/json", deadline=soon())
    assert asked == ["/x"]


async def test_a_proxy_that_is_not_there_is_what_the_error_names_not_the_server_behind_it() -> None:
    async with proxy_server([]) as proxy:
        through = proxy_for("teacher.backend", "http://models.example", proxy)
    async with HttpEndpoint("teacher", "http://models.example", route=Route(proxy=through)) as endpoint:
        with pytest.raises(PermanentError, match=f"nothing answers at the proxy {proxy.removeprefix('http://')}: "):
            await endpoint.get("/x", deadline=soon())


@pytest.mark.parametrize("status", [200, 403, 503])
async def test_a_proxy_that_answers_in_the_servers_place_is_named(status: int, tmp_path: Path) -> None:
    def page(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        return (
            status,
            {"Content-Type": "text/html"},
            b"<html><body>Log in to the network</body></html>",
        )

    async with http_server(page) as proxy:
        settings = AttachedSettings(kind="vllm", url="http://10.0.0.5:8000", proxy=proxy)
        model = str(Path("examples/running_sum/teacher"))
        async with RemoteServer(settings, role="teacher", model=model, run_directory=tmp_path) as server:
            with pytest.raises(RequestError, match=f"through the proxy {proxy.removeprefix('http://')}: see NO_PROXY"):
                await server.get("/models", dict, deadline=soon())


def test_the_environments_proxy_is_for_what_lies_beyond_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    chosen = proxy_for("teacher.backend", "https://api.example", None)
    assert chosen is not None
    assert str(chosen.url) == "http://proxy.example:3128"
    for url in ("http://api.example", "https://inside.example", "https://127.0.0.1:8000", "https://localhost"):
        assert proxy_for("teacher.backend", url, None) is None
    monkeypatch.setenv("no_proxy", "inside.example, 10.0.0.0/8,fd00::/8,192.168.7.9/24")
    for url in ("http://10.1.2.3:8000", "http://192.168.7.1", "http://[fd00::7]:8000", "http://inside.example"):
        assert proxy_for("teacher.backend", url.replace("http:", "https:"), None) is None
    for url in ("https://11.0.0.1", "https://192.168.8.1", "https://api.example"):
        assert proxy_for("teacher.backend", url, None) is not None
    given = proxy_for("teacher.backend", "https://localhost", "http://other.example:80")
    assert given is not None
    assert given.url.host == "other.example"
    with pytest.raises(ConfigError, match="socks5 proxies are not supported"):
        proxy_for("teacher.backend", "https://api.example", "socks5://proxy.example:1080")


async def test_compressed_replies_are_read() -> None:
    def packed(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        assert "br" not in headers["accept-encoding"]
        return 200, {"Content-Encoding": "gzip"}, body

    body = gzip.compress(b"hello" * 100)
    async with http_server(packed) as url, HttpEndpoint("teacher", url) as endpoint:
        assert await endpoint.get("/x", deadline=soon()) == b"hello" * 100
        assert endpoint.traffic.received_bytes == len(body)  # as they were on the wire


@pytest.mark.parametrize("status", [400, 401, 402, 404, 429, 500])
async def test_keys_reach_the_server_and_nothing_that_people_read(
    monkeypatch: pytest.MonkeyPatch, random_model: Callable[..., Path], capfd: Any, tmp_path: Path, status: int
) -> None:
    """A server that repeats what it was sent, as some do with a key that they refuse."""
    arrived: list[dict[str, str]] = []

    def repeat(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        arrived.append(headers)
        return status, {"Retry-After": "3600"}, f'{{"error": {{"message": "bad key {KEY} or {KEY}2"}}}}'.encode()

    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setenv("TEACHER_TEAM", KEY + "2\n")
    model = str(random_model())
    async with http_server(repeat) as url:
        tree = {
            "student": {"model": model},
            "teacher": {
                "model": model,
                "backend": {
                    "kind": "openai",
                    "url": url,
                    "served_model": "m",
                    "api_key_env": "TEACHER_KEY",
                    "secret_headers": {"X-Team": "TEACHER_TEAM"},
                },
            },
            "data": {"train": "problems.jsonl"},
            "policy": {"kind": "opd"},
            "training": {"iterations": 1, "batch_size": 1, "mini_batch_size": 1},
        }
        config = validate(tree)
        assert config.teacher is not None
        settings = config.teacher.backend
        assert isinstance(settings, OpenAIBackend.Settings)
        backend = OpenAIBackend(settings, role="teacher", model=model, run_directory=tmp_path)
        async with backend:
            with pytest.raises(Exception, match="teacher") as caught:
                await backend.capabilities(deadline=soon())
    assert arrived[0]["authorization"] == f"Bearer {KEY}"
    assert arrived[0]["x-team"] == KEY + "2"
    if status == 429:
        assert isinstance(caught.value, ThrottledError)
        assert caught.value.retry_after_s == 3600.0
    causes = [str(each) for each in (caught.value, caught.value.__cause__) if each is not None]
    printed = capfd.readouterr()
    for text in [*causes, dump_yaml(config), repr(config), repr(vars(backend)), printed.out, printed.err]:
        assert KEY not in text
    assert all("\n" not in text for text in causes)


async def test_a_user_and_a_password_go_in_a_secret_header_in_place_of_the_key_and_into_no_error(
    monkeypatch: pytest.MonkeyPatch, random_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As `WWW-Authenticate: Basic` asks for them, and docs/remote-teachers.md shows."""
    arrived: list[str] = []

    def ask(target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        arrived.append(headers.get("authorization", ""))
        return 401, {"WWW-Authenticate": "Basic"}, b"no: " + base64.b64decode(arrived[-1].partition(" ")[2])

    encoded = base64.b64encode(f"user:{KEY}".encode()).decode()
    monkeypatch.setenv("TEACHER_BASIC", f"Basic {encoded}")
    monkeypatch.setenv("TEACHER_KEY", "another")
    said: list[str] = []
    async with http_server(ask) as url:
        for more in ({}, {"secret_headers": {"authorization": "TEACHER_BASIC"}, "api_key_env": "TEACHER_KEY"}):
            settings = OpenAIBackend.Settings.model_validate({"url": url, "served_model": "m", **more})
            backend = OpenAIBackend(settings, role="teacher", model=str(random_model()), run_directory=tmp_path)
            async with backend:
                with pytest.raises(PermanentError) as caught:
                    await backend.capabilities(deadline=soon())
            said.append(str(caught.value))
    assert arrived == ["", f"Basic {encoded}"]
    assert "teacher.backend.secret_headers, as {Authorization: VARIABLE}" in said[0]
    assert (
        said[1] == "teacher/v1/models: HTTP 401: no: user:***; check the key that teacher.backend.secret_headers names"
    )
