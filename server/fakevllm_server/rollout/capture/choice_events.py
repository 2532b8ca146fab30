"""Split the stream of a call with several choices into the events of each choice. Put the events of
one choice together into an answer. This answer is the same as the answer to a call with one choice.

The module does no I/O. The events of a choice are parsed all at once, when the choice is complete.
This costs half as much as parsing each event separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.sse import SseDecoder, data_of
from fakevllm_adapters.http.answer_parts import PartDecoder
from fakevllm_adapters.http.complete_choices import SentChoice
from fakevllm_server.rollout.capture.answer_forms import CHAT, WholeForm
from fakevllm_server.rollout.capture.prompt_ids import RepeatedPrompt
from fakevllm_server.types.number_arrays import IdArray

Json = dict[str, Any]

_INDEX = re.compile(rb'"choices":\s*\[\s*\{\s*"index":\s*(\d+)')
_FINISH = re.compile(rb'"finish_reason":\s*"')
"""Pattern that only the last event of a choice contains. Text of the model does not match, because
quotes inside a JSON string are escaped."""
_BATCH = 500
"""Number of events that are parsed at once."""


class EngineStreamError(Exception):
    """An error that the engine sent in place of the rest of a stream."""

    def __init__(self, body: Json) -> None:
        super().__init__(str(body))
        self.body = body


@dataclass(slots=True)
class ChoiceEvents:
    """The events of one choice that have arrived so far. Each event is the JSON text of a chunk. In
    this text, the choice has the index 0, as in a response with one choice."""

    index: int
    data: list[bytes] = field(default_factory=list[bytes])
    prompt_ids: IdArray | None = None
    """The prompt's token ids if they were removed from the events."""

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the choice's events that have arrived so far."""
        return sum(map(len, self.data))

    def chunks(self) -> list[Json]:
        """Return the parsed chunks of this choice. They are parsed in batches, because the
        interpreter's lock (GIL) is held while a batch is parsed."""
        batches = (self.data[at : at + _BATCH] for at in range(0, len(self.data), _BATCH))
        return [
            chunk for batch in batches for chunk in orjson.loads(b"[" + b",".join(batch) + b"]")
        ]


class ChoiceSplitter:
    """The reader of one stream with `num` choices. It splits the stream's events by choice.

    The prompt's ids come with the first event of each choice. If `removes_prompt_ids` is True, the
    ids are removed from these events, and are parsed only once.
    """

    def __init__(self, num: int, *, removes_prompt_ids: bool) -> None:
        self._decoder = SseDecoder()
        self._running = {index: ChoiceEvents(index) for index in range(num)}
        self._repeated_prompt = RepeatedPrompt() if removes_prompt_ids else None

    @property
    def num_running(self) -> int:
        """Number of the call's choices whose end has not been read yet."""
        return len(self._running)

    def feed(self, chunk: bytes) -> Iterator[ChoiceEvents]:
        """Read the next bytes of the stream. Yield each choice whose last event is in these bytes.

        Raises EngineStreamError if the engine reports an error. Raises ValueError if an event is
        malformed.
        """
        for event in self._decoder.feed(chunk):
            data = data_of(event)
            match = None if data is None else _INDEX.search(data)
            if data is None or match is None:
                _check_without_choices(data)
                continue
            choice = self._running.get(int(match[1]))
            if choice is None:
                continue
            if self._repeated_prompt is not None and not choice.data:
                data, choice.prompt_ids = self._repeated_prompt.cut(data)
                match = _INDEX.search(data)
                assert match is not None, "the index was found before"
            if choice.index:
                data = b"%b0%b" % (data[: match.start(1)], data[match.end(1) :])
            choice.data.append(data)
            if _FINISH.search(data):
                yield self._running.pop(choice.index)


