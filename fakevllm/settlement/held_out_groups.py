"""Find recorded groups (requests with their sampled answers) that quote a held-out row. Held-out
rows are reserved for evaluation.

A group may have been recorded before the quoted row was held out. Such a group must not be trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fakevllm.admission.admission_rules import ServeOnlyReason
from fakevllm.admission.held_out import HeldOutRows
from fakevllm.ledger.records import EVAL_KIND
from fakevllm.ledger.store import Ledger
from fakevllm_runtime.read_only import connect_read_only

HELD_OUT = ServeOnlyReason.HELD_OUT.value
"""Reason slug of groups and feedback that are not trained because of a held-out row."""
_HELD_OUT_REASON = f"reason = '{HELD_OUT}' OR reason LIKE '{HELD_OUT}:%'"
_HELD_OUT_QUERIES = (
    f"SELECT 1 FROM group_rows WHERE kind = '{EVAL_KIND}' OR {_HELD_OUT_REASON} LIMIT 1",
    f"SELECT 1 FROM feedback WHERE {_HELD_OUT_REASON} LIMIT 1",
    f"SELECT 1 FROM feedback WHERE {_HELD_OUT_REASON.replace('reason', 'edit_reason')} LIMIT 1",
)


def has_held_out_rows(ledger: Path) -> bool:
    """Return True if the ledger has evaluations, or requests or feedback with the reason
    `held_out`."""
    with closing(connect_read_only(ledger)) as db:
        return any(db.execute(query).fetchone() is not None for query in _HELD_OUT_QUERIES)


class HeldOutGroups:
    """The recorded groups that quote a held-out row."""

    def __init__(self, rows: HeldOutRows, ledger: Ledger) -> None:
        self._rows = rows
        self._ledger = ledger

    async def contains(self, group_id: str, *further_texts: str) -> bool:
        """Return True if the group, or one of the further texts, quotes a held-out row. If there
        are no held-out rows, return False without reading the ledger. Raises LedgerError if the
        ledger cannot be read."""
        return bool(self._rows) and await asyncio.to_thread(
            self._quotes_row, group_id, further_texts
        )

    def _quotes_row(self, group_id: str, further_texts: Sequence[str]) -> bool:
        with self._ledger.reading():
            texts = self._ledger.user_texts(group_id)
        return self._rows.are_quoted(*texts, *further_texts)
