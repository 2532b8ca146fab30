"""The base URL and API key by which an agent reaches the model of its episode."""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True, slots=True)
class EpisodeAccess:
    """Base URL and API key of one episode, for any OpenAI client."""

    base_url: str
    """URL that ends in /v1."""
    api_key: str
    episode_uuid: str
    model: str = "reserved_field"
    """A placeholder: the server serves one model, and ignores the name in a request."""

    def openai(self) -> OpenAI:
        """Return an OpenAI client. Close it or use it in a `with`; a client that is just dropped
        closes its sockets as well."""
        from openai import OpenAI

        http = _self_closing_client()(verify=ssl_context())
        return OpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    def async_openai(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(verify=ssl_context())
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    as_raw_openai_sdk_client = async_openai
    """AgentJet's name for `async_openai`."""


@functools.cache
def _self_closing_client() -> Any:
    """Return openai's default HTTP client class, extended to close itself when it is dropped.

    The class is created on first use, because importing openai takes time.
    """
    from openai import DefaultHttpxClient

    class SelfClosingClient(DefaultHttpxClient):
        def __del__(self) -> None:
            if not self.is_closed:
                self.close()

    return SelfClosingClient


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """Return the shared TLS context. Reading its certificates takes 20 ms of CPU time, most of the
    cost of creating an HTTP client."""
    return httpx.create_ssl_context()
