"""What the sessions of all clients say, and what they get to hear."""

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
    """Makes the fake engine answer `text`."""
    return f"[[say {text}]]"


def user(text: str) -> Any:
    """The messages of a conversation that begins. Any: each client has types of its own."""
    return [{"role": "user", "content": text}]


def num_tokens(text: str) -> int:
    """Of an answer: the fake engine counts bytes and an end."""
    return len(text.encode()) + 1
