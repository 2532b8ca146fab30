"""What the proxy asks of a wire format. A new format is one file and one entry in ADAPTERS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished completion, whatever the mode it came in.

    >>> Answer({"role": "assistant", "content": "Hi"}, "stop").text
    'Hi'
    """

    message: Json
    """The assistant message as the app would read it."""
    finish_reason: str | None
    usage: Json = field(default_factory=dict[str, Any])

    @property
    def text(self) -> str:
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


class Adapter(Protocol):
    name: str
    path: str

    def question(self, body: Json) -> str:
        """The text of the last user message, "" where there is none."""
        ...

    def opening(self, body: Json) -> str:
        """The text of the first user message, "" where there is none."""
        ...

    def sibling(self, body: Json, index: int, temperature: float) -> Json:
        """The body of sibling `index`; sibling 0 is the app's own."""
        ...

    def read_json(self, body: Json) -> Answer:
        """Raises ValueError where the body is no answer."""
        ...

    def read_events(self, events: Sequence[bytes]) -> Answer:
        """Raises ValueError where the stream holds an error or did not end."""
        ...
