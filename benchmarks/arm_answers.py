"""Count the answers that each arm of a release gate gave to apps, in a proxy's ledger."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

_ANSWERS = """
    SELECT COUNT(*), SUM(arm = 'training') FROM groups
    WHERE arm IS NOT NULL AND kind IS NOT 'eval' AND received_at >= ? AND received_at < ?
"""


def count_answers(ledger: Path, since: float, until: float) -> tuple[int, int]:
    """Return two numbers of answers between two Unix times: the answers of all arms, and the
    answers of the training arm. An arm is a group of sessions that one version of the weights
    answers."""
    with contextlib.closing(sqlite3.connect(ledger)) as db:
        total, training = db.execute(_ANSWERS, (since, until)).fetchone()
    return total, training or 0
