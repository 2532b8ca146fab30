"""A small web chat: streaming, history, several chats, stop, regenerate, thumbs.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python -m examples.webchat.app

It knows nothing of fakevllm: any OpenAI-compatible server will do.
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

from examples.webchat.answering import Answering, Answers
from examples.webchat.store import Chat, Message, Store
from examples.webchat.talk import Talk

log = logging.getLogger("webchat")

PAGE = Path(__file__).parent / "page"
NEEDED = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
"""Without the first, chats would go to OpenAI."""
EXAMPLE = "OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any"


class Question(BaseModel):
    text: str = Field(min_length=1, max_length=20_000)


class Thumbs(BaseModel):
    thumbs: Literal[-1, 0, 1]


class WholeChat(BaseModel):
    id: int
    title: str
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Parts:
    store: Store
    talk: Talk
    answers: Answers


def create_app(file: Path) -> FastAPI:
    """`file`: the SQLite database."""
    store, talk = Store(file), Talk()
    parts = Parts(store, talk, Answers(store, talk))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        await talk.close()
        store.close()

    app = FastAPI(title="web chat", lifespan=lifespan)
    # A page from elsewhere must not read chats by pointing its own name at this machine.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    app.include_router(_chats(parts))
    app.include_router(_answers(parts))
    app.mount("/page", StaticFiles(directory=PAGE))
    app.get("/")(lambda: FileResponse(PAGE / "index.html"))
    return app


def _chats(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/api/chats")

    @router.get("")
    async def chats() -> list[Chat]:
        return parts.store.chats()

    @router.post("")
    async def new_chat() -> Chat:
        return parts.store.new_chat()

    @router.get("/{chat_id}")
    async def chat(chat_id: int) -> WholeChat:
        title = _known(parts, chat_id).title
        return WholeChat(id=chat_id, title=title, messages=parts.store.messages(chat_id))

    @router.delete("/{chat_id}")
    async def delete_chat(chat_id: int) -> None:
        parts.answers.stop(chat_id)
        parts.store.delete_chat(chat_id)

    return router


def _answers(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.post("/chats/{chat_id}/messages")
    async def ask(chat_id: int, question: Question) -> StreamingResponse:
        _free(parts, chat_id)
        parts.store.ask(chat_id, question.text)
        return _streamed(parts.answers.start(chat_id))

    @router.post("/chats/{chat_id}/regenerate")
    async def regenerate(chat_id: int) -> StreamingResponse:
        _free(parts, chat_id)
        parts.store.take_back_answer(chat_id)
        if not parts.store.messages(chat_id):
            raise HTTPException(409, "there is nothing to answer in this chat")
        return _streamed(parts.answers.start(chat_id))

    @router.post("/chats/{chat_id}/stop")
    async def stop(chat_id: int) -> None:
        parts.answers.stop(chat_id)

    @router.post("/messages/{message_id}/thumbs")
    async def thumbs(message_id: int, said: Thumbs) -> Message:
        message = parts.store.message(message_id)
        if message is None or message.role != "assistant":
            raise HTTPException(404, "there is no such answer")
        parts.store.set_thumbs(message, said.thumbs)
        await _pass_on(parts.talk, message)
        return message

    return router


def _known(parts: Parts, chat_id: int) -> Chat:
    found = parts.store.chat(chat_id)
    if found is None:
        raise HTTPException(404, "there is no such chat")
    return found


def _free(parts: Parts, chat_id: int) -> None:
    _known(parts, chat_id)
    if parts.answers.is_running(chat_id):
        raise HTTPException(409, "an answer is on its way in this chat: stop it first")


def _streamed(answering: Answering) -> StreamingResponse:
    async def lines() -> AsyncGenerator[str]:
        async with aclosing(answering.events()) as events:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n"

    return ClosedStream(lines())


class ClosedStream(StreamingResponse):
    """Ends what it sends from when the browser has left, and not some time later."""

    def __init__(self, content: AsyncGenerator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._content):
            await super().__call__(scope, receive, send)


async def _pass_on(talk: Talk, message: Message) -> None:
    if message.response_id is None:
        return
    try:
        await talk.send_thumbs(message)
    except openai.OpenAIError as error:
        log.warning("feedback was not taken: %s", error)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small web chat.")
    parser.add_argument("--port", type=int, default=3000)
    parser.add_argument("--file", type=Path, default=Path("webchat.sqlite"))
    arguments = parser.parse_args()
    if missing := [name for name in NEEDED if not os.environ.get(name)]:
        parser.exit(2, f"Set {' and '.join(missing)}: {EXAMPLE} python -m examples.webchat.app\n")
    print(f"web chat: http://127.0.0.1:{arguments.port}")
    app = create_app(arguments.file)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
