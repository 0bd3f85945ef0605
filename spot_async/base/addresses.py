"""Tells whether a host name can only mean this machine, and which of its own addresses and devices leads to another.

A name that merely resolves to this machine does not count. Its owner can point it here at any time, and then their web
page can ask whatever listens here (DNS rebinding).
"""

from __future__ import annotations

import array
import fcntl
import functools
import ipaddress
import os
import socket
import struct
import sys

LOOPBACK = "127.0.0.1"
_SIOCGIFCONF = 0x8912  # Linux: all IPv4 addresses of this machine's interfaces
_INTERFACES_BYTES = 40 * 256  # of the answer: an interface takes 40
_full_name = functools.cache(socket.getfqdn)  # a name server may be asked for it, and may take seconds to answer


def is_loopback(host: str) -> bool:
    """Return whether a host can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_no_page(host: str) -> bool:
    """Return whether no web page can have this host by pointing its own name to this machine."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return host.lower() in {"localhost", socket.gethostname().lower()} or host.lower() == _full_name().lower()


def host_of(authority: str) -> str:
    """Return the host of a `Host` header such as `localhost:8000` or `[::1]:8000`, with or without the port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def own_address_towards(host: str) -> str:
    """Return this machine's address on the way to a host. Nothing is sent. Raises OSError where there is no way."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def group_interfaces(address: str) -> dict[str, str]:
    """Return the variables by which ranks of a process group that meet at an address of ours use its interface alone.

    gloo would take the address of this machine's name, which is often loopback. NCCL looks for fast networks itself,
    unless ranks meet on loopback: then nothing of theirs is on the network.
    """
    if is_loopback(address):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}


def interface_of(address: str) -> str | None:
    """Return the network interface that has one of this machine's IPv4 addresses; None where that cannot be found."""
    if sys.platform != "linux" or ":" in address:
        return None
    found = array.array("B", bytes(_INTERFACES_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(found), found.buffer_info()[0])
        size, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    for start in range(0, size, 40):
        entry = found[start : start + 40].tobytes()
        if socket.inet_ntoa(entry[20:24]) == address:
            return entry[:16].split(b"\0")[0].decode()
    return None
