"""`[upstream]` and `[fallback]` in fakevllm.toml: what happens while the model is not there."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fakevllm.config.base import Section


def http_url(text: str) -> str:
    """The same text. Raises ValueError for what is no http address, or has a password in it:
    addresses are logged."""
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


def server_url(text: str) -> str:
    """The same text. Raises ValueError as `http_url`, and for an app's base URL with its path."""
    if urlsplit(http_url(text)).path not in ("", "/"):
        raise ValueError("write it as http://HOST:PORT, without a path: /v1 is for apps")
    return text


class UpstreamSection(Section):
    hold_s: float = Field(default=25.0, ge=0, le=3600, allow_inf_nan=False)
    """How long a request waits for a server that is away or not up yet."""


class FallbackSection(Section):
    """Another OpenAI-compatible server, for when ours is not there."""

    url: Annotated[str, AfterValidator(http_url)] | None = None
    """With or without `/v1`."""
    key: str | None = Field(default=None, repr=False)
    model: str | None = Field(default=None, min_length=1)
    """What it is asked for; by default what the app asks for."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.url is None and self.model is not None:  # a key may be of the environment
            raise ValueError("there is a model and no server: write its url too")
        return self
