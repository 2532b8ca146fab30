"""Calls to the model server with the official client, configured by OPENAI_BASE_URL."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence

import openai
from openai.types.chat import ChatCompletionMessageParam

from examples.webchat.store import Message


class ModelClient:
    """The app's client of the model server."""

    def __init__(self) -> None:
        """Create the client; the openai package reads OPENAI_BASE_URL and OPENAI_API_KEY."""
        self._client = openai.AsyncOpenAI()
        self._model = os.environ.get("OPENAI_MODEL")

    async def close(self) -> None:
        await self._client.close()

    async def model(self) -> str:
        """Return OPENAI_MODEL, or the first model that the server lists."""
        if self._model is None:
            self._model = (await self._client.models.list()).data[0].id
        return self._model

    async def stream_answer(self, history: Sequence[Message]) -> AsyncGenerator[tuple[str, str]]:
        """Yield pairs of response id and piece of text. Raises openai.OpenAIError."""
        stream = await self._client.chat.completions.create(
            model=await self.model(), messages=[_as_param(one) for one in history], stream=True
        )
        async with stream:
            async for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text:
                    yield chunk.id, text

    async def send_thumbs(self, message: Message) -> None:
        """Send the user's thumb for an answer to the model server; 0 withdraws an earlier thumb.

        A 404 is ignored, because not every server has a route for feedback.
        """
        thumbs = {1: "up", 0: None, -1: "down"}[message.thumbs]
        body = {"id": message.response_id, "thumbs": thumbs}
        try:
            await self._client.post("/feedback", cast_to=object, body=body)
        except openai.NotFoundError:
            return


def _as_param(message: Message) -> ChatCompletionMessageParam:
    if message.role == "user":
        return {"role": "user", "content": message.text}
    return {"role": "assistant", "content": message.text}
