"""`fakevllm-server` whose journal's disk is full while the file `FAKE_FULL_DISK` exists."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from fakevllm_server.cli.main import main
from fakevllm_server.journal.group_commit_writer import Change
from fakevllm_server.journal.store import Journal

FLAG = Path(os.environ["FAKE_FULL_DISK"])
_transact = Journal._transact  # pyright: ignore[reportPrivateUsage]


def transact_with_full_disk(journal: Journal, changes: Sequence[Change]) -> None:
    if FLAG.exists():
        raise sqlite3.OperationalError("database or disk is full")
    _transact(journal, changes)


if __name__ == "__main__":
    setattr(Journal, "_transact", transact_with_full_disk)  # noqa: B010, because it is private
    main()
