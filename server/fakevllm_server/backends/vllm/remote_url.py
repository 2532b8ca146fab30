"""Validate the flag `--rollout-url`. The flag contains the URL of a vLLM that the server did not
start."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from fakevllm_server.types.backend import BackendRefused

SCHEMES = ("http", "https")
PATHS = ("", "/", "/v1", "/v1/")


def base_url(url: str) -> str:
    """Check the URL of a vLLM server. Return the URL without its path.

    Raise BackendRefused if the URL cannot be the URL of a vLLM server. The error message does not
    contain the URL, because the URL may contain a password.

    >>> base_url("http://gpu-box:8000/v1/")
    'http://gpu-box:8000'
    """
    reason = "it cannot be read"
    try:
        parts = urlsplit(url)
        reason = _problem(parts)
    except ValueError:
        parts = None
    if parts is None or reason is not None:
        raise BackendRefused(
            f"--rollout-url is not the URL of a vLLM ({reason}): set --rollout-url http://HOST:PORT"
        )
    return f"{parts.scheme}://{parts.netloc}"


def host_and_port(url: str) -> str:
    """Return the host in the URL of a vLLM server, with the port if the URL has a port. Raise
    BackendRefused if the URL cannot be the URL of a vLLM server.

    >>> host_and_port("http://gpu-box:8000")
    'gpu-box:8000'
    """
    return urlsplit(base_url(url)).netloc


def _problem(parts: SplitResult) -> str | None:
    """Return the reason why a URL cannot be the URL of a vLLM server. Return None if there is no
    such reason. Raise ValueError for an invalid port."""
    if parts.scheme not in SCHEMES:
        return "it does not begin with http:// or https://"
    if "@" in parts.netloc:
        return "it contains a user or password: give a key with --rollout-key-file FILE"
    if not parts.hostname or any(char.isspace() for char in parts.netloc):
        return "it has no host"
    if parts.port == 0 or parts.netloc.endswith(":"):
        return "it has no port"
    if parts.path not in PATHS:
        return "it has a path other than /v1"
    if parts.query or parts.fragment:
        return "it has a query or fragment"
    return None
