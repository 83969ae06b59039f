"""Addresses that servers listen on: who can reach them, and whether they are free."""

from __future__ import annotations

import ipaddress
import socket

from ..errors import TokenMergeError


def addresses_of(host: str) -> set[str]:
    """All addresses of a host, given by name or address. Raises `OSError` if the host is unknown."""
    return {str(each[4][0]) for each in socket.getaddrinfo(host, None)}


def is_private(host: str) -> bool:
    """Whether only this machine can reach a host. Raises `OSError` if the host is unknown."""
    return all(map(is_loopback, addresses_of(host)))


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address. 127.0.0.1 may be written as an IPv6 address."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def check_port(host: str, port: int) -> None:
    """Refuse an address that is not free, before a model is loaded or Ray tries for a minute."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        # Python appends the address to the reason.
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise TokenMergeError(f"{host}:{port} is not available ({reason}); give another --port or --host") from error
