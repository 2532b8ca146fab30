"""Chats and their messages, in SQLite."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlmodel import Field, Session, SQLModel, col, create_engine, select

MAX_TITLE = 60
"""Characters of the first question that stand for the chat in the list."""


def _now() -> datetime:
    return datetime.now(UTC)


class Chat(SQLModel, table=True):
    id: int | None = Field(default=None, primary_key=True)
    title: str = "New chat"
    created: datetime = Field(default_factory=_now)


class Message(SQLModel, table=True):
    id: int | None = Field(default=None, primary_key=True)
    chat_id: int = Field(foreign_key="chat.id", index=True)
    role: str
    text: str
    response_id: str | None = None
    """The model server's name for this answer: what feedback is about."""
    thumbs: int = 0
    """1 up, -1 down."""
    is_replaced: bool = False
    """The user asked for another answer in its place; it is kept, and no longer shown."""


class Store:
    def __init__(self, file: Path) -> None:
        self._engine = create_engine(f"sqlite:///{file}")
        SQLModel.metadata.create_all(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    def _session(self) -> Session:
        return Session(self._engine, expire_on_commit=False)

    def new_chat(self) -> Chat:
        with self._session() as session:
            chat = Chat()
            session.add(chat)
            session.commit()
            return chat

    def chats(self) -> list[Chat]:
        """Newest first."""
        with self._session() as session:
            return list(session.exec(select(Chat).order_by(col(Chat.id).desc())))

    def chat(self, chat_id: int) -> Chat | None:
        with self._session() as session:
            return session.get(Chat, chat_id)

    def delete_chat(self, chat_id: int) -> None:
        with self._session() as session:
            for message in session.exec(select(Message).where(Message.chat_id == chat_id)):
                session.delete(message)
            if (chat := session.get(Chat, chat_id)) is not None:
                session.delete(chat)
            session.commit()

    def messages(self, chat_id: int) -> list[Message]:
        """Those that are shown, oldest first."""
        wanted = select(Message).where(
            Message.chat_id == chat_id, col(Message.is_replaced).is_(False)
        )
        with self._session() as session:
            return list(session.exec(wanted.order_by(col(Message.id))))

    def ask(self, chat_id: int, text: str) -> Message:
        """The user's next message. The first one names the chat."""
        with self._session() as session:
            chat = session.get(Chat, chat_id)
            if chat is not None and chat.title == "New chat":
                line = " ".join(text.split())
                chat.title = line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"
            message = Message(chat_id=chat_id, role="user", text=text)
            session.add(message)
            session.commit()
            return message

    def answer(self, chat_id: int, text: str, response_id: str | None) -> Message:
        with self._session() as session:
            message = Message(chat_id=chat_id, role="assistant", text=text, response_id=response_id)
            session.add(message)
            session.commit()
            return message

    def take_back_answer(self, chat_id: int) -> None:
        """The last answer makes room for another one."""
        shown = self.messages(chat_id)
        if shown and shown[-1].role == "assistant":
            self._change(shown[-1], is_replaced=True)

    def message(self, message_id: int) -> Message | None:
        with self._session() as session:
            return session.get(Message, message_id)

    def set_thumbs(self, message: Message, thumbs: int) -> None:
        self._change(message, thumbs=thumbs)

    def _change(self, message: Message, **fields: Any) -> None:
        with self._session() as session:
            session.add(message)
            for name, value in fields.items():
                setattr(message, name, value)
            session.commit()
