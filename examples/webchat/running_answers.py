"""Answers in progress: received from the model, sent to the page, and written to the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai

from examples.webchat.model_client import ModelClient
from examples.webchat.store import Store

log = logging.getLogger("webchat")

Event = dict[str, Any]


class RunningAnswers:
    """The answers in progress, at most one per chat."""

    def __init__(self, store: Store, client: ModelClient) -> None:
        self._store = store
        self._client = client
        self._by_chat: dict[int, RunningAnswer] = {}

    def is_running(self, chat_id: int) -> bool:
        return chat_id in self._by_chat

    def start(self, chat_id: int) -> RunningAnswer:
        answer = self._by_chat[chat_id] = RunningAnswer(self._store, self._client, chat_id)
        answer.when_done(lambda: self._by_chat.pop(chat_id))
        return answer

    def stop(self, chat_id: int) -> None:
        """Stop the chat's answer, if one is in progress."""
        if (answer := self._by_chat.get(chat_id)) is not None:
            answer.stop()


class RunningAnswer:
    """One answer in progress.

    The answer ends when it is complete, when the user stops it, or when the page disconnects. The
    text received until then is stored.
    """

    def __init__(self, store: Store, client: ModelClient, chat_id: int) -> None:
        self._store = store
        self._client = client
        self._chat_id = chat_id
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._receive())

    def stop(self) -> None:
        self._task.cancel()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the answer has ended."""
        self._task.add_done_callback(lambda _: callback())

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the events for the page: pieces of text, then the stored message or an error."""
        try:
            while (event := await self._events.get()) is not None:
                yield event
        finally:
            self.stop()

    async def _receive(self) -> None:
        parts: list[str] = []
        response_id: str | None = None
        try:
            history = self._store.messages(self._chat_id)
            async for chunk_id, text in self._client.stream_answer(history):
                response_id = chunk_id
                parts.append(text)
                self._events.put_nowait({"type": "piece", "text": text})
        except openai.OpenAIError as error:
            log.warning("The model did not answer: %s", error)
            self._events.put_nowait({"type": "error", "text": _error_text(error)})
        finally:
            is_deleted = self._store.chat(self._chat_id) is None
            if parts and not is_deleted:
                message = self._store.add_answer(self._chat_id, "".join(parts), response_id)
                self._events.put_nowait({"type": "done", "message": message.model_dump()})
            self._events.put_nowait(None)


def _error_text(error: openai.OpenAIError) -> str:
    """Return the error message for the user."""
    if isinstance(error, openai.APIConnectionError):
        return "The model cannot be reached. Try again in a moment."
    return f"The model did not answer: {error}"
