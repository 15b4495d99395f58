"""How this machine meets the others of a job: the address that they reach it by, and the network interface of that address."""

from __future__ import annotations

import ipaddress
import socket
import sys
from typing import NamedTuple

# Addresses of nobody, kept for documentation: the kernel tells which interface leads to the rest of the world.
_ELSEWHERE = ("203.0.113.1", "2001:db8::1")


class Route(NamedTuple):
    """The way from this machine to the main one.

    Attributes:
        address: of this machine, on that way.
        interface: the name of the network interface with that address; None if it is not known.
        home: whether the main machine is this one.
    """

    address: str
    interface: str | None
    home: bool


def route_to(host: str) -> Route | None:
    """The way to `host`; None if there is none, or if the name has no address here (yet). Sends nothing but name queries."""
    for address in _addresses(host):
        own = _own_address(address)
        if own is None:
            continue
        home = own == address or _is_loopback(address)
        if _is_loopback(address) and host not in ("localhost", address):
            # many a Linux gives the own name a loopback address, by which no other machine can reach this one
            own = next(filter(None, map(_own_address, _ELSEWHERE)), own)
        return Route(own, _interface(own), home)
    return None


def why_unreachable(host: str, port: int, timeout: float = 5.0) -> str | None:
    """What is in the way of a connection to `host`; None if it can be made."""
    try:
        socket.create_connection((host, port), timeout).close()
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [str(place[0]) for *_, place in found]


def _own_address(address: str) -> str | None:
    """Our own address on the way to another one."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet is sent: this asks the kernel alone
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interface(address: str) -> str | None:
    if sys.platform == "win32":  # its names are not those that gloo wants
        return None
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return None
