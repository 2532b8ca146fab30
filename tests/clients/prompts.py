"""Prompts, answers, model and key of the clients' sessions."""

from __future__ import annotations

from typing import Any

import pydantic

Json = dict[str, Any]

MODEL = "fake"
KEY = "sk-test"

SUNNY = "It is sunny in Oslo."

PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADA = '{"name": "Ada", "age": 36}'


class Person(pydantic.BaseModel):
    name: str
    age: int


def say(text: str) -> str:
    """Return a prompt that makes the fake engine answer `text`."""
    return f"[[say {text}]]"


def user(text: str) -> Any:
    """Return the messages of a new conversation.

    The result is Any, because each client has its own types.
    """
    return [{"role": "user", "content": text}]


def num_tokens(text: str) -> int:
    """Return the fake engine's number of tokens: the answer's bytes and one end token."""
    return len(text.encode()) + 1
