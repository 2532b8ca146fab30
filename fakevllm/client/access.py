"""What an agent needs to reach the model it is trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        from openai import OpenAI

        return OpenAI(base_url=self.base_url, api_key=self.api_key)

    def async_openai(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)

    as_raw_openai_sdk_client = async_openai
    """AgentJet's name for it."""
