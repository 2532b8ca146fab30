"""Decide on a request once, write the decision to the journal, and only then acknowledge it."""

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
from fakevllm_server.journal.rows import Submission
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.writer import Change

Reply = TypeVar("Reply", bound=BaseModel)

Decision = tuple[Reply, Callable[[Submission], Change] | None]
"""A reply, and a function that makes the change it acknowledges; None if nothing changes."""


class Acknowledger:
    """Gives a repeated request the reply to the first one."""

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
        """Return the reply to an equal earlier request, or decide now and wait for the disk.

        Pass `is_new` if what the request ends is still open, so that no earlier reply can exist.
        Raises IdempotencyConflict, JournalError.
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
        """Return the reply to an equal earlier request; None if there was none."""
        cached = self._cache.find(key)
        if cached is not None:
            if cached.body_hash != body_hash:
                raise IdempotencyConflict
            await self._journal.wait_written(cached.position)
            assert isinstance(cached.reply, reply_type)
            return cached.reply
        stored = self._journal.read(reads.submission, key)
        if stored is None:
            return None
        if stored.body_hash != body_hash:
            raise IdempotencyConflict
        return reply_type.model_validate_json(stored.reply_json)
