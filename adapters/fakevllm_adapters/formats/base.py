"""The interfaces of an API format. A new format is one file and one entry in ADAPTERS.

There are two upstream formats: vLLM's chat completions and completions. Requests in all other
formats are translated to chat completions, and their responses back, by one Exchange per request.
A request that cannot be translated goes to the engine's own route; it is served once and not
trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fakevllm_adapters.protocol.errors import WireError

Json = dict[str, Any]
History = Sequence[tuple[Json, Json]]
"""Earlier requests in the app's format, each with the assistant message that answered it, oldest
first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer of the model, whether it was streamed or not.

    >>> Answer({"role": "assistant", "content": "Hi"}, "stop").text
    'Hi'
    """

    message: Json
    """Assistant message in the chat format."""
    finish_reason: str | None
    usage: Json = field(default_factory=dict[str, Any])
    id: str | None = None
    """The upstream's id of the answer."""

    @property
    def text(self) -> str:
        """Content of the message if it is a text, else ""."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the engine, which a format needs to answer as the engine would.

    A field is None if the fact is unknown.
    """

    model: str | None = None
    max_model_len: int | None = None
    """Context length of the engine, in tokens."""
    version: str | None = None
    """Version that the engine's /version returns."""


class NotTranslated(Exception):
    """A request that cannot be translated, with the reason as message.

    The engine's own route for the format must answer the request.
    """

    error: WireError | None = None
    """Error to send if the engine has no such route; None means a general error."""


class Exchange(Protocol):
    """The translation of one request and of its response.

    An exchange holds the state of one stream. Do not share it, and use it once.
    """

    body: Json
    """Request for the upstream, for the adapter's `upstream_path`."""
    streamed: bool
    """Whether the app requested a stream."""

    def answer(self, raw: bytes) -> bytes:
        """Translate the upstream's whole response of status 200 to the app's format.

        Raises ValueError if the response is malformed.
        """
        ...

    def can_show(self, answer: Answer) -> bool:
        """Return whether the app's format can express an answer of the upstream."""
        ...

    def event(self, event: bytes) -> bytes:
        """Translate one event of the upstream's stream to zero or more events for the app.

        `event` includes its separator. The upstream's errors and its `[DONE]` are events too.
        """
        ...

    def keep_alive(self) -> bytes:
        """Return bytes that may be sent now, before or between events, to keep the app waiting."""
        ...

    def end_with_error(self, error: Json) -> bytes:
        """Return the last events of a stream that failed; `error` is vLLM's error body."""
        ...


class Adapter(Protocol):
    """An API format. An adapter has no state; each request opens an Exchange."""

    name: str
    path: str
    """Path at which apps send requests in this format."""
    upstream_path: str
    """Path at which the upstream gets the translated requests."""
    has_previous_response: bool
    """Whether requests may refer to an earlier answer by `previous_response_id`."""

    def open(self, body: Json, engine: EngineInfo, earlier: History | None = None) -> Exchange:
        """Translate a request.

        `earlier` is the conversation that the body's `previous_response_id` refers to; None if the
        id is unknown. Raises NotTranslated.
        """
        ...

    def refusal(self, status: int, body: Json) -> Json:
        """Translate vLLM's error body to this format."""
        ...

    # The methods below read and write bodies in the upstream's format.

    def question(self, body: Json) -> str:
        """Return the text of the last user message, or ""."""
        ...

    def opening(self, body: Json) -> str:
        """Return the text of the first user message, or ""."""
        ...

    def seed(self, body: Json) -> int | None:
        """Return the seed with which the request can be repeated, or None if it has none."""
        ...

    def sibling_body(self, body: Json, index: int, temperature: float) -> Json:
        """Return the request body of sibling `index`; sibling 0 is the app's own request."""
        ...

    def parse_answer(self, body: Json) -> Answer:
        """Parse a whole response. Raises ValueError if it is malformed."""
        ...

    def parse_stream(self, events: Sequence[bytes]) -> Answer:
        """Parse all events of a stream. Raises ValueError if it has an error or is incomplete."""
        ...
