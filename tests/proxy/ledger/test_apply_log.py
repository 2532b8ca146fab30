"""Each entry of the run log counts once, in whatever overlapping parts the log is read."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.swarm import LogEntry, LogReply
from tests.proxy.ledger.ledger_cases import dropped, group, restored, trained

GROUPS = ("g0", "g1", "g2")
IDS = st.lists(st.sampled_from(GROUPS), min_size=1, max_size=3, unique=True)


@st.composite
def logs(draw: st.DrawFn) -> list[LogEntry]:
    """Return logs with rising numbers that may have gaps, because not all entries are sent."""
    entries: list[LogEntry] = []
    seq = 0
    for kind in draw(st.lists(st.sampled_from(["step", "dropped", "restored"]), max_size=8)):
        seq += draw(st.integers(1, 3))
        ids = draw(IDS)
        siblings = draw(st.lists(st.integers(0, 1), unique=True))
        match kind:
            case "step":
                entries.append(trained(seq, *ids, step=seq, siblings=siblings))
            case "dropped":
                entries.append(dropped(seq, **dict.fromkeys(ids, "stale")))
            case _:
                entries.append(restored(seq, *ids))
    return entries


def outcome(parts: Sequence[Sequence[LogEntry]]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.open(Path(folder) / "ledger.sqlite")
        try:
            for group_id in GROUPS:
                ledger.record(group(group_id))
            for entries in parts:
                ledger.apply_log("run", entries)
            assert ledger.drain()
            assert ledger.health.ok
            return [ledger.log_cursor("run"), *(ledger.group(one) for one in GROUPS)]
        finally:
            ledger.close()


def test_an_unknown_log_entry_is_skipped_and_later_entries_count() -> None:
    newer = LogReply.model_validate(
        {"entries": [{"seq": 2, "kind": "divided", "halves": ["g0"], "metrics": {"x": "NaN"}}]}
    )
    cursor, first, *_ = outcome([[trained(1, "g1"), *newer.entries, trained(3, "g0", step=7)]])
    assert (cursor, first.trained_step) == (3, 7)


@settings(max_examples=25, deadline=None)
@given(logs(), st.data())
def test_overlapping_parts_of_the_log_count_once(
    entries: list[LogEntry], data: st.DataObject
) -> None:
    """Each part starts at or before the end of the previous part, as for a reader with a cursor."""
    parts: list[list[LogEntry]] = []
    num_read = 0
    while num_read < len(entries):
        start = data.draw(st.integers(0, num_read))
        num_read = data.draw(st.integers(num_read, len(entries)))
        parts.append(entries[start:num_read])
        if data.draw(st.booleans()):
            parts.append(parts[-1])
        if len(parts) > 12:
            parts.append(entries)
            break
    assert outcome(parts) == outcome([entries])
