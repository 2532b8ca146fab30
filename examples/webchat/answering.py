"""Answers on their way: they come from the model, go to the page, and are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai

from examples.webchat.store import Store
from examples.webchat.talk import Talk

log = logging.getLogger("webchat")

Event = dict[str, Any]


class Answers:
    """At most one on its way in a chat."""

    def __init__(self, store: Store, talk: Talk) -> None:
        self._store = store
        self._talk = talk
        self._running: dict[int, Answering] = {}

    def is_running(self, chat_id: int) -> bool:
        return chat_id in self._running

    def start(self, chat_id: int) -> Answering:
        answering = self._running[chat_id] = Answering(self._store, self._talk, chat_id)
        answering.when_done(lambda: self._running.pop(chat_id))
        return answering

    def stop(self, chat_id: int) -> None:
        if (answering := self._running.get(chat_id)) is not None:
            answering.stop()


class Answering:
    """Ends when the model has said all, when the user stops it, or when the page is gone; what has
    come until then is kept."""

    def __init__(self, store: Store, talk: Talk, chat_id: int) -> None:
        self._store = store
        self._talk = talk
        self._chat_id = chat_id
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._receive())

    def stop(self) -> None:
        self._task.cancel()

    def when_done(self, then: Callable[[], object]) -> None:
        self._task.add_done_callback(lambda _: then())

    async def events(self) -> AsyncGenerator[Event]:
        """Pieces of text, then the whole message or what went wrong."""
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
            async for name, text in self._talk.answer(history):
                response_id = name
                parts.append(text)
                self._events.put_nowait({"type": "piece", "text": text})
        except openai.OpenAIError as error:
            log.warning("no answer: %s", error)
            self._events.put_nowait({"type": "error", "text": _told(error)})
        finally:
            is_wanted = self._store.chat(self._chat_id) is not None  # or deleted meanwhile
            if parts and is_wanted:
                message = self._store.answer(self._chat_id, "".join(parts), response_id)
                self._events.put_nowait({"type": "done", "message": message.model_dump()})
            self._events.put_nowait(None)


def _told(error: openai.OpenAIError) -> str:
    if isinstance(error, openai.APIConnectionError):
        return "The model cannot be reached. Try again in a moment."
    return f"The model gave no answer: {error}"
