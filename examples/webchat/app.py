"""A small web chat with streaming, history, several chats, stop, regenerate and thumbs.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python -m examples.webchat.app

The app works with any OpenAI-compatible server and has no code for fakevllm.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import openai
import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from examples.webchat.model_client import ModelClient
from examples.webchat.running_answers import RunningAnswer, RunningAnswers
from examples.webchat.store import Chat, Message, Store

log = logging.getLogger("webchat")

PAGE = Path(__file__).parent / "page"
REQUIRED_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
"""Required environment variables. Without OPENAI_BASE_URL, chats would be sent to OpenAI."""
EXAMPLE = "OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any"


class Question(BaseModel):
    """A message of the user."""

    text: str = Field(min_length=1, max_length=20_000)


class Thumbs(BaseModel):
    """A thumb for an answer: 1 is up, -1 is down, 0 removes the thumb."""

    thumbs: Literal[-1, 0, 1]


class ChatReply(BaseModel):
    """A chat with its visible messages."""

    id: int
    title: str
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Components:
    """The components that the routes use."""

    store: Store
    client: ModelClient
    answers: RunningAnswers


def create_app(file: Path) -> FastAPI:
    """Create the app with its SQLite database in `file`."""
    store, client = Store(file), ModelClient()
    components = Components(store, client, RunningAnswers(store, client))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        await client.close()
        store.close()

    app = FastAPI(title="web chat", lifespan=lifespan)
    # A page of another site must not read chats by pointing its own name at this machine.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    app.include_router(_chat_routes(components))
    app.include_router(_answer_routes(components))
    app.mount("/page", StaticFiles(directory=PAGE))
    app.get("/")(lambda: FileResponse(PAGE / "index.html"))
    return app


def _chat_routes(components: Components) -> APIRouter:
    router = APIRouter(prefix="/api/chats")

    @router.get("")
    async def chats() -> list[Chat]:
        return components.store.chats()

    @router.post("")
    async def new_chat() -> Chat:
        return components.store.new_chat()

    @router.get("/{chat_id}")
    async def chat(chat_id: int) -> ChatReply:
        title = _get_chat(components, chat_id).title
        return ChatReply(id=chat_id, title=title, messages=components.store.messages(chat_id))

    @router.delete("/{chat_id}")
    async def delete_chat(chat_id: int) -> None:
        components.answers.stop(chat_id)
        components.store.delete_chat(chat_id)

    return router


def _answer_routes(components: Components) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.post("/chats/{chat_id}/messages")
    async def ask(chat_id: int, question: Question) -> StreamingResponse:
        _check_idle(components, chat_id)
        components.store.add_question(chat_id, question.text)
        return _stream(components.answers.start(chat_id))

    @router.post("/chats/{chat_id}/regenerate")
    async def regenerate(chat_id: int) -> StreamingResponse:
        _check_idle(components, chat_id)
        components.store.hide_last_answer(chat_id)
        if not components.store.messages(chat_id):
            raise HTTPException(409, "there is nothing to answer in this chat")
        return _stream(components.answers.start(chat_id))

    @router.post("/chats/{chat_id}/stop")
    async def stop(chat_id: int) -> None:
        components.answers.stop(chat_id)

    @router.post("/messages/{message_id}/thumbs")
    async def thumbs(message_id: int, body: Thumbs) -> Message:
        message = components.store.message(message_id)
        if message is None or message.role != "assistant":
            raise HTTPException(404, "there is no such answer")
        components.store.set_thumbs(message, body.thumbs)
        await _send_thumbs(components.client, message)
        return message

    return router


def _get_chat(components: Components, chat_id: int) -> Chat:
    chat = components.store.chat(chat_id)
    if chat is None:
        raise HTTPException(404, "there is no such chat")
    return chat


def _check_idle(components: Components, chat_id: int) -> None:
    """Refuse a request with 409 if an answer is in progress in the chat."""
    _get_chat(components, chat_id)
    if components.answers.is_running(chat_id):
        raise HTTPException(409, "an answer is in progress in this chat: stop it first")


def _stream(answer: RunningAnswer) -> StreamingResponse:
    """Send the events of an answer to the page."""

    async def lines() -> AsyncGenerator[str]:
        async with aclosing(answer.events()) as events:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n"

    return ClosingStream(lines())


class ClosingStream(StreamingResponse):
    """A response that closes its generator as soon as the browser disconnects."""

    def __init__(self, content: AsyncGenerator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._content):
            await super().__call__(scope, receive, send)


async def _send_thumbs(client: ModelClient, message: Message) -> None:
    """Send a thumb to the model server. An error is only logged, because the app has already stored
    the thumb."""
    if message.response_id is None:
        return
    try:
        await client.send_thumbs(message)
    except openai.OpenAIError as error:
        log.warning("The model server did not accept feedback: %s", error)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small web chat.")
    parser.add_argument("--port", type=int, default=3000)
    parser.add_argument("--file", type=Path, default=Path("webchat.sqlite"))
    arguments = parser.parse_args()
    if missing := [name for name in REQUIRED_VARIABLES if not os.environ.get(name)]:
        parser.exit(2, f"Set {' and '.join(missing)}: {EXAMPLE} python -m examples.webchat.app\n")
    print(f"web chat: http://127.0.0.1:{arguments.port}")
    app = create_app(arguments.file)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
