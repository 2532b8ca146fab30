"""Limits on a request's headers, on the nesting of its body, and on fields that multiply work.

The limits stop small requests that cause much work. Each limit is a setting. The default values are
far higher than apps need. A refused request gets an error in vLLM's form. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.http.asgi import MAX_BODY_BYTES
from fakevllm_adapters.http.json_depth import is_deeper
from fakevllm_adapters.protocol.errors import WireError, bad_request, error_body

_SINGLE_HEADERS = frozenset({b"host", b"authorization", b"x-api-key", b"content-length"})
"""Headers that may occur only once. If such a header had two values, a proxy in front of this
process might check one value, and this process might use the other value."""

_WORD_FIELDS = {"stop": "num_stop", "stop_sequences": "num_stop", "bad_words": "num_bad_words"}
"""Fields with a word or a list of words, and the limits on the number of words."""
_SIZED_FIELDS = {
    "tools": "num_tools",
    "functions": "num_tools",
    "logit_bias": "num_logit_bias",
    "stop_token_ids": "num_stop_token_ids",
    "allowed_token_ids": "num_allowed_token_ids",
}
"""Other fields with entries, and the limits on the number of entries."""
_LIMITED_FIELDS = frozenset(_WORD_FIELDS | _SIZED_FIELDS)

MAX_REQUEST_ID_CHARS = 256
"""Maximum length of `request_id`. The id is repeated in every event of a stream."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on a request. Each limit is the highest value that is accepted."""

    body_bytes: int = MAX_BODY_BYTES
    """Size of the body. A larger body gets status 413."""
    num_headers: int = 256
    """Number of headers. Under vLLM, the HTTP library h11 has the same limit."""
    header_bytes: int = 64 * 2**10
    """Size of all header names and values."""
    json_depth: int = 128
    """Nesting of the body. The limit is below the 254 levels that orjson can write, because a body
    may be written inside other objects."""
    num_choices: int = 64
    """Largest value of `n` × number of prompts × number of siblings sampled from the body."""
    num_stop: int = 64
    """Number of stop strings."""
    stop_chars: int = 1000
    """Length of a stop string or bad word."""
    num_bad_words: int = 256
    """Number of bad words."""
    num_tools: int = 512
    """Number of tools."""
    num_logit_bias: int = 1024
    """Number of entries of `logit_bias`."""
    num_stop_token_ids: int = 1024
    """Number of entries of `stop_token_ids`."""
    num_allowed_token_ids: int = 2**18
    """Number of entries in `allowed_token_ids`. The default exceeds the vocabulary of any model."""

    def headers_refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> WireError | None:
        """Return a 400 error if the headers exceed a limit, else None.

        A 400 error is also returned if a header in `_SINGLE_HEADERS` is repeated.
        """
        if len(headers) > self.num_headers:
            return _bad_request(f"The request has more than {self.num_headers} headers.")
        num_bytes, names = 0, list[bytes]()
        for name, value in headers:
            num_bytes += len(name) + len(value)
            if name in _SINGLE_HEADERS:
                names.append(name)
        if num_bytes > self.header_bytes:
            return _bad_request(f"The request's headers are larger than {self.header_bytes} bytes.")
        if len(names) != len(set(names)):
            name = next(name for name in names if names.count(name) > 1).decode()
            return _bad_request(f"The request has more than one `{name}` header.")
        return None

    def depth_refusal(self, raw: bytes) -> WireError | None:
        """Return a 400 error if the JSON of a body is nested too deeply, else None."""
        if is_deeper(raw, self.json_depth):
            return _bad_request(
                "There was an error parsing the body: "
                f"its JSON is nested deeper than {self.json_depth} levels."
            )
        return None

    def body_refusal(self, body: Json, num_siblings: int = 1) -> WireError | None:
        """Return a 400 error for the first field of a body that exceeds its limit. Return None if
        all fields are within their limits.

        `num_siblings` is the number of requests that will be made from the body, each with `n`
        choices. Fields of a wrong type are not checked here, because the engine refuses them.
        """
        n = _count(body.get("n")) * _num_prompts(body.get("prompt"))
        # never below 1: the app is not responsible for the number of siblings
        most = max(1, self.num_choices // num_siblings)
        if n > most:
            return bad_request(f"n must be at most {most}, got {n}.", "n")
        request_id: object = body.get("request_id")
        if isinstance(request_id, str) and len(request_id) > MAX_REQUEST_ID_CHARS:
            message = f"`request_id` must have at most {MAX_REQUEST_ID_CHARS} characters."
            return bad_request(message, "request_id", len(request_id))
        if _LIMITED_FIELDS.isdisjoint(body):
            return None
        return self._words_refusal(body) or self._sizes_refusal(body)

    def _words_refusal(self, body: Json) -> WireError | None:
        for name, limit in _WORD_FIELDS.items():
            words = body.get(name)
            if words is None:
                continue
            num: int = getattr(self, limit)
            listed = cast(list[Any], words) if isinstance(words, list) else [words]
            if len(listed) > num:
                return _too_many(name, num, len(listed))
            longest = max((len(word) for word in listed if isinstance(word, str)), default=0)
            if longest > self.stop_chars:
                message = f"`{name}` must have strings of at most {self.stop_chars} characters."
                return bad_request(message, name, longest)
        return None

    def _sizes_refusal(self, body: Json) -> WireError | None:
        for name, limit in _SIZED_FIELDS.items():
            value, num = body.get(name), getattr(self, limit)
            if isinstance(value, (list, dict)) and len(cast(Sized, value)) > num:
                return _too_many(name, num, len(cast(Sized, value)))
        return None


def _num_prompts(prompt: object) -> int:
    """Return the number of prompts in the field `prompt`.

    A string is one prompt. A list of token ids is one prompt too. Any other list has one prompt per
    element.
    """
    if not isinstance(prompt, list):
        return 1
    listed = cast(list[object], prompt)
    return max(1, len(listed)) if not isinstance(next(iter(listed), 0), int) else 1


def _count(value: object) -> int:
    """Return the number in the field `n`, as pydantic would parse it. Return 1 if pydantic would
    refuse the value."""
    try:
        return int(value) if isinstance(value, (int, float, str)) else 1
    except (ValueError, OverflowError):
        return 1


def _too_many(name: str, most: int, got: int) -> WireError:
    return bad_request(f"`{name}` must have at most {most} entries.", name, got)


def _bad_request(message: str) -> WireError:
    return WireError(400, error_body(message, "Bad Request", 400))
