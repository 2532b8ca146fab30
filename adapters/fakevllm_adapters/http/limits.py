"""What one request may ask for, and how many may ask at a time. Pure.

The limits are far beyond what apps need; they are there for the small request that costs much. All
of them can be set, all are refused in vLLM's words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Any, cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.http.asgi import MAX_BODY_BYTES, json_object
from fakevllm_adapters.protocol.errors import WireError, bad_request, error_body
from fakevllm_adapters.protocol.keys import fingerprint

RETRY_AFTER_S = 2
"""SDKs sleep for it literally."""

NOT_FOR_CLIENTS = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
        *("api_base", "api_key", "api_type", "api_version", "base_url"),
        *("custom_llm_provider", "extra_headers"),
    }
)
"""Body fields that steer an engine's insides, or name another upstream to a gateway behind us."""

_BRACKETS = b'"[]{}'
_ALL_BUT_BRACKETS = bytes(sorted(set(range(256)) - set(_BRACKETS)))
_AS_BITS = bytes.maketrans(b"[{]}", b"1100")
_BITS = 8
_RISE = [2 * bits.bit_count() - _BITS for bits in range(2**_BITS)]
"""What so many brackets in a row, an opening one being a 1, add to the level."""
_PEAK = [
    max(accumulate(1 if bits >> at & 1 else -1 for at in reversed(range(_BITS))))
    for bits in range(2**_BITS)
]
"""The highest level among them, counted from the one before them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Each as the highest value that is let through."""

    body_bytes: int = MAX_BODY_BYTES
    num_headers: int = 256
    """As h11 under vLLM counts them."""
    header_bytes: int = 64 * 2**10
    """Names and values together."""
    json_depth: int = 128
    """Below the 254 levels orjson writes, with room for what is wrapped around a body."""
    num_choices: int = 64
    """`n` times the bodies that will be sampled from it."""
    num_stop: int = 64
    stop_chars: int = 1000
    num_bad_words: int = 256
    num_tools: int = 512
    num_logit_bias: int = 1024

    def headers_refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> WireError | None:
        if len(headers) > self.num_headers:
            return _too_much(f"The request has more than {self.num_headers} headers.")
        if sum(len(name) + len(value) for name, value in headers) > self.header_bytes:
            return _too_much(f"The request's headers are larger than {self.header_bytes} bytes.")
        return None

    def depth_refusal(self, raw: bytes) -> WireError | None:
        if is_deeper(raw, self.json_depth):
            return _too_much(
                "There was an error parsing the body: "
                f"its JSON is nested deeper than {self.json_depth} levels."
            )
        return None

    def body_refusal(self, body: Json, num_siblings: int = 1) -> WireError | None:
        """The first field that asks for too much. A field of a wrong type is the engine's to
        refuse. `num_siblings`: bodies that will be sampled, each with `n` choices."""
        n = _count(body.get("n")) * _num_prompts(body.get("prompt"))
        # never below 1: how many siblings there are is ours to answer for, not the app's
        most = max(1, self.num_choices // num_siblings)
        if n > most:
            return bad_request(f"n must be at most {most}, got {n}.", "n")
        return self._words_refusal(body) or self._sizes_refusal(body)

    def _words_refusal(self, body: Json) -> WireError | None:
        most = {
            "stop": self.num_stop,
            "stop_sequences": self.num_stop,
            "bad_words": self.num_bad_words,
        }
        for name, num in most.items():
            words = body.get(name)
            if words is None:
                continue
            listed = cast(list[Any], words) if isinstance(words, list) else [words]
            if len(listed) > num:
                return _too_many(name, num, len(listed))
            longest = max((len(word) for word in listed if isinstance(word, str)), default=0)
            if longest > self.stop_chars:
                message = f"`{name}` must have strings of at most {self.stop_chars} characters."
                return bad_request(message, name, longest)
        return None

    def _sizes_refusal(self, body: Json) -> WireError | None:
        most = {
            "tools": self.num_tools,
            "functions": self.num_tools,
            "logit_bias": self.num_logit_bias,
        }
        for name, num in most.items():
            value = body.get(name)
            if isinstance(value, (list, dict)) and len(cast(Sized, value)) > num:
                return _too_many(name, num, len(cast(Sized, value)))
        return None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A client's body that may go on."""

    raw: bytes
    """The client's own bytes, but for fields that had to be taken out."""
    body: Json | None
    """None where we cannot read it as a JSON object: an engine words that."""
    removed: tuple[str, ...] = ()


def admitted(
    raw: bytes, limits: Limits, num_siblings: int = 1, allowed: Collection[str] = ()
) -> Admitted:
    """Raises WireError where the body asks for too much."""
    refusal = limits.depth_refusal(raw)
    if refusal is not None:
        raise refusal
    body = json_object(raw)
    if body is None:
        return _unread(raw, allowed)
    refusal = limits.body_refusal(body, num_siblings)
    if refusal is not None:
        raise refusal
    body, removed = stripped(body, allowed)
    return Admitted(rewritten(raw, without=removed) if removed else raw, body, removed)


def rewritten(raw: bytes, *, without: Collection[str] = (), **changed: Any) -> bytes:
    """A JSON object that orjson can read, with other fields. Written anew by Python's json: orjson
    makes floats of integers beyond 64 bits, and an engine would refuse another number than was
    sent."""
    kept = {name: value for name, value in json.loads(raw).items() if name not in without}
    return json.dumps(kept | changed, ensure_ascii=False, separators=(",", ":")).encode()


def stripped(body: Json, allowed: Collection[str] = ()) -> tuple[Json, tuple[str, ...]]:
    """The body without what is not for clients, and the names that went. The same object where
    none did."""
    removed = tuple(name for name in body if name in NOT_FOR_CLIENTS and name not in allowed)
    if not removed:
        return body, ()
    return {name: value for name, value in body.items() if name not in removed}, removed


def _unread(raw: bytes, allowed: Collection[str]) -> Admitted:
    """What orjson cannot read and Python's json, which vLLM reads with, can: NaN, a lone surrogate,
    a byte order mark, UTF-16. It goes on as it is, but must not carry past us what others may
    not."""
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return Admitted(raw, None)
    if not isinstance(value, dict):
        return Admitted(raw, None)
    body, removed = stripped(cast(Json, value), allowed)
    return Admitted(json.dumps(body).encode() if removed else raw, None, removed)


def is_deeper(raw: bytes, depth: int) -> bool:
    """Whether arrays and objects in a JSON text nest deeper than `depth`, without parsing it.
    Right for every valid text in UTF-8; others may be taken for deeper than they are.

    >>> is_deeper(b'[{"a": "[[["}]', 2), is_deeper(b"[[[]]]", 2)
    (False, True)
    """
    if raw.count(b"[") + raw.count(b"{") <= depth:
        return False
    if b"\0" in raw:  # UTF-16 or UTF-32: strings cannot be told from the rest byte by byte
        return True
    # Escapes go first, then everything but quotes and brackets, then strings without brackets;
    # of what is left every second part is a string.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_BUT_BRACKETS)
    outside = b"".join(plain.replace(b'""', b"").split(b'"')[::2])
    return _peaks_above(outside, depth)


def _peaks_above(brackets: bytes, depth: int) -> bool:
    """Eight at a time, and no Python in the loop: a body may be 30 MB of brackets."""
    bits = brackets.translate(_AS_BITS)
    bits += b"0" * (-len(bits) % _BITS)
    eights = int(bits or b"0", 2).to_bytes(len(bits) // _BITS)
    levels = accumulate(map(_RISE.__getitem__, eights), initial=0)
    return any(map(depth.__lt__, map(add, levels, map(_PEAK.__getitem__, eights))))


class OpenCalls:
    """Counts the calls that are open, all and by key. 0: no limit."""

    def __init__(self, most: int = 0, most_per_key: int = 0) -> None:
        self._most = most
        self._most_per_key = most_per_key
        self._num = 0
        self._by_key: Counter[str] = Counter()

    def enter(self, key: str | None) -> WireError | None:
        """The refusal, or None: then the call counts until it leaves."""
        who = _who(key)
        if 0 < self._most <= self._num:
            return _busy(f"{self._most} requests are open, which is the most at a time.")
        if 0 < self._most_per_key <= self._by_key[who]:
            return _busy(f"This key has {self._most_per_key} requests open, its most at a time.")
        self._num += 1
        self._by_key[who] += 1
        return None

    def leave(self, key: str | None) -> None:
        who = _who(key)
        self._num -= 1
        self._by_key[who] -= 1
        if self._by_key[who] == 0:
            del self._by_key[who]  # so that it never holds more than there are calls

    @property
    def num(self) -> int:
        return self._num


def _who(key: str | None) -> str:
    return fingerprint(key) if key else ""


def _num_prompts(prompt: object) -> int:
    """A list of texts or of lists of ids is several prompts; one of ids is one."""
    if not isinstance(prompt, list):
        return 1
    listed = cast(list[object], prompt)
    return max(1, len(listed)) if not isinstance(next(iter(listed), 0), int) else 1


def _count(value: object) -> int:
    """`n` as pydantic reads it; 1 for what it refuses."""
    try:
        return int(value) if isinstance(value, (int, float, str)) else 1
    except (ValueError, OverflowError):
        return 1


def _too_many(name: str, most: int, got: int) -> WireError:
    return bad_request(f"`{name}` must have at most {most} entries.", name, got)


def _too_much(message: str) -> WireError:
    return WireError(400, error_body(message, "Bad Request", 400))


def _busy(message: str) -> WireError:
    return WireError(429, error_body(message, "Too Many Requests", 429), RETRY_AFTER_S)