class PartReader:
    """The reader of a multipart response with `num` choices. The engine sends each choice as one
    part when the choice is complete."""

    def __init__(self, num: int, content_type: str) -> None:
        """Create the reader. Raises ValueError if `content_type` is not that of a multipart
        response."""
        self._decoder = PartDecoder(content_type)
        self._running = set(range(num))

    @property
    def num_running(self) -> int:
        """Number of the call's choices whose end has not been read yet."""
        return len(self._running)

    def feed(self, chunk: bytes) -> Iterator[SentChoice]:
        """Read the next bytes of the response. Yield each choice whose part ends in these bytes.

        Raises EngineStreamError if the engine reports an error. Raises ValueError if a part is
        malformed.
        """
        for part in self._decoder.feed(chunk):
            choice = SentChoice.from_part(part)
            if "error" in choice.tokens:
                raise EngineStreamError(choice.tokens)
            if choice.index in self._running:
                self._running.remove(choice.index)
                yield choice


def _check_without_choices(data: bytes | None) -> None:
    """Check an event in which no index of a choice was found. A comment, `[DONE]` and a chunk
    without choices are valid. Raises EngineStreamError if the event is an error. Raises ValueError
    for any other event."""
    if data is None:
        return
    chunk: Any = orjson.loads(data)
    if not isinstance(chunk, dict) or "error" in chunk:
        raise EngineStreamError(cast(Json, chunk) if isinstance(chunk, dict) else {})
    if cast(Json, chunk).get("choices"):
        raise ValueError("the index is not the first field of a choice")


def usage_of(chunks: Sequence[Json]) -> Json:
    """Return the token counts of a choice. The engine sends them in the choice's last chunk.

    Raises ValueError if the engine did not count the tokens of the choice.
    """
    usage: Json | None = chunks[-1].get("usage")
    if not isinstance(usage, dict):
        raise ValueError("the engine does not count the tokens of each choice")
    return usage


def usage_chunk(first: Json, usage: Json, form: Json) -> Json:
    """Return the usage chunk that ends the stream of one choice. `first` is the choice's first
    chunk. `usage` has the token counts of the choice. `form` is an earlier usage chunk of the
    engine, from which the names and the order of the fields are taken."""
    same = {name: first[name] for name in ("id", "created", "model") if name in first}
    return form | same | {"usage": {name: usage.get(name) for name in form["usage"]}}


def whole_answer(path: str, chunks: Sequence[Json], usage: Json, form: WholeForm) -> Json:
    """Join the chunks of one choice, and return them as one answer, as if the app had requested no
    stream. `form` has the names and the order of the answer's fields."""
    first, choices = chunks[0], [chunk["choices"][0] for chunk in chunks]
    merged: Json = choices[-1] | {
        "token_ids": _joined([choice.get("token_ids") for choice in choices]),
        "logprobs": _joined_logprobs([choice.get("logprobs") for choice in choices]),
    }
    if path == CHAT:
        merged["message"] = _message([choice.get("delta") or {} for choice in choices], form)
    else:
        merged["text"] = "".join(choice.get("text") or "" for choice in choices)
        merged["prompt_token_ids"] = choices[0].get("prompt_token_ids")
    choice = {name: merged.get(name) for name in form.choice}
    if "allowed_tokens" in merged:
        choice["allowed_tokens"] = merged["allowed_tokens"]
    counts = {name: usage.get(name) for name in form.usage}
    changed: Json = {"choices": [choice], "usage": counts}
    for name in ("id", "created", "model", "prompt_token_ids", "prompt_text"):
        if name in form.top:
            changed[name] = first.get(name)
    return form.top | changed


def _message(deltas: Sequence[Json], form: WholeForm) -> Json:
    """Return the chat message that these deltas of a stream form together. The deltas have no
    reasoning. `form` has the names and the order of the message's fields."""
    pieces = [delta["content"] for delta in deltas if isinstance(delta.get("content"), str)]
    texts = {"role": "assistant", "content": "".join(pieces) if pieces else None}
    return form.message | texts


def _joined(lists: Sequence[list[Any] | None]) -> list[Any] | None:
    present = [part for part in lists if part is not None]
    return [item for part in present for item in part] if present else None


def _joined_logprobs(logprobs: Sequence[Json | None]) -> Json | None:
    """Return one logprobs object for all chunks. Each of its lists is the concatenation of the
    chunks' lists."""
    present = [part for part in logprobs if part is not None]
    if not present:
        return None
    return {name: _joined([part.get(name) for part in present]) for name in present[0]}
