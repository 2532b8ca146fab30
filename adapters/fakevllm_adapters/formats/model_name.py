"""Replace the model's name in answers. An app gets the name that it asked for.

Only the bytes of the name change. The rest of the answer is not parsed and serialized again.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from fakevllm_adapters.formats.base import Answer, Exchange, Json
from fakevllm_adapters.formats.json_strings import find_string

_MODEL_PATHS = frozenset({(b"model",), (b"response", b"model"), (b"message", b"model")})
"""Keys that lead to the model's name: in a whole answer or a chunk, in an event of the Responses
format, and in an event of the Messages format."""


def with_model_name(raw: bytes, model: str) -> bytes:
    """Return an answer, or one event of a stream, in which `model` replaces the name of the model.

    If there is no name of a model, the bytes are returned unchanged.

    >>> with_model_name(b'data: {"model": "demo", "choices": []}', "gpt-4o")
    b'data: {"model": "gpt-4o", "choices": []}'
    """
    span = None if raw.startswith(b":") else find_string(raw, _MODEL_PATHS)
    if span is None:
        return raw
    begin, end = span
    return raw[:begin] + orjson.dumps(model)[1:-1] + raw[end:]


class RenamingExchange:
    """An exchange (a translator of one request and its response) that also replaces the model's
    name. In the engine's answers, the model's name is replaced by the name that the app asked for.

    The name is replaced first. Then the inner exchange translates the answer to the app's format.
    """

    def __init__(
        self, inner: Exchange, model: str, is_active: Callable[[], bool] = lambda: True
    ) -> None:
        """Create an exchange (a translator of one request and its response) around `inner`, the
        exchange that translates the answers. `model` is the name that the app asked for. While
        `is_active` returns False, no name is replaced."""
        self.body = inner.body
        self.streamed = inner.streamed
        self._inner = inner
        self._model = model
        self._is_active = is_active

    @property
    def response_id(self) -> str | None:
        """Id that the inner translator `inner` has chosen for the answer. None if the inner
        translator does not choose ids."""
        return getattr(self._inner, "response_id", None)

    def answer(self, raw: bytes) -> bytes:
        return self._inner.answer(self._renamed(raw))

    def can_show(self, answer: Answer) -> bool:
        return self._inner.can_show(answer)

    def event(self, event: bytes) -> bytes:
        return self._inner.event(self._renamed(event))

    def keep_alive(self) -> bytes:
        return self._inner.keep_alive()

    def end_with_error(self, error: Json) -> bytes:
        return self._inner.end_with_error(error)

    def _renamed(self, raw: bytes) -> bytes:
        return with_model_name(raw, self._model) if self._is_active() else raw
