"""What is decided once, written to the journal, and acknowledged only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from fakevllm_server.journal import reads
from fakevllm_server.journal.facts import Submission
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.writer import Change
from fakevllm_server.submissions import Acknowledged, OtherBody, Submissions, hash_of

Reply = TypeVar("Reply", bound=BaseModel)

Decided = tuple[Reply, Callable[[Submission], Change] | None]
"""A reply, and the change it acknowledges; None where there is none."""


class Acknowledging:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._submissions = Submissions()

    async def once(
        self,
        key: str,
        request: BaseModel,
        kind: type[Reply],
        decide: Callable[[], Decided[Reply]],
        *,
        is_new: bool = False,
    ) -> Reply:
        """What was answered to the same before; else what is decided now, once it is on disk.
        `is_new`: what it ends is open here, so nothing was ever answered. Raises OtherBody,
        JournalTrouble."""
        body_hash = hash_of(request)
        known = None if is_new else await self._known(key, body_hash, kind)
        if known is not None:
            return known
        self._journal.check_room()
        reply, change = decide()
        if change is None:
            return reply
        submission = Submission(key, body_hash, reply.model_dump_json(exclude={"calls"}))
        place = self._journal.put(change(submission))
        latest = Acknowledged(body_hash, reply, place)
        self._submissions.remember(key, latest, self._journal.reached)
        await self._journal.reach(place)
        return reply

    async def _known(self, key: str, body_hash: bytes, kind: type[Reply]) -> Reply | None:
        """What was answered to the same before. Raises OtherBody, JournalTrouble."""
        latest = self._submissions.find(key)
        if latest is not None:
            if latest.body_hash != body_hash:
                raise OtherBody
            await self._journal.reach(latest.place)
            assert isinstance(latest.reply, kind)
            return latest.reply
        kept = self._journal.read(reads.submission, key)
        if kept is None:
            return None
        if kept.body_hash != body_hash:
            raise OtherBody
        return kind.model_validate_json(kept.reply_json)
