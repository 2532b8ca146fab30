"""Read the usual event of a chat stream without parsing its JSON. The usual event has one token
with its logprob.

A stream has one such event per token. A usual event differs from the previous event only in the
token, so a comparison with the previous event is enough. The other way is to parse the event, hide
two of its fields, and serialise the event again. This costs several times as much. The patterns
match only events for which both ways give the same bytes. All other events must be parsed. The
module does no I/O.
"""

from __future__ import annotations

import re
from functools import lru_cache

import orjson

_PLAIN = rb'"[^"\\\x00-\x1f]*"'
"""A JSON string without escapes."""
_TEXT = rb'"[^"\\\x00-\x1f]*(?:\\["\\bfnrt][^"\\\x00-\x1f]*)*"'
"""A JSON string with only those escapes that orjson also writes."""
_NUMBER = rb"-?(?:0|[1-9]\d{0,17})(?:\.\d+)?(?:[eE][-+]?\d{1,2})?"
"""A number that a 64-bit float can hold: its exponent has at most two digits."""
_ID = rb"(?:0|[1-9]\d{0,8})"
"""A token id with at most nine digits. Such a number is below MAX_ID."""
_BYTES = rb"(?:null|\[[\d,]*\])"
"""The bytes of a token. They are hidden and not recorded, so they are not checked further."""
_NULLS = (
    rb'(?:,"(?:stop_reason|weight_versions|routed_experts|prompt_token_ids|prompt_logprobs'
    rb'|prompt_text)":null)*'
)
_TOP_NULLS = (
    rb'(?:,"(?:usage|system_fingerprint|prompt_token_ids|prompt_text|kv_transfer_params'
    rb'|ec_transfer_params|metrics)":null)*'
)
_HEAD = (
    rb'data: \{"id":%b,"object":"chat\.completion\.chunk","created":[1-9]\d{0,14},"model":%b'
    rb',"choices":\[\{"index":0,"delta":\{"(?:content|reasoning|reasoning_content)":'
) % (_PLAIN, _PLAIN)
_TOKEN = rb'%b\},"logprobs":()\{"content":\[\{"token":%b,"logprob":(%b),"bytes":%b' % (
    *(_TEXT, _TEXT),
    *(_NUMBER, _BYTES),
)
_MIDDLE = rb',"top_logprobs":\[\]\}\]\}(,"finish_reason":null%b,"token_ids":)\[' % _NULLS
_TAIL = rb"\](%b\}\]%b\}\n\n)" % (_NULLS, _TOP_NULLS)
_EVENT = re.compile(rb"(%b)%b%b(%b)%b" % (_HEAD, _TOKEN, _MIDDLE, _ID, _TAIL))


@lru_cache(32)
def _token_pattern(middle: bytes, tail: bytes) -> re.Pattern[bytes]:
    """Return a pattern for the rest of an event after its head. The head is the part before the
    token's text. The rest has the token, the constant bytes `middle`, the token's id, and the
    constant bytes `tail`."""
    constants = rb',"top_logprobs":\[\]\}\]\}', re.escape(middle), re.escape(tail)
    return re.compile(rb"%b%b%b\[(%b)\]%b" % (_TOKEN, *constants[:2], _ID, constants[2]))


class TokenEventReader:
    """The reader of the events of one chat stream. The reader collects the tokens of the events."""

    def __init__(self) -> None:
        self._head = b"\0"
        """The bytes of the previous event before its token's text. No event begins with the
        initial value."""
        self._rest = _EVENT
        self._hidden_end = b""
        """The end of an event as the app gets it, with null for the logprobs and the token id."""
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []

    def read(self, event: bytes) -> bytes | None:
        """Record the token of a usual event (one token with its logprob). Return the event as the
        app gets it, with null in place of the token's id and logprob.

        If the event is not a usual one, record nothing, and return None. The caller must then parse
        the event. Raises ValueError if the event is not valid UTF-8.
        """
        match = None
        if event.startswith(self._head):
            match = self._rest.fullmatch(event, len(self._head))
        if match is None:
            if not self._learn(event):
                return None
            match = self._rest.fullmatch(event, len(self._head))
            assert match is not None, "the pattern was made from this event"
        if not event.isascii():
            event.decode()
        self._logprobs.append(match[2])
        self._ids.append(match[3])
        return event[: match.start(1)] + self._hidden_end

    def take_tokens(self) -> tuple[list[int], list[int | float]]:
        """Return the ids and the logprobs of the tokens that `read` has recorded since the last
        call of this method."""
        ids = orjson.loads(b"[" + b",".join(self._ids) + b"]")
        logprobs = orjson.loads(b"[" + b",".join(self._logprobs) + b"]")
        self._ids.clear()
        self._logprobs.clear()
        return ids, logprobs

    def _learn(self, event: bytes) -> bool:
        """Take the constant parts of a usual event from `event`, so that the following events are
        compared with them. Return False if `event` is not a usual event and must be parsed."""
        match = _EVENT.fullmatch(event)
        if match is None:
            return False
        head, _, _, middle, _, tail = match.groups()
        self._head, self._rest = head, _token_pattern(middle, tail)
        self._hidden_end = b"null%bnull%b" % (middle, tail)
        return True
