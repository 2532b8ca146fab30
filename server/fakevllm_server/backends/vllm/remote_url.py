"""The address of a vLLM that somebody else runs. Pure."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from fakevllm_server.types.backend import BackendRefused

SCHEMES = ("http", "https")
PATHS = ("", "/", "/v1", "/v1/")


def base_of(url: str) -> str:
    """Raises BackendRefused, which repeats nothing of the URL: it may hold a password.

    >>> base_of("http://gpu-box:8000/v1/")
    'http://gpu-box:8000'
    """
    reason = "it cannot be read"
    try:
        parts = urlsplit(url)
        reason = _wrong_in(parts)
    except ValueError:
        parts = None
    if parts is None or reason is not None:
        raise BackendRefused(
            f"--rollout-url is not the URL of a vLLM ({reason}): give --rollout-url "
            "http://HOST:PORT"
        )
    return f"{parts.scheme}://{parts.netloc}"


def peer_of(url: str) -> str:
    """
    >>> peer_of("http://gpu-box:8000")
    'gpu-box:8000'
    """
    return urlsplit(base_of(url)).netloc


def _wrong_in(parts: SplitResult) -> str | None:
    """Raises ValueError for a port that is none."""
    if parts.scheme not in SCHEMES:
        return "it does not begin with http:// or https://"
    if "@" in parts.netloc:
        return "it holds a user or password: give a key with --rollout-key-file FILE"
    if not parts.hostname or any(char.isspace() for char in parts.netloc):
        return "it names no host"
    if parts.port == 0 or parts.netloc.endswith(":"):
        return "it names no port"
    if parts.path not in PATHS:
        return "it has a path other than /v1"
    if parts.query or parts.fragment:
        return "it has a query or fragment"
    return None
