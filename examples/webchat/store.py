"""The app's database: chats and their messages, in SQLite."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlmodel import Field, Session, SQLModel, col, create_engine, select

MAX_TITLE = 60
"""Maximum length of a chat's title, which is the beginning of its first question."""


def _now() -> datetime:
    return datetime.now(UTC)


class Chat(SQLModel, table=True):
    """A chat."""

    id: int | None = Field(default=None, primary_key=True)
    title: str = "New chat"
    created: datetime = Field(default_factory=_now)


class Message(SQLModel, table=True):
    """A message of the user or of the assistant."""

    id: int | None = Field(default=None, primary_key=True)
    chat_id: int = Field(foreign_key="chat.id", index=True)
    role: str
    text: str
    response_id: str | None = None
    """The model server's id of this answer, with which feedback refers to the answer."""
    thumbs: int = 0
    """The user's thumb: 1 is up, -1 is down, 0 is none."""
    is_replaced: bool = False
    """Whether the user regenerated this answer. It is stored, but no longer shown."""


class Store:
    """The database of one app."""

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
        """Return all chats, newest first."""
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
        """Return the visible messages of a chat, oldest first."""
        query = select(Message).where(
            Message.chat_id == chat_id, col(Message.is_replaced).is_(False)
        )
        with self._session() as session:
            return list(session.exec(query.order_by(col(Message.id))))

    def add_question(self, chat_id: int, text: str) -> Message:
        """Store the user's message. The first message becomes the title of the chat."""
        with self._session() as session:
            chat = session.get(Chat, chat_id)
            if chat is not None and chat.title == "New chat":
                line = " ".join(text.split())
                chat.title = line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"
            message = Message(chat_id=chat_id, role="user", text=text)
            session.add(message)
            session.commit()
            return message

    def add_answer(self, chat_id: int, text: str, response_id: str | None) -> Message:
        """Store an answer."""
        with self._session() as session:
            message = Message(chat_id=chat_id, role="assistant", text=text, response_id=response_id)
            session.add(message)
            session.commit()
            return message

    def hide_last_answer(self, chat_id: int) -> None:
        """If the last message of a chat is an answer, hide it, so that another answer can replace
        it."""
        messages = self.messages(chat_id)
        if messages and messages[-1].role == "assistant":
            self._update(messages[-1], is_replaced=True)

    def message(self, message_id: int) -> Message | None:
        with self._session() as session:
            return session.get(Message, message_id)

    def set_thumbs(self, message: Message, thumbs: int) -> None:
        self._update(message, thumbs=thumbs)

    def _update(self, message: Message, **fields: Any) -> None:
        with self._session() as session:
            session.add(message)
            for name, value in fields.items():
                setattr(message, name, value)
            session.commit()
