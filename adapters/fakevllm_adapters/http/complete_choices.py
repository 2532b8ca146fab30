"""The choices of one call, each in one part of a response as soon as it is complete.

A stream has one event per token, which engine and server would write, search and parse for each
choice. The bundled engines send a choice as one part instead, if the server asks for it: the answer
that a call of its own would have had, and the tokens apart from it. Only the server sends the
header, so other clients of an engine see nothing of this. The module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import orjson

from fakevllm_adapters.http.answer_parts import AnswerPart

Json = dict[str, Any]

CHOICES_HEADER = "X-Fakevllm-Complete-Choices"
"""Request header with which the server asks for complete choices (value ASKED)."""
ASKED = "1"
_TOKENS_LENGTH = b"x-fakevllm-tokens-length"
"""Header of a part. It has the number of bytes in front of the answer, which have the tokens."""


@dataclass(frozen=True, slots=True)
class SentChoice:
    """One complete choice as it is sent, or the error that ended the call."""

    index: int
    tokens: Json
    """The choice's `token_ids`, `logprobs` (one number per token), `weight_versions`,
    `allowed_tokens` and `finish_reason`. For an error, an object with the key `error`."""
    answer: bytes
    """The answer that a call with one choice would have had: a JSON object, or a whole stream."""

    @property
    def num_bytes(self) -> int:
        """Size of the answer."""
        return len(self.answer)

    def to_part(self) -> AnswerPart:
        """Return the part of the response that sends this choice."""
        tokens = orjson.dumps(self.tokens)
        length = (_TOKENS_LENGTH, b"%d" % len(tokens))
        return AnswerPart(self.index, [length], tokens + self.answer)

    @staticmethod
    def from_part(part: AnswerPart) -> SentChoice:
        """Return the choice that a part of a response sends. Raises ValueError if the part is
        malformed."""
        length = int(dict(part.headers).get(_TOKENS_LENGTH, b""))
        tokens: Any = orjson.loads(part.body[:length])
        if not isinstance(tokens, dict):
            raise ValueError("the tokens of a choice are not an object")
        return SentChoice(part.index, cast(Json, tokens), part.body[length:])
