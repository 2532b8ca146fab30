"""The events of a Responses stream, built from the deltas of the engine's chat stream.

Output items are opened, extended and closed one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import orjson

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.formats.responses.items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    call_item,
    message_item,
    new_id,
    reasoning_item,
    reasoning_part,
    streamed_logprobs,
    text_part,
)
from fakevllm_adapters.formats.responses.tools import CallName, Tools
from fakevllm_adapters.formats.vllm_versions import Dialect

ITEM_ADDED, ITEM_DONE = "response.output_item.added", "response.output_item.done"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a Responses stream, without its sequence number."""

    kind: str
    fields: Json
    appended: Json = field(default_factory=dict[str, Any])
    """Keys that vLLM writes last. It writes all other keys in alphabetical order."""


class EventWriter:
    """An encoder of the events of a Responses stream that adds the sequence numbers."""

    def __init__(self) -> None:
        self._next_number = 0

    def write(self, event: Event) -> bytes:
        numbered = event.fields | {"sequence_number": self._next_number, "type": event.kind}
        self._next_number += 1
        data = orjson.dumps(dict(sorted(numbered.items())) | event.appended)
        return b"event: " + event.kind.encode() + b"\ndata: " + data + b"\n\n"


class _OpenItem(Protocol):
    def opened(self) -> Iterator[Event]: ...

    def closed(self, status: str) -> Iterator[Event]: ...

    def in_resource(self) -> Json:
        """Return a closed item in the form that it has in the stream's last event.

        The last event contains the whole `response` object. Older versions of vLLM give a message
        item or reasoning item a different id in this object than in the earlier events.
        """
        ...


