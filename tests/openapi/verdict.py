"""Reduce a response to a verdict: the request was accepted, or refused with which error.

Sampled texts are not compared here. tests/differential does that.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tests.differential.masking import Json, Mask
from tests.differential.raw_http import RawResponse
from tests.differential.streams import parse_events

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
WHOLE, CUT = "whole", "cut off"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one request. Verdicts are compared without `took_s`."""

    status: int
    media: str
    """Media type of the response, without parameters."""
    end: str
    """WHOLE or CUT."""
    error: str
    """Body of a status other than 200, or the errors in a stream, with masked ids. "" without
    error."""
    took_s: float = field(compare=False)

    def __str__(self) -> str:
        return f"{self.status} {self.media} {self.end} {self.error[:1500]}"


def create_verdict(response: RawResponse, took_s: float) -> Verdict:
    """Return the verdict of a response that took `took_s` seconds."""
    media = response.header("content-type").partition(";")[0]
    end = WHOLE if response.is_whole else CUT
    return Verdict(response.status, media, end, _ADDRESS.sub("0x…", _error(response)), took_s)


def _error(response: RawResponse) -> str:
    if response.status != 200:
        return _masked(response.body)
    if not response.is_stream:
        return ""
    errors = [event.data for event in parse_events(response.body) if _is_error(event.json)]
    return "\n".join(_masked(error.encode()) for error in errors)


def _is_error(event: Json | None) -> bool:
    return event is not None and (event.get("error") is not None or event.get("type") == "error")


def _masked(body: bytes) -> str:
    try:
        return json.dumps(Mask()(json.loads(body)), ensure_ascii=False)
    except ValueError:
        return Mask().text(body.decode(errors="replace"))
