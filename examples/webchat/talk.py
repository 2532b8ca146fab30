"""The app's one way to the model: the official client, pointed by OPENAI_BASE_URL."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence

import openai
from openai.types.chat import ChatCompletionMessageParam

from examples.webchat.store import Message


class Talk:
    def __init__(self) -> None:
        """Reads OPENAI_BASE_URL and OPENAI_API_KEY, as any app of this library does."""
        self._client = openai.AsyncOpenAI()
        self._model = os.environ.get("OPENAI_MODEL")

    async def close(self) -> None:
        await self._client.close()

    async def model(self) -> str:
        """OPENAI_MODEL, or the first the server has."""
        if self._model is None:
            self._model = (await self._client.models.list()).data[0].id
        return self._model

    async def answer(self, history: Sequence[Message]) -> AsyncGenerator[tuple[str, str]]:
        """(response id, next piece of text), as they come. Raises openai.OpenAIError."""
        stream = await self._client.chat.completions.create(
            model=await self.model(), messages=[_as_param(one) for one in history], stream=True
        )
        async with stream:
            async for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else None
                if text:
                    yield chunk.id, text

    async def send_thumbs(self, message: Message) -> None:
        """Tells the model server what the user thought of an answer; None takes it back. A server
        that takes no feedback says 404, which is as good."""
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
