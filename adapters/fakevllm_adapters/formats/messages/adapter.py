"""The adapters of /v1/messages and /v1/messages/count_tokens. Their answers equal those of vLLM.

Requests to /v1/messages become requests to /v1/chat/completions. Requests to count_tokens become
requests to /tokenize.
"""

from __future__ import annotations

from typing import Any

import orjson

from fakevllm_adapters.formats.base import Answer, EngineInfo, Exchange, History, Json
from fakevllm_adapters.formats.chat import ChatAdapter
from fakevllm_adapters.formats.messages.answer import (
    as_object,
    has_valid_calls,
    message_of,
    refusal_of,
    stream_error,
    to_json,
)
from fakevllm_adapters.formats.messages.request import chat_body, tokenize_body
from fakevllm_adapters.formats.messages.schema import CountBody, MessagesBody, parse
from fakevllm_adapters.formats.messages.stream import PING, MessageStream, encode
from fakevllm_adapters.formats.vllm_versions import Dialect, dialect_of

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"


class MessagesAdapter(ChatAdapter):
    """The adapter of Anthropic's Messages format, whose requests are translated to chat
    completions."""

    name = "messages"
    path = PATH

    def open(self, body: Json, engine: EngineInfo, earlier: History | None = None) -> Exchange:
        """Return the translator of a Messages request and of its response.

        Raises MalformedBody for a body that vLLM refuses. Raises NotTranslated if vLLM accepts the
        body, but no exact translation exists.
        """
        request = parse(MessagesBody, body)
        return MessagesExchange(
            chat_body(request), bool(request.stream), dialect_of(engine.version)
        )

    def refusal(self, status: int, body: Json) -> Json:
        return refusal_of(status, body)


class MessagesExchange:
    """A translator of one Messages request to a chat completions request, and of the response back
    to a Messages response."""

    def __init__(self, body: Json, streamed: bool, dialect: Dialect) -> None:
        self.body = body
        self.streamed = streamed
        self._stream = MessageStream(dialect)

    def answer(self, raw: bytes) -> bytes:
        return to_json(message_of(as_object(orjson.loads(raw))))

    def can_show(self, answer: Answer) -> bool:
        return self.streamed or has_valid_calls(answer.message)

    def event(self, event: bytes) -> bytes:
        return self._stream.event(event)

    def keep_alive(self) -> bytes:
        return PING

    def end_with_error(self, error: Json) -> bytes:
        return self._stream.end_with_error(error)


class CountTokensAdapter(ChatAdapter):
    """The adapter of /v1/messages/count_tokens, the route that counts the tokens of a request."""

    name = "count_tokens"
    path = COUNT_PATH
    upstream_path = "/tokenize"

    def open(self, body: Json, engine: EngineInfo, earlier: History | None = None) -> Exchange:
        """Return the translator of a count_tokens request and of its response.

        Raises MalformedBody for a body that vLLM refuses. Raises NotTranslated if vLLM accepts the
        body, but no exact translation exists.
        """
        return CountExchange(tokenize_body(parse(CountBody, body)), dialect_of(engine.version))

    def refusal(self, status: int, body: Json) -> Json:
        return refusal_of(status, body)


class CountExchange:
    """A translator of one count_tokens request, and of its response.

    The response is never streamed. The class has methods for streams only because the interface
    Exchange requires them.
    """

    streamed = False

    def __init__(self, body: Json, dialect: Dialect) -> None:
        self.body = body
        self._dialect = dialect

    def answer(self, raw: bytes) -> bytes:
        count: Any = as_object(orjson.loads(raw)).get("count")
        if not isinstance(count, int):
            raise ValueError("the answer has no count")
        managed = {"original_input_tokens": count}
        return to_json({"input_tokens": count, "context_management": managed})

    def can_show(self, answer: Answer) -> bool:
        return True

    def event(self, event: bytes) -> bytes:
        return event

    def keep_alive(self) -> bytes:
        return PING

    def end_with_error(self, error: Json) -> bytes:
        return encode(stream_error(error, self._dialect))
