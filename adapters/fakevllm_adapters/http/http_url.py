"""The URL of a host and a port."""

from __future__ import annotations


def http_url(host: str, port: int) -> str:
    """Return the URL for a host and a port. The host may be an IPv6 address.

    >>> http_url("::", 8000), http_url("0.0.0.0", 8000)
    ('http://[::]:8000', 'http://0.0.0.0:8000')
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
