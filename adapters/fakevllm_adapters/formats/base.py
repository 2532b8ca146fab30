"""What proxy and server ask of a wire format. A new format is one file and one entry in ADAPTERS.

Upstream there are two formats, vLLM's chat completions and completions; every other one is
translated to chat and back, one Exchange a request. What cannot be translated is left to the
engine's own route, served once and not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fakevllm_adapters.protocol.errors import WireError

Json = dict[str, Any]
Earlier = Sequence[tuple[Json, Json]]
"""Requests in the app's format with the assistant messages that answered them, oldest first."""


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
    id: str | None = None
    """As the upstream calls it."""

    @property
    def text(self) -> str:
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a format may have to know of the engine to answer as it would. None: not known yet."""

    model: str | None = None
    max_model_len: int | None = None
    version: str | None = None
    """As its /version tells."""


class Untranslated(Exception):
    """The engine's own route must answer this request; the message says what for."""

    error: WireError | None = None
    """What to answer where the engine has no such route, if that is known better."""


class Exchange(Protocol):
    """One request in the app's format, and its answer. Holds the state of one stream: never share
    or use it twice."""

    body: Json
    """What is asked upstream, at the adapter's `upstream_path`."""
    streamed: bool

    def answer(self, raw: bytes) -> bytes:
        """A whole 200 answer of the upstream, as the app reads it. Raises ValueError where it is
        none."""
        ...

    def can_show(self, answer: Answer) -> bool:
        """Whether a completion of the upstream can be worded in the app's format."""
        ...

    def event(self, event: bytes) -> bytes:
        """One event of the upstream's stream (with its separator), as what the app gets for it:
        none, one or several events. The upstream's errors and its `[DONE]` come here too."""
        ...

    def keep_alive(self) -> bytes:
        """What may be sent now to show that the answer is still being made, before or between
        events."""
        ...

    def broken(self, error: Json) -> bytes:
        """The end of a stream that cannot go on, `error` being vLLM's error body."""
        ...


class Adapter(Protocol):
    name: str
    path: str
    upstream_path: str
    names_answers: bool
    """Whether its requests may stand on earlier answers by `previous_response_id`."""

    def open(self, body: Json, engine: Engine, earlier: Earlier | None = None) -> Exchange:
        """`earlier`: what the body's `previous_response_id` stands for; None where nobody knows.
        Raises Untranslated."""
        ...

    def refusal(self, status: int, body: Json) -> Json:
        """vLLM's error body as this format words it."""
        ...

    # What follows reads and writes bodies of the upstream's format.

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
