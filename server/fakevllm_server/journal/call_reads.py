"""Read captured calls (model calls with their tokens) from the journal, the server's SQLite
file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from fakevllm_server.journal.compression import decompress_facts, decompress_numbers
from fakevllm_server.journal.prompts import PromptReader
from fakevllm_server.journal.rows import CorruptCall, parse_call_row
from fakevllm_server.types.calls import RecordedCall

CALL_COLUMNS = "prompt, is_compressed, prompt_ids, response_ids, logprobs, facts_json, digest"
"""The columns of the table `calls` that `CallReader.parse` needs."""
_OF_OWNER = f"SELECT {CALL_COLUMNS} FROM calls WHERE owner = ? ORDER BY seq"


class CallReader:
    """A reader of captured calls (model calls with their tokens). The reader keeps the prompts of
    these calls in memory (see PromptReader)."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._prompts = PromptReader(db)

    def of_owner(self, owner: str) -> list[RecordedCall]:
        """Return the model calls of `owner`, in order. `owner` is an episode or a sibling (one of
        the answers that were sampled for a request). Raises CorruptCall if a call does not match
        its stored digest."""
        return [self.parse(row) for row in self._db.exec_driver_sql(_OF_OWNER, (owner,))]

    def parse(self, row: Sequence[Any]) -> RecordedCall:
        """Return the call of a row with the columns CALL_COLUMNS. Raises CorruptCall if the call
        does not match its stored digest."""
        prompt_id, is_compressed, prompt_ids, response_ids, logprobs, facts_json, digest = row
        try:
            if is_compressed:
                response_ids = decompress_numbers(response_ids)
                logprobs = None if logprobs is None else decompress_numbers(logprobs)
                facts_json = decompress_facts(facts_json)
            if prompt_id is not None:
                prompt_ids = self._prompts.read(prompt_id)
            elif is_compressed:
                prompt_ids = decompress_numbers(prompt_ids) if prompt_ids else b""
        except ValueError as error:
            raise CorruptCall from error
        return parse_call_row((prompt_ids, response_ids, logprobs, facts_json, digest))
