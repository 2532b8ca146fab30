"""What has been acknowledged: a request that is sent again takes no second effect, and gets the
words the first one got."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from pydantic import BaseModel

MAX_REMEMBERED = 2_000
"""Here; older ones are looked up in the journal."""


class OtherBody(Exception):
    """The same name came with other words: what was acknowledged stands."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    body_hash: bytes
    reply: BaseModel
    place: int
    """In the journal's queue: not to be said again before it is there."""


class Submissions:
    """The latest. Pure."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, Acknowledged] = OrderedDict()

    def find(self, key: str) -> Acknowledged | None:
        return self._latest.get(key)

    def remember(self, key: str, latest: Acknowledged, reached: int) -> None:
        """`reached`: the place up to which the journal is written, so that it can be asked."""
        self._latest[key] = latest
        while len(self._latest) > MAX_REMEMBERED and self._oldest.place <= reached:
            self._latest.popitem(last=False)

    @property
    def _oldest(self) -> Acknowledged:
        return next(iter(self._latest.values()))


def hash_of(request: BaseModel) -> bytes:
    """Of all that decides something; metadata does not, and may be too deep to be written."""
    exclude = {"metadata": True, "workflow_output": {"metadata"}}
    told = request.model_dump_json(exclude=exclude)
    return hashlib.blake2b(told.encode(), digest_size=16).digest()
