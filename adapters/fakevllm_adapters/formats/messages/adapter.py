"""/v1/messages and /v1/messages/count_tokens: Anthropic's format, as vLLM speaks it.

Upstream the first is asked as chat completions, the second as /tokenize.
"""

from __future__ import annotations

from typing import Any

import orjson

from fakevllm_adapters.formats.base import Answer, Earlier, Engine, Exchange, Json
from fakevllm_adapters.formats.chat import ChatAdapter
from fakevllm_adapters.formats.messages.answer import (
    as_object,
    dumped,
    has_readable_calls,
    message_of,
    refusal_of,
    stream_error,
)
from fakevllm_adapters.formats.messages.request import chat_body, tokenize_body
from fakevllm_adapters.formats.messages.schema import CountBody, MessagesBody, parse
from fakevllm_adapters.formats.messages.stream import PING, MessageStream, encode
from fakevllm_adapters.formats.responses.dialect import Dialect, dialect_of

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"


class MessagesAdapter(ChatAdapter):
    name = "messages"
    path = PATH

    def open(self, body: Json, engine: Engine, earlier: Earlier | None = None) -> Exchange:
        """Raises Malformed where vLLM refuses the body."""
        asked = parse(MessagesBody, body)
        return MessagesExchange(chat_body(asked), bool(asked.stream), dialect_of(engine.version))

    def refusal(self, status: int, body: Json) -> Json:
        return refusal_of(status, body)


class MessagesExchange:
    def __init__(self, body: Json, streamed: bool, dialect: Dialect) -> None:
        self.body = body
        self.streamed = streamed
        self._stream = MessageStream(dialect)

    def answer(self, raw: bytes) -> bytes:
        return dumped(message_of(as_object(orjson.loads(raw))))

    def can_show(self, answer: Answer) -> bool:
        return self.streamed or has_readable_calls(answer.message)

    def event(self, event: bytes) -> bytes:
        return self._stream.event(event)

    def keep_alive(self) -> bytes:
        return PING

    def broken(self, error: Json) -> bytes:
        return self._stream.broken(error)


class CountTokensAdapter(ChatAdapter):
    name = "count_tokens"
    path = COUNT_PATH
    upstream_path = "/tokenize"

    def open(self, body: Json, engine: Engine, earlier: Earlier | None = None) -> Exchange:
        """Raises Malformed where vLLM refuses the body."""
        return CountExchange(tokenize_body(parse(CountBody, body)), dialect_of(engine.version))

    def refusal(self, status: int, body: Json) -> Json:
        return refusal_of(status, body)


class CountExchange:
    """Never streamed; of a stream's ways it has what any exchange has."""

    streamed = False

    def __init__(self, body: Json, dialect: Dialect) -> None:
        self.body = body
        self._dialect = dialect

    def answer(self, raw: bytes) -> bytes:
        count: Any = as_object(orjson.loads(raw)).get("count")
        if not isinstance(count, int):
            raise ValueError("the answer has no count")
        managed = {"original_input_tokens": count}
        return dumped({"input_tokens": count, "context_management": managed})

    def can_show(self, answer: Answer) -> bool:
        return True

    def event(self, event: bytes) -> bytes:
        return event

    def keep_alive(self) -> bytes:
        return PING

    def broken(self, error: Json) -> bytes:
        return encode(stream_error(error, self._dialect))
