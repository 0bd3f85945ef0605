"""Decides how a remote server is reached: proxies, certificates and secrets, from settings or the environment.

As with httpx, the environment counts where settings are not given. `http.py` makes the connections.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import ssl
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, TypeAlias

import httpx
from pydantic import AfterValidator

from spot_async.base.addresses import is_loopback
from spot_async.base.secrets import SECRETS
from spot_async.errors import ConfigError

from .failures import Access

PROXY_SCHEMES = ("http", "https")
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie"})


def tls_context(section: str, ca_certificates: str | None) -> ssl.SSLContext:
    """Return the certificates to trust: as given, else from SSL_CERT_FILE or SSL_CERT_DIR, else the usual ones."""
    if ca_certificates is None:
        return httpx.create_ssl_context()
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(ca_certificates)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or "it holds no certificate in PEM form"
        raise ConfigError(f"{section}.ca_certificates={ca_certificates}: cannot be used: {reason}") from None
    return context


def proxy_for(section: str, url: str, proxy: str | None) -> httpx.Proxy | None:
    """Return the proxy: as given, else from HTTPS_PROXY, HTTP_PROXY or ALL_PROXY unless NO_PROXY names the address.

    The environment's proxy is never used for this machine's own addresses.
    """
    target = httpx.URL(url)
    if proxy is None:
        if is_loopback(target.host) or urllib.request.proxy_bypass(target.host) or _is_in_no_proxy(target.host):
            return None
        named = urllib.request.getproxies()
        proxy = named.get(target.scheme) or named.get("all")
        if proxy is None:
            return None
    address = httpx.URL(proxy if "://" in proxy else f"http://{proxy}")
    if address.scheme not in PROXY_SCHEMES:
        raise ConfigError(f"{section}.proxy: {address.scheme} proxies are not supported; give an http or https one")
    return httpx.Proxy(address)


def _is_in_no_proxy(host: str) -> bool:
    """Whether a host is an address in one of NO_PROXY's networks, such as 10.0.0.0/8, which urllib does not know."""
    for entry in urllib.request.getproxies().get("no", "").split(","):
        with contextlib.suppress(ValueError):  # the host or the entry is a name
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip(), strict=False):
                return True
    return False


def check_url(url: str) -> str:
    """Check a server's address from the settings. Raises ValueError, also for a password."""
    _refuse_password(url)
    if not _is_address(url):
        raise ValueError("is no address of a server: give http://host:port or https://host:port")
    return url


def without_version(url: str) -> str:
    """Return a server's address without an API version behind it. People often give it with `/v1`."""
    bare = url.rstrip("/")
    return bare.removesuffix("/v1") if bare.endswith("/v1") else url


Address: TypeAlias = Annotated[str, AfterValidator(check_url)]
Url: TypeAlias = Annotated[Address, AfterValidator(without_version)]


def check_different(urls: Sequence[str]) -> None:
    """Check that the settings' addresses are different servers, however they are written. Raises ValueError."""
    addresses: set[str] = set()
    for url in urls:
        if address_of(url) in addresses:
            raise ValueError(f"{url} is given twice: name each server once")
        addresses.add(address_of(url))


def check_proxy(proxy: str | None) -> str | None:
    """Check a proxy's address from the settings, with or without a scheme. Raises ValueError, also for a password."""
    if proxy is None:
        return None
    url = proxy if "://" in proxy else f"http://{proxy}"
    _refuse_password(url)
    if not _is_address(url, schemes=None):  # `proxy_for` refuses schemes that are not supported
        raise ValueError("is no address of a proxy: give http://host:port")
    return proxy


def _refuse_password(url: str) -> None:
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "holds a password, which would be saved with the run: use api_key_env or secret_headers for a server, the "
            "environment variable HTTPS_PROXY for a proxy"
        )


def _is_address(url: str, schemes: Collection[str] | None = ("http", "https")) -> bool:
    """Return whether this names a host, and a possible port if it names one."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    is_known = schemes is None or parsed.scheme in schemes
    is_plain = not any(character.isspace() for character in url)
    return is_known and is_plain and bool(parsed.host) and (parsed.port is None or 0 < parsed.port < 65536)


def address_of(url: str) -> str:
    """Return host, port and path in one form, which is equal for different spellings of an address."""
    target = httpx.URL(url)
    host = "127.0.0.1" if target.host == "localhost" else target.host
    port = target.port or {"http": 80, "https": 443}.get(target.scheme)
    return f"{host}:{port}{target.path.rstrip('/')}"


def read_secret(section: str, variable: str) -> str:
    """Return the secret that an environment variable holds. Raises `ConfigError` as `read_variable`."""
    value = read_variable(section, variable)
    SECRETS.learn(value, variable)
    return value


def read_variable(section: str, variable: str) -> str:
    """Return an environment variable's value. Raises `ConfigError` if it is not set or no header can carry it."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(f"{section}: the environment variable {variable} is not set")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{section}: the environment variable {variable} holds what no header can carry")
    return value


def secret_parts(value: str) -> list[str]:
    """Return a secret header's value, and its secret parts: what follows a scheme, and the password of Basic."""
    scheme, _, rest = value.partition(" ")
    if not rest:
        return [value]
    try:
        password = base64.b64decode(rest, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except ValueError:
        password = b""
    return [value, rest, *([password.decode(errors="replace")] if password else [])]


def access(section: str, url: str, api_key_env: str | None, secret_headers: Mapping[str, str]) -> Access:
    """Return what advice in errors is based on. A secret Authorization header replaces the key."""
    is_replaced = "authorization" in map(str.lower, secret_headers)
    given = [
        *(["api_key_env"] if api_key_env is not None and not is_replaced else []),
        *(["secret_headers"] if secret_headers else []),
    ]
    return Access(section, "https" if httpx.URL(url).scheme == "https" else "http", given)


def check_headers(headers: dict[str, str]) -> dict[str, str]:
    """Check that the settings' headers may be saved with the run. Raises ValueError for secret ones."""
    for name in headers:
        if name.lower() in SECRET_HEADERS:
            raise ValueError(
                f"{name} is a secret, which would be saved with the run: name an environment variable in secret_headers"
            )
    return headers
