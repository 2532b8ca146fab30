"""What an answer says of a request: taken, or refused, and in which words. What is sampled is not
compared here; tests/differential does that."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tests.differential.asking import Seen
from tests.differential.masking import Json, Mask
from tests.differential.streams import events_of

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
WHOLE, CUT = "whole", "cut off"


@dataclass(frozen=True, slots=True)
class Verdict:
    status: int
    media: str
    """Of the answer, without parameters."""
    end: str
    error: str
    """The body where it is no 200, the error in a stream; "" where there is none."""
    took_s: float = field(compare=False)

    def __str__(self) -> str:
        return f"{self.status} {self.media} {self.end} {self.error[:1500]}"


def verdict(seen: Seen, took_s: float) -> Verdict:
    media = seen.header("content-type").partition(";")[0]
    end = WHOLE if seen.is_whole else CUT
    return Verdict(seen.status, media, end, _ADDRESS.sub("0x…", _error(seen)), took_s)


def _error(seen: Seen) -> str:
    if seen.status != 200:
        return _masked(seen.body)
    if not seen.is_stream:
        return ""
    errors = [event.data for event in events_of(seen.body) if _is_error(event.json)]
    return "\n".join(_masked(error.encode()) for error in errors)


def _is_error(event: Json | None) -> bool:
    return event is not None and (event.get("error") is not None or event.get("type") == "error")


def _masked(body: bytes) -> str:
    try:
        return json.dumps(Mask()(json.loads(body)), ensure_ascii=False)
    except ValueError:
        return Mask().text(body.decode(errors="replace"))
