"""Names of this very machine, as settings and requests write them. A name that only resolves to it is not one: whoever
owns the name can let it mean this machine, and so let a web page of theirs ask what listens here (DNS rebinding).
"""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether a host can mean nothing but this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(authority: str) -> str:
    """The host of a `Host` header: of `localhost:8000`, `[::1]:8000` or either without the port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
