"""What has been acknowledged: a request that is sent again takes no second effect, and gets the
words the first one got."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from pydantic import BaseModel

from fakevllm_adapters.protocol.swarm import EndGroupReply

MAX_REMEMBERED = 2_000
"""Here; older ones are looked up in the journal."""
MAX_WITH_CALLS = 100
"""Of them with the calls of their groups, which may be megabytes: the journal has those of pooled
groups as well, those of dropped ones are nowhere else."""


class IdempotencyConflict(Exception):
    """The same name came with other words: what was acknowledged stands."""


@dataclass(frozen=True, slots=True)
class CachedReply:
    body_hash: bytes
    reply: BaseModel
    place: int
    """In the journal's queue: not to be said again before it is there."""


class SubmissionCache:
    """The latest. Pure."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, CachedReply] = OrderedDict()
        self._with_calls: deque[str] = deque()
        """Keys; of some the rest is forgotten."""

    def find(self, key: str) -> CachedReply | None:
        return self._latest.get(key)

    def remember(self, key: str, latest: CachedReply, reached: int) -> None:
        """`reached`: the place up to which the journal is written, so that it can be asked."""
        self._latest[key] = latest
        if isinstance(latest.reply, EndGroupReply) and latest.reply.calls:
            self._with_calls.append(key)
            self._bound_calls()
        while len(self._latest) > MAX_REMEMBERED and self._oldest.place <= reached:
            self._latest.popitem(last=False)

    def _bound_calls(self) -> None:
        while len(self._with_calls) > MAX_WITH_CALLS:
            key = self._with_calls.popleft()
            known = self._latest.get(key)
            if known is not None:
                slim = known.reply.model_copy(update={"calls": []})
                self._latest[key] = replace(known, reply=slim)

    @property
    def _oldest(self) -> CachedReply:
        return next(iter(self._latest.values()))


def hash_of(request: BaseModel) -> bytes:
    """Of all that decides something; metadata does not, and may be too deep to be written."""
    exclude = {"metadata": True, "workflow_output": {"metadata"}}
    told = request.model_dump_json(exclude=exclude)
    return hashlib.blake2b(told.encode(), digest_size=16).digest()
