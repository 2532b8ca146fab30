"""The interfaces that each API format implements.

To add a format, write one file, and add one entry to the table ADAPTERS in `registry`.

The engine (also called the upstream) gets requests in one of two formats: vLLM's chat completions
or completions. An Exchange translates one request in any other format to chat completions, and
translates the response back. A request that cannot be translated is sent to the engine's own route
for the request's format. Such a request gets a single answer, and this answer is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fakevllm_adapters.protocol.errors import WireError

Json = dict[str, Any]
History = Sequence[tuple[Json, Json]]
"""Earlier requests of a conversation, oldest first. Each entry is a pair: the request in the app's
format, and the assistant message that answered this request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer, parsed from a stream or from a whole response.

    >>> Answer({"role": "assistant", "content": "Hi"}, "stop").text
    'Hi'
    """

    message: Json
    """Assistant message in the format of chat completions."""
    finish_reason: str | None
    usage: Json = field(default_factory=dict[str, Any])
    id: str | None = None
    """Id that the upstream (the engine) gave to the answer."""
    model: str | None = None
    """Name of the model that the upstream gave to the answer."""

    @property
    def text(self) -> str:
        """Text of the answer: the message's content if this content is a string, else the empty
        string."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the engine that an adapter needs to build the same response as the engine would.

    A field is None if the fact is unknown.
    """

    model: str | None = None
    max_model_len: int | None = None
    """Context length of the engine, in tokens."""
    version: str | None = None
    """Version that the engine's /version returns."""


class NotTranslated(Exception):
    """Error for a request that cannot be translated to chat completions. The message is the reason.

    The caller should send such a request to the engine's own route for the request's format.
    """

    def __init__(self, reason: str, error: WireError | None = None) -> None:
        super().__init__(reason)
        self.error = error
        """Error for the client if the engine has no route for the format. None means a general
        error."""


class Exchange(Protocol):
    """A translator of one request and its response. It translates between an app's format and the
    format of the engine (also called the upstream).

    An exchange holds the state of one response stream. Create a new exchange for each request.
    """

    body: Json
    """Translated request, which is sent to the engine at the adapter's `upstream_path`."""
    streamed: bool
    """Whether the app requested a stream."""

    def answer(self, raw: bytes) -> bytes:
        """Return the engine's response, translated to the app's format. `raw` is the body of a
        response that has status 200 and is not a stream.

        Raises ValueError if the response is malformed.
        """
        ...

    def can_show(self, answer: Answer) -> bool:
        """Return True if the app's format can express this answer of the engine."""
        ...

    def event(self, event: bytes) -> bytes:
        """Translate one event of the engine's stream, and return zero or more events for the app.

        The argument `event` ends with the separator that follows the event. Call this method for
        the engine's error events and for the final `[DONE]`, too.
        """
        ...

    def keep_alive(self) -> bytes:
        """Return bytes that keep the app's connection open until the next event is sent.

        The bytes may be sent before an event or between two events.
        """
        ...

    def end_with_error(self, error: Json) -> bytes:
        """Return the events that end a failed stream in the app's format.

        `error` is an error body in vLLM's form. It describes the failure.
        """
        ...


class Adapter(Protocol):
    """A translator between one API format and the engine's format. An adapter has no state; `open`
    creates an Exchange for each request."""

    name: str
    path: str
    """Path at which apps send requests in this format."""
    upstream_path: str
    """Path at which the upstream gets the translated requests."""
    has_previous_response: bool
    """Whether requests may refer to an earlier answer by `previous_response_id`."""

    def open(self, body: Json, engine: EngineInfo, earlier: History | None = None) -> Exchange:
        """Translate a request for the engine. Return the exchange, which has the translated request
        and translates the response back.

        `earlier` is the conversation that the body's `previous_response_id` refers to. `earlier` is
        None if the body has no such id, or if the id is unknown. Raises NotTranslated if no exact
        translation exists.
        """
        ...

    def refusal(self, status: int, body: Json) -> Json:
        """Translate an error body from vLLM's form to the API format of this adapter. `status` is
        the error's HTTP status."""
        ...

    # The methods below read and write bodies in the upstream's format.

    def question(self, body: Json) -> str:
        """Return the text of the last user message, or "" if there is none."""
        ...

    def opening(self, body: Json) -> str:
        """Return the text of the first user message, or "" if there is none."""
        ...

    def seed(self, body: Json) -> int | None:
        """Return the sampling seed of a request, or None if the request has no seed."""
        ...

    def sibling_body(self, body: Json, index: int, temperature: float) -> Json:
        """Return the request body from which sibling `index` is sampled.

        Siblings are several answers to the same request. For index 0, return the app's own body.
        """
        ...

    def parse_answer(self, body: Json) -> Answer:
        """Parse a response that is not streamed. Raises ValueError if the response is malformed."""
        ...

    def parse_stream(self, events: Sequence[bytes]) -> Answer:
        """Parse the answer from all events of a stream.

        Raises ValueError if the stream has an error event or is incomplete.
        """
        ...