class _TextItem:
    """A message item of a streamed response."""

    def __init__(self, index: int, dialect: Dialect) -> None:
        self._id = new_id("msg_" if dialect.prefixes_streamed_ids else "")
        self._dialect = dialect
        self._item_at: Json = {"output_index": index}
        self._at: Json = self._item_at | {"content_index": 0, "item_id": self._id}
        self._text = ""
        self._logprobs: list[Json] = []
        self._status = COMPLETED

    def opened(self) -> Iterator[Event]:
        item = message_item(self._id, [], IN_PROGRESS)
        yield Event(ITEM_ADDED, self._item_at | {"item": item})
        yield Event("response.content_part.added", self._at | {"part": text_part("", [])})

    def extended(self, piece: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        self._text += piece
        self._logprobs += logprobs
        fields = {"delta": piece, "logprobs": streamed_logprobs(logprobs)}
        yield Event("response.output_text.delta", self._at | fields)

    def closed(self, status: str) -> Iterator[Event]:
        self._status = status
        # In the old dialect only the resource has the logprobs of the whole text.
        part = text_part(self._text, self._logprobs if self._dialect.marks_incomplete else None)
        part["logprobs"] = part["logprobs"] or None
        done: Json = {"text": self._text, "logprobs": []}
        yield Event("response.output_text.done", self._at | done)
        yield Event("response.content_part.done", self._at | {"part": part})
        item = message_item(self._id, [part] if self._text else [], status)
        if not self._dialect.marks_incomplete:
            item["summary"] = []
        yield Event(ITEM_DONE, self._item_at | {"item": item})

    def in_resource(self) -> Json:
        part = text_part(self._text, self._logprobs or None)
        item_id = self._id if self._dialect.prefixes_streamed_ids else new_id("msg_")
        return message_item(item_id, [part] if self._text else [], self._status)


class _ReasoningItem:
    """A reasoning item of a streamed response."""

    def __init__(self, index: int, dialect: Dialect) -> None:
        self._id = new_id("rs_" if dialect.prefixes_streamed_ids else "")
        self._dialect = dialect
        self._item_at: Json = {"output_index": index}
        self._at: Json = self._item_at | {"content_index": 0, "item_id": self._id}
        self._text = ""
        self._status: str | None = None

    def opened(self) -> Iterator[Event]:
        item = reasoning_item(self._id, None, IN_PROGRESS)
        yield Event(ITEM_ADDED, self._item_at | {"item": item})
        part = {"part": reasoning_part("")}
        yield Event(f"{self._dialect.reasoning_part}.added", self._at | part)

    def extended(self, piece: str) -> Iterator[Event]:
        self._text += piece
        yield Event("response.reasoning_text.delta", self._at | {"delta": piece})

    def closed(self, status: str) -> Iterator[Event]:
        self._status = status if self._dialect.marks_incomplete else None
        part = reasoning_part(self._text)
        yield Event("response.reasoning_text.done", self._at | {"text": self._text})
        yield Event(f"{self._dialect.reasoning_part}.done", self._at | {"part": part})
        yield Event(ITEM_DONE, self._item_at | {"item": reasoning_item(self._id, [part], status)})

    def in_resource(self) -> Json:
        item_id = self._id if self._dialect.prefixes_streamed_ids else new_id("rs_")
        return reasoning_item(item_id, [reasoning_part(self._text)], self._status)


class _CallItem:
    """A function call item of a streamed response."""

    def __init__(
        self, index: int, dialect: Dialect, call_index: int, call_id: str, name: CallName
    ) -> None:
        self.call_index = call_index
        """Index of the call among the answer's calls. The deltas identify the call by this
        index."""
        self._id = new_id("fc_" if dialect.prefixes_streamed_ids else "")
        self._call_id = call_id
        self._name = name
        self._dialect = dialect
        self._item_at: Json = {"output_index": index}
        self._at: Json = self._item_at | {"item_id": self._id}
        self._arguments = ""
        self._status = COMPLETED

    def opened(self) -> Iterator[Event]:
        yield Event(ITEM_ADDED, self._item_at | {"item": self._item(IN_PROGRESS)})

    def extended(self, piece: str) -> Iterator[Event]:
        if piece:
            self._arguments += piece
            yield Event("response.function_call_arguments.delta", self._at | {"delta": piece})

    def closed(self, status: str) -> Iterator[Event]:
        self._status = status
        if self._arguments or self._dialect.marks_incomplete:
            done = self._at | {"arguments": self._arguments}
            name = {"name": self._name.name}
            yield Event("response.function_call_arguments.done", done, name)
        yield Event(ITEM_DONE, self._item_at | {"item": self._item(status)})

    def in_resource(self) -> Json:
        # The ids stay the same, because the openai SDK treats a call with a changed id as an error,
        # and because a call_id must not change. Old versions of vLLM do change both ids.
        return self._item(self._status)

    def _item(self, status: str) -> Json:
        return call_item(self._id, self._call_id, self._name, self._arguments, status)


class ItemStream:
    """The output items of a streamed response.

    Call `take` for each delta of the chat stream. At the end of the stream, call `close`.
    """

    def __init__(self, dialect: Dialect, tools: Tools) -> None:
        self._dialect = dialect
        self._tools = tools
        self._items: list[_OpenItem] = []
        self._logprobs: list[Json] = []
        self._open: _OpenItem | None = None

    @property
    def output(self) -> list[Json]:
        """The output items of the answer, in the form of the `response` object in the stream's last
        event."""
        items = [item.in_resource() for item in self._items]
        if self._dialect.resource_has_all_logprobs and self._logprobs:
            for item in items:
                if item["type"] == "message" and item["content"]:
                    item["content"][0]["logprobs"] = self._logprobs
                    break
        return items

    def take(self, delta: Json, logprobs: Sequence[Json]) -> Iterator[Event]:
        """Translate a delta of the engine's chat stream to events of the Responses stream, and
        yield them.

        Events for reasoning come first, then events for text, then events for tool calls.
        """
        self._logprobs += logprobs
        reasoning = delta.get("reasoning")
        if reasoning is None:
            reasoning = delta.get("reasoning_content")
        if reasoning is not None:
            yield from self._add_reasoning(reasoning)
        if delta.get("content"):
            yield from self._add_text(delta["content"], logprobs)
        for piece in cast(list[Json], delta.get("tool_calls") or []):
            if piece.get("function") is not None:
                yield from self._call(piece)

    def close(self, is_cut: bool) -> Iterator[Event]:
        """Yield the events that close the open output item at the end of the stream. Yield nothing
        if no item is open.

        `is_cut` is True if the token limit cut off the answer within this item.
        """
        status = INCOMPLETE if is_cut and self._dialect.marks_incomplete else COMPLETED
        yield from self._close(status)

    def _add_reasoning(self, piece: str) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, _ReasoningItem):
            item = _ReasoningItem(len(self._items), self._dialect)
            yield from self._change_to(item)
        yield from item.extended(piece)

    def _add_text(self, piece: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, _TextItem):
            item = _TextItem(len(self._items), self._dialect)
            yield from self._change_to(item)
        yield from item.extended(piece, logprobs)

    def _call(self, piece: Json) -> Iterator[Event]:
        item, function = self._open, cast(Json, piece["function"])
        is_same = isinstance(item, _CallItem) and item.call_index == piece.get("index", 0)
        if not is_same or not isinstance(item, _CallItem):
            name = self._tools.call_name(function.get("name") or "")
            call_id = piece.get("id") or new_id("call_")
            index = len(self._items)
            item = _CallItem(index, self._dialect, piece.get("index", 0), call_id, name)
            yield from self._change_to(item)
        yield from item.extended(function.get("arguments") or "")

    def _change_to(self, item: _OpenItem) -> Iterator[Event]:
        yield from self._close(COMPLETED)
        self._items.append(item)
        self._open = item
        yield from item.opened()

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.closed(status)
            self._open = None
