"""The sections `[upstream]` and `[fallback]` of fakevllm.toml. These sections say what happens to
requests while the engine is unavailable. The module also validates the address of the swarm server,
which samples and trains the model."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fakevllm.config.base import Section
from fakevllm.config.http_address import checked_http_url


def checked_server_url(text: str) -> str:
    """Return `text` if it is a possible address of a swarm server. A swarm server samples and
    trains the model.

    Raises ValueError if `text` is not an http or https address. Raises ValueError as well if the
    address has a user name, a password or a path. A path is refused because users often enter the
    base URL for apps, which ends in /v1.
    """
    if urlsplit(checked_http_url(text)).path not in ("", "/"):
        raise ValueError("write it as http://HOST:PORT, without a path: /v1 is for apps")
    return text


class UpstreamSection(Section):
    """The section `[upstream]`: how long a request waits for an engine that is unavailable."""

    hold_s: float = Field(default=25.0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds a request waits if the server is unavailable, or if the server's engine is not ready.
    0 means that the request does not wait."""


class FallbackSection(Section):
    """The section `[fallback]`: another OpenAI-compatible server, which answers requests while the
    engine is unavailable."""

    url: Annotated[str, AfterValidator(checked_http_url)] | None = None
    """URL of the fallback server, with or without `/v1`. This server answers the requests that have
    waited for `upstream.hold_s`."""
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
