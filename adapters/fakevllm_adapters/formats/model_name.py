"""Replace the model's name in answers, so that an app reads the name that it asked for.

Only the bytes of the name change. An answer is not parsed and written again.
"""

from __future__ import annotations

import orjson

from fakevllm_adapters.formats.base import Answer, Exchange, Json
from fakevllm_adapters.formats.json_strings import find_string

_MODEL_PATHS = frozenset({(b"model",), (b"response", b"model"), (b"message", b"model")})
"""Where the name is: in whole answers and chunks, and in the events of Responses and of
Messages."""


def with_model_name(raw: bytes, model: str) -> bytes:
    """Return an answer, or an event of a stream, with another name of the model.

    An answer without the name of a model is returned unchanged.

    >>> with_model_name(b'data: {"model": "demo", "choices": []}', "gpt-4o")
    b'data: {"model": "gpt-4o", "choices": []}'
    """
    span = None if raw.startswith(b":") else find_string(raw, _MODEL_PATHS)
    if span is None:
        return raw
    begin, end = span
    return raw[:begin] + orjson.dumps(model)[1:-1] + raw[end:]


class RenamingExchange:
    """An exchange whose answers carry the model name that the app asked for.

    The name is replaced in the upstream's bytes, which the inner exchange then translates.
    """

    def __init__(self, inner: Exchange, model: str) -> None:
        self.body = inner.body
        self.streamed = inner.streamed
        self._inner = inner
        self._model = model

    @property
    def response_id(self) -> str | None:
        """Id of the answer that the inner exchange has chosen; None if its format has no such
        id."""
        return getattr(self._inner, "response_id", None)

    def answer(self, raw: bytes) -> bytes:
        return self._inner.answer(with_model_name(raw, self._model))

    def can_show(self, answer: Answer) -> bool:
        return self._inner.can_show(answer)

    def event(self, event: bytes) -> bytes:
        return self._inner.event(with_model_name(event, self._model))

    def keep_alive(self) -> bytes:
        return self._inner.keep_alive()

    def end_with_error(self, error: Json) -> bytes:
        return self._inner.end_with_error(error)
