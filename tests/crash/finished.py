"""A run as it is found on disk: its journal, its checkpoints, and what its client was told."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from crash.client import Ack, read_acks
from crash.engines import Lineage, lineage_of, mark_of

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.journal.rows import CALL_COLUMNS, parse_call_row


@dataclass
class Finished:
    """A run whose script has come to its end."""

    run_dir: Path

    @cached_property
    def acks(self) -> dict[str, Ack]:
        return read_acks(self.run_dir)

    def of(self, kind: str) -> list[Ack]:
        return [ack for name, ack in self.acks.items() if name.startswith(f"{kind} ")]

    def rows(self, query: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.run_dir / "journal.sqlite")) as db:
            return db.execute(query, values).fetchall()

    @cached_property
    def states(self) -> dict[str, tuple[str, str | None]]:
        """State and reason by group."""
        found = self.rows("SELECT group_id, state, reason FROM groups")
        return {group_id: (state, reason) for group_id, state, reason in found}

    @cached_property
    def entries(self) -> list[LogEntry]:
        found = self.rows("SELECT entry_json FROM entries ORDER BY seq")
        return [LogEntry.model_validate_json(entry) for (entry,) in found]

    @cached_property
    def lineage(self) -> Lineage:
        newest = max(one.name for one in self.folders)
        return lineage_of(self.run_dir / "checkpoints" / newest)

    @property
    def folders(self) -> list[Path]:
        return list((self.run_dir / "checkpoints").iterdir())

    def kept_marks(self, owner: str) -> list[int]:
        query = f"SELECT {CALL_COLUMNS} FROM calls WHERE owner = ?"
        return [mark_of(parse_call_row(row).prompt_ids) for row in self.rows(query, owner)]

    @cached_property
    def last_steps(self) -> list[LogEntry]:
        """Of each step that stands, the entry that made it: an entry `restored` takes back what
        came after its step."""
        standing: dict[int, LogEntry] = {}
        for entry in self.entries:
            if entry.kind == "restored":
                standing = {step: made for step, made in standing.items() if step <= entry.step}
            if entry.kind == "step":
                standing[entry.step] = entry
        return list(standing.values())
