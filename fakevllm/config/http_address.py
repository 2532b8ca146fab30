"""Checks and forms http addresses, without pydantic, so that small commands start quickly."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from fakevllm_adapters.http.http_url import http_url

WILDCARD_HOSTS = ("0.0.0.0", "::")
_LOOPBACK_OF: dict[str, str] = dict(zip(WILDCARD_HOSTS, ("127.0.0.1", "::1"), strict=True))
_HOST_NAME = re.compile(r"[\w.\-]+", re.ASCII)


def checked_http_url(text: str) -> str:
    """Return `text` if it is an http or https address. Raises ValueError for any other text. Raises
    ValueError as well for an address with a user name or password, because addresses are logged."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        has_key = is_good and "@" in parts.netloc
    except ValueError:
        is_good = has_key = False
    if has_key:
        raise ValueError(
            "write it as http://HOST:PORT, and the key by its own flag: addresses are logged"
        )
    if not is_good:
        raise ValueError("write it as http://HOST:PORT")
    return text


def is_host_name(text: str) -> bool:
    """Return True if a text is the name or the IP address of a host, without a port.

    >>> is_host_name("gpu-box"), is_host_name("::1"), is_host_name("gpu-box:8010")
    (True, True, False)
    """
    try:
        ip_address(text)
    except ValueError:  # translates: not an address, so it must be a name
        return _HOST_NAME.fullmatch(text) is not None
    return True


def local_url(host: str, port: int) -> str:
    """Return the URL with which this machine reaches a server that listens on `host` and `port`.

    >>> local_url("0.0.0.0", 8000), local_url("::1", 8000)
    ('http://127.0.0.1:8000', 'http://[::1]:8000')
    """
    return http_url(_LOOPBACK_OF.get(host, host), port)
