"""The check of an http address, without pydantic, so that small commands start quickly."""

from __future__ import annotations

from urllib.parse import urlsplit


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
