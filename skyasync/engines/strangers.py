"""Requests that a browser sends to a server of ours for somebody else's page.

Pure. A page can ask every server that its browser can reach, the loopback's too: it says so in ``Origin``. Where its
own server's name leads to the loopback from one moment to the next, it names that in ``Host``.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def stranger(host: str, origin: str | None, *, loopback: bool) -> str:
    """Why a request with these headers is refused; empty if it is not.

    Args:
        loopback: the server is asked there: then nobody has reason to give it another name.
    """
    if loopback and not names_the_loopback(host):
        return f"the Host header is {host!r:.100}: this server is asked at 127.0.0.1 or localhost"
    if origin is not None and _address(origin) != host:
        return f"the Origin header is {origin!r:.100}: pages of others may not ask this server"
    return ""


def _address(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # half an IPv6 address
        return None


def names_the_loopback(host: str) -> bool:
    """Whether a Host header has an address of the loopback, or localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or is_loopback(name)
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Raises ``ValueError`` for what is no address."""
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
