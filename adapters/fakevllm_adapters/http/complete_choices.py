"""Send each choice of a call with several choices (`n` > 1) as one part of the response, as soon as
the choice is complete.

An ordinary stream has one event per token and choice. The engine would write all these events, and
the server would parse them. The bundled engines avoid this work if the server asks for complete
choices. Each part of such a response contains a choice's tokens and its answer. The answer has the
form of an answer to a call with only this choice.

Only the server asks for complete choices, with a header. Other clients of an engine get ordinary
responses.

The module does no I/O.
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
"""Header of a part: the number of bytes of the tokens, which precede the answer."""


@dataclass(frozen=True, slots=True)
class SentChoice:
    """One complete choice in the form in which it is sent, or the error that ended the call."""

    index: int
    tokens: Json
    """The choice's `token_ids`, `logprobs` (one number per token), `weight_versions`,
    `allowed_tokens` and `finish_reason`. For an error, an object with the key `error`."""
    answer: bytes
    """The answer that a call with one choice would have had: a JSON object, or a whole stream."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the choice's answer, the field `answer`."""
        return len(self.answer)

    def to_part(self) -> AnswerPart:
        """Return this choice as an AnswerPart, which is one part of a response with several
        answers."""
        tokens = orjson.dumps(self.tokens)
        length = (_TOKENS_LENGTH, b"%d" % len(tokens))
        return AnswerPart(self.index, [length], tokens + self.answer)

    @staticmethod
    def from_part(part: AnswerPart) -> SentChoice:
        """Return the choice that an AnswerPart contains. Raises ValueError if the part is
        malformed."""
        length = int(dict(part.headers).get(_TOKENS_LENGTH, b""))
        tokens: Any = orjson.loads(part.body[:length])
        if not isinstance(tokens, dict):
            raise ValueError("the tokens of a choice are not an object")
        return SentChoice(part.index, cast(Json, tokens), part.body[length:])
