"""What an agent needs to reach the model it is trained with."""

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
    """Base URL and key of one episode: any OpenAI client will do."""

    base_url: str
    """Ends in /v1."""
    api_key: str
    episode_uuid: str
    model: str = "reserved_field"
    """The server serves one model, whatever a request calls it."""

    def openai(self) -> OpenAI:
        """To be closed, or used in a `with`; one that is just let go closes its sockets too."""
        from openai import OpenAI

        http = _http_client()(verify=trusted())
        return OpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    def async_openai(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(verify=trusted())
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    as_raw_openai_sdk_client = async_openai
    """AgentJet's name for it."""


@functools.cache
def _http_client() -> Any:
    """With openai's own defaults; a class is made when one is first asked for."""
    from openai import DefaultHttpxClient

    class LetGo(DefaultHttpxClient):
        def __del__(self) -> None:
            if not self.is_closed:
                self.close()

    return LetGo


@functools.cache
def trusted() -> ssl.SSLContext:
    """Read once: the certificates are most of what an HTTP client costs, 20 ms of CPU."""
    return httpx.create_ssl_context()
