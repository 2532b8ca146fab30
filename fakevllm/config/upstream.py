"""The sections `[upstream]` and `[fallback]` of fakevllm.toml, which determine what happens to
requests while the engine is unavailable. The module also validates server addresses."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fakevllm.config.base import Section


def checked_http_url(text: str) -> str:
    """Return `text` if it is an http or https address. Raises ValueError for any other text, and
    for an address with a user name or password, because addresses are logged."""
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


def checked_server_url(text: str) -> str:
    """Return `text` if it can be the address of a swarm server (the server that samples and trains
    the model).

    Raises ValueError if `text` is not an http or https address, or if it has a user name, a
    password or a path. A path is refused because users often enter the base URL for apps, which
    ends in /v1.
    """
    if urlsplit(checked_http_url(text)).path not in ("", "/"):
        raise ValueError("write it as http://HOST:PORT, without a path: /v1 is for apps")
    return text


class UpstreamSection(Section):
    """The section `[upstream]`: how long a request waits for an engine that is unavailable."""

    hold_s: float = Field(default=25.0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds a request waits if the server is unavailable, or if the server's engine is not ready.
    """


class FallbackSection(Section):
    """The section `[fallback]`: another OpenAI-compatible server, which answers requests while the
    engine is unavailable."""

    url: Annotated[str, AfterValidator(checked_http_url)] | None = None
    """URL of the fallback server, with or without `/v1`."""
    key: str | None = Field(default=None, repr=False)
    """API key for the fallback server."""
    model: str | None = Field(default=None, min_length=1)
    """Model to request from the fallback server; None means the model that the app requests."""

    @model_validator(mode="after")
    def _check_that_a_model_has_a_server(self) -> Self:
        # A key without a server is no mistake: it may come from the environment.
        if self.url is None and self.model is not None:
            raise ValueError("model is set without a server: write its url too")
        return self
