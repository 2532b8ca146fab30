"""Process each client request exactly once. The change that a request causes is on disk before the
request is acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from fakevllm_server.episodes.submissions import (
    CachedReply,
    IdempotencyConflict,
    SubmissionCache,
    hash_of,
)
from fakevllm_server.journal import reads
from fakevllm_server.journal.group_commit_writer import Change
from fakevllm_server.journal.rows import Submission
from fakevllm_server.journal.store import Journal

Reply = TypeVar("Reply", bound=BaseModel)

Decision = tuple[Reply, Callable[[Submission], Change] | None]
"""A reply, and a function that returns the change to write before the reply is sent. The function
is None if there is no change."""


class Acknowledger:
    """Processes each client request once. A request that is sent again gets the reply to the first
    request."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._cache = SubmissionCache()

    async def once(
        self,
        key: str,
        request: BaseModel,
        reply_type: type[Reply],
        decide: Callable[[], Decision[Reply]],
        *,
        is_new: bool = False,
    ) -> Reply:
        """Return the reply to a client's request. A new request is processed. A request that is
        sent again is not processed again, and gets the same reply.

        For a new request, `decide` returns the reply and the change to write. The method returns
        when the change is on disk.

        Set `is_new` if the request ends an episode that has not ended yet. The request is then
        certainly new, so the stored replies are not searched. Raises IdempotencyConflict if `key`
        was used with another body. Raises JournalError if the change is not written in time.
        """
        body_hash = hash_of(request)
        known = None if is_new else await self._find(key, body_hash, reply_type)
        if known is not None:
            return known
        self._journal.check_capacity()
        reply, change = decide()
        if change is None:
            return reply
        submission = Submission(key, body_hash, reply.model_dump_json(exclude={"calls"}))
        position = self._journal.put(change(submission))
        cached = CachedReply(body_hash, reply, position)
        self._cache.remember(key, cached, self._journal.written_position)
        await self._journal.wait_written(position)
        return reply

    async def _find(self, key: str, body_hash: bytes, reply_type: type[Reply]) -> Reply | None:
        """Return the stored reply to an earlier request with this key and body hash, parsed as
        `reply_type`. Return None if no request had this key. Raises IdempotencyConflict if the
        earlier request had another body."""
        cached = self._cache.find(key)
        if cached is not None:
            if cached.body_hash != body_hash:
                raise IdempotencyConflict
            await self._journal.wait_written(cached.position)
            assert isinstance(cached.reply, reply_type)
            return cached.reply
        stored = self._journal.look_up(reads.submission, key)
        if stored is None:
            return None
        if stored.body_hash != body_hash:
            raise IdempotencyConflict
        return reply_type.model_validate_json(stored.reply_json)
