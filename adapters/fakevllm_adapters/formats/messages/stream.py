"""Translate streams of chat chunks to the events of vLLM's /v1/messages.

Content blocks are opened and closed one after another. Text that arrives during a tool call waits
until the call is complete, and then becomes the next block.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.messages.answer import (
    STOP_REASONS,
    as_list,
    as_object,
    new_signature,
    reasoning_of,
    stream_error,
    usage_counts,
)
from fakevllm_adapters.formats.sse import DONE, data_of, parse_event
from fakevllm_adapters.formats.vllm_versions import Dialect


def encode(event: Json) -> bytes:
    """Encode an event as a server-sent event whose name is the event's type."""
    name = str(event["type"]).encode()
    return b"event: " + name + b"\ndata: " + orjson.dumps(event) + b"\n\n"


PING = encode({"type": "ping"})


class ContentBlocks:
    """The content blocks of a streamed message. At most one block is open at a time."""

    def __init__(self) -> None:
        self._index = 0
        self._open: Json | None = None
        self._waiting = ""
        self._call_ids: dict[str, object] = {}
        """Ids of the calls by their index."""

    def thinking(self, text: str) -> Iterator[Json]:
        """Yield the events that add text to the thinking block. If no thinking block is open, the
        events open a thinking block first."""
        yield from self._continued({"type": "thinking", "thinking": ""})
        yield self._delta({"type": "thinking_delta", "thinking": text})

    def text(self, text: str) -> Iterator[Json]:
        """Yield the events that add text to the text block. If no text block is open, the events
        open a text block first.

        While a tool call is open, store the text for the next block, and yield nothing.
        """
        if self._is("tool_use"):
            self._waiting += text
            return
        yield from self._continued({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def call(self, piece: Json) -> Iterator[Json]:
        """Yield the events that add a piece of a streamed tool call to its content block.

        As in vLLM, the block of a call is closed before the next call begins.
        """
        function = as_object(piece.get("function"))
        index = str(piece.get("index"))
        name, arguments = function.get("name"), function.get("arguments")
        if piece.get("id") is not None:
            self._call_ids[index] = piece["id"]
            if name is not None and not self._is_call(piece["id"]):
                block: Json = {"type": "tool_use", "id": piece["id"], "name": name}
                yield from self._begun(block | {"input": {}})
        if arguments and self._is_call(self._call_ids.get(index)):
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def close(self) -> Iterator[Json]:
        """Yield the events that close the open block.

        If text arrived during a tool call, also yield the events of a whole block with this text.
        """
        yield from self._stopped()
        if self._waiting:
            text, self._waiting = self._waiting, ""
            yield from self.text(text)
            yield from self._stopped()

    def _continued(self, block: Json) -> Iterator[Json]:
        if not self._is(block["type"]):
            yield from self._begun(block)

    def _begun(self, block: Json) -> Iterator[Json]:
        yield from self.close()
        self._open = block
        yield {"type": "content_block_start", "content_block": block, "index": self._index}

    def _stopped(self) -> Iterator[Json]:
        if self._open is None:
            return
        if self._is("thinking"):
            yield self._delta({"type": "signature_delta", "signature": new_signature()})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None
        self._index += 1

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "delta": delta, "index": self._index}

    def _is(self, kind: object) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _is_call(self, call_id: object) -> bool:
        return self._open is not None and call_id is not None and self._open.get("id") == call_id


class MessageStream:
    """Translates one stream of chat chunks to a stream of Anthropic's Messages events."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._blocks = ContentBlocks()
        self._started = False
        self._has_choice = False
        self._finish_reason: str | None = None
        self._usage: object = None
        self._sent_usage = False
        self._ended = False

    def event(self, event: bytes) -> bytes:
        """Translate an event of the engine's stream to zero or more events for the app.

        A comment event becomes a ping event.
        """
        if self._ended or not event.strip():
            return b""
        try:
            chunk = parse_event(event)
        except ValueError:
            return self.end_with_error(
                {"error": {"message": "Invalid data format received", "code": 500}}
            )
        if chunk is not None and chunk.get("error") is not None:
            return self.end_with_error(chunk)
        if chunk is not None:
            return b"".join(map(encode, self._chunk(chunk)))
        if event.strip() == DONE.strip():
            return self._done()
        return PING if data_of(event) is None else b""

    def end_with_error(self, error: Json) -> bytes:
        """Return the error event that ends the stream, or b"" if the stream has ended already.

        As in vLLM, the stop events of the open block and of the message are not sent.
        """
        if self._ended:
            return b""
        self._ended = True
        return encode(stream_error(error, self._dialect))

    def _done(self) -> bytes:
        if not self._has_choice:
            return self.end_with_error(
                {"error": {"message": "The answer did not finish.", "code": 500}}
            )
        self._ended = True
        return b"".join(map(encode, [*self._finish(), {"type": "message_stop"}]))

    def _chunk(self, chunk: Json) -> Iterator[Json]:
        self._usage = chunk.get("usage") or self._usage
        if not self._started:
            self._started = True
            yield self._start(chunk)
        choices = as_list(chunk.get("choices"))
        if choices:
            yield from self._choice(as_object(choices[0]))
        elif chunk.get("usage") and self._has_choice:
            yield from self._finish()

    def _start(self, chunk: Json) -> Json:
        message: Json = {
            "id": chunk.get("id"),
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": chunk.get("model"),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_counts(self._usage),
        }
        return {"type": "message_start", "message": message}

    def _choice(self, choice: Json) -> Iterator[Json]:
        self._has_choice = True
        finish_reason = choice.get("finish_reason")
        if finish_reason is not None:
            self._finish_reason = str(finish_reason)
        delta = as_object(choice.get("delta"))
        reasoning, text = reasoning_of(delta), delta.get("content")
        if reasoning and isinstance(reasoning, str):
            yield from self._blocks.thinking(reasoning)
        if text and isinstance(text, str):
            yield from self._blocks.text(text)
        for piece in as_list(delta.get("tool_calls")):
            yield from self._blocks.call(as_object(piece))

    def _finish(self) -> Iterator[Json]:
        """Yield the events that close the open block, and the last `message_delta` event.

        This method is called when the usage chunk arrives, and again at the end of the stream. The
        second call yields nothing.
        """
        if self._sent_usage:
            return
        self._sent_usage = True
        yield from self._blocks.close()
        delta: Json = {"stop_reason": STOP_REASONS.get(self._finish_reason or "stop")}
        if self._dialect.sends_stop_sequence:
            delta["stop_sequence"] = None
        yield {"type": "message_delta", "delta": delta, "usage": usage_counts(self._usage)}
