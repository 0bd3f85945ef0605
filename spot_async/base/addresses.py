"""Tells whether a host name can only mean this machine.

A name that merely resolves to this machine does not count. Its owner can point it here at any time, and then their web
page can ask whatever listens here (DNS rebinding).
"""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a host can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(authority: str) -> str:
    """Return the host of a `Host` header such as `localhost:8000` or `[::1]:8000`, with or without the port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
