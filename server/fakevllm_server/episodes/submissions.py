"""Cache of replies to requests that must take effect only once. A repeated request gets the reply
to the first request."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from pydantic import BaseModel

from fakevllm_adapters.protocol.swarm import EndGroupReply

MAX_REMEMBERED = 2_000
"""Maximum number of replies in memory. Older replies are read from the journal."""
MAX_WITH_CALLS = 100
"""Maximum number of replies that are cached with the model calls of their groups. These calls may
take megabytes. The journal also stores the calls of pooled groups, but not those of dropped
groups."""


class IdempotencyConflict(Exception):
    """Error for a request with the idempotency key of an earlier request, but with a different
    body. The earlier request stays valid."""


@dataclass(frozen=True, slots=True)
class CachedReply:
    """The reply to a request, with a hash of the request's body. The hash shows whether a later
    request with this idempotency key is a repetition of the first request."""

    body_hash: bytes
    reply: BaseModel
    position: int
    """Position of the request's change in the journal's queue. The change must be on disk before
    the reply is sent again."""


class SubmissionCache:
    """A cache of the latest replies, by the idempotency keys of their requests."""

    def __init__(self) -> None:
        self._replies: OrderedDict[str, CachedReply] = OrderedDict()
        self._with_calls: deque[str] = deque()
        """Idempotency keys of the replies with calls, oldest first. Some of these replies may have
        been removed from the cache already."""

    def find(self, key: str) -> CachedReply | None:
        """Return the cached reply to the request with this idempotency key, or None if it is not
        cached."""
        return self._replies.get(key)

    def remember(self, key: str, cached: CachedReply, written_position: int) -> None:
        """Add a reply to the cache. If the cache is full, remove the oldest replies that can be
        read from the journal (the server's SQLite file).

        `written_position` is a position in the queue of journal changes. All changes up to this
        position are on disk.
        """
        self._replies[key] = cached
        if isinstance(cached.reply, EndGroupReply) and cached.reply.calls:
            self._with_calls.append(key)
            self._bound_calls()
        while len(self._replies) > MAX_REMEMBERED and self._oldest.position <= written_position:
            self._replies.popitem(last=False)

    def _bound_calls(self) -> None:
        """To save memory, delete the model calls in old cached replies. Only the newest
        MAX_WITH_CALLS replies keep their model calls."""
        while len(self._with_calls) > MAX_WITH_CALLS:
            key = self._with_calls.popleft()
            cached = self._replies.get(key)
            if cached is not None:
                without_calls = cached.reply.model_copy(update={"calls": [], "prompts": []})
                self._replies[key] = replace(cached, reply=without_calls)

    @property
    def _oldest(self) -> CachedReply:
        return next(iter(self._replies.values()))


def hash_of(request: BaseModel) -> bytes:
    """Return a hash of all fields of a request that can change its effect.

    The hash leaves out the metadata, which has no effect and may be nested too deeply for
    serialization. The hash also leaves out the digest of the reward hooks, because older proxies do
    not send this digest.
    """
    exclude = {"metadata": True, "hook_hash": True, "workflow_output": {"metadata"}}
    body = request.model_dump_json(exclude=exclude)
    return hashlib.blake2b(body.encode(), digest_size=16).digest()
