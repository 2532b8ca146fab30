"""The files of a run: its journal, its checkpoints, and its client's acknowledgements."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from crash.client import Ack, read_acks
from crash.lineage_backend import Lineage, mark_of, read_lineage

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.journal.call_reads import CallReader
from fakevllm_server.journal.external_reader import read_journal_file


@dataclass
class RunFiles:
    """The files of one run directory, read from disk."""

    run_dir: Path

    @cached_property
    def acks(self) -> dict[str, Ack]:
        return read_acks(self.run_dir)

    def acks_of_kind(self, kind: str) -> list[Ack]:
        return [ack for name, ack in self.acks.items() if name.startswith(f"{kind} ")]

    def rows(self, query: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.run_dir / "journal.sqlite")) as db:
            return db.execute(query, values).fetchall()

    @cached_property
    def states(self) -> dict[str, tuple[str, str | None]]:
        """State and drop reason by group id."""
        rows = self.rows("SELECT group_id, state, reason FROM groups")
        return {group_id: (state, reason) for group_id, state, reason in rows}

    @cached_property
    def entries(self) -> list[LogEntry]:
        rows = self.rows("SELECT entry_json FROM entries ORDER BY seq")
        return [LogEntry.model_validate_json(entry) for (entry,) in rows]

    @cached_property
    def lineage(self) -> Lineage:
        query = "SELECT folder FROM checkpoints ORDER BY step DESC LIMIT 1"
        ((newest,),) = self.rows(query)
        return read_lineage(self.run_dir / "checkpoints" / newest)

    @property
    def folders(self) -> list[Path]:
        """Folders of the checkpoints."""
        return list((self.run_dir / "checkpoints").iterdir())

    def kept_marks(self, owner: str) -> list[int]:
        """Return the marks of an owner's calls that are still in the journal."""
        journal = self.run_dir / "journal.sqlite"
        calls = read_journal_file(journal, lambda db: CallReader(db).of_owner(owner))
        return [mark_of(call.prompt_ids) for call in calls]

    @cached_property
    def last_steps(self) -> list[LogEntry]:
        """The log entry of each valid step.

        A `restored` entry invalidates the steps after its own step.
        """
        valid: dict[int, LogEntry] = {}
        for entry in self.entries:
            if entry.kind == "restored":
                valid = {step: other for step, other in valid.items() if step <= entry.step}
            if entry.kind == "step":
                valid[entry.step] = entry
        return list(valid.values())
