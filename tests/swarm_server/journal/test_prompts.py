"""Long prompts: calls share them, and what another call needs is never deleted."""

from __future__ import annotations

import random
import sqlite3
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from fakevllm_runtime.migrations import migrate
from fakevllm_server.journal import prompts, reads, row_changes
from fakevllm_server.journal.compression import decompress_numbers
from fakevllm_server.journal.migrations import MIGRATIONS
from fakevllm_server.journal.rows import call_row
from fakevllm_server.journal.store import Journal
from fakevllm_server.types.calls import RecordedCall
from tests.e2e.test_released_run import ARCHIVE
from tests.swarm_server.journal.disk_faults import rows
from tests.swarm_server.samples import call

PROMPT_IDS = 400
GROUPS = ("g0", "g1", "g2", "g3")


def growing_prompts(num_turns: int, seed: int = 0) -> list[list[int]]:
    chosen = random.Random(seed)
    ids = [chosen.randrange(150_000) for _ in range(PROMPT_IDS)]
    return [
        ids := [*ids, *(chosen.randrange(150_000) for _ in range(30))] for _ in range(num_turns)
    ]


def calls_of(journal: Journal, group_id: str, num: int = 2) -> list[list[RecordedCall]]:
    return journal.read(reads.calls_by_sibling, group_id, num)


def put(journal: Journal, group_id: str, prompt: Sequence[int], num: int = 2, seq: int = 0) -> None:
    one = replace(call(), prompt_ids=prompt)
    for index in range(num):
        journal.put(row_changes.call_recorded(f"{group_id}/{index}", seq, one, group_id))


def stored_bytes(path: Path) -> int:
    """Return the number of bytes of all pieces before they were compressed."""
    return sum(len(decompress_numbers(data)) for (data,) in rows(path, "SELECT data FROM pieces"))


def assert_counted(path: Path) -> None:
    """Check that every row of prompts and pieces is needed, and that the counts are right."""
    counted = """
        SELECT id, num_calls, (SELECT COUNT(*) FROM calls WHERE prompt = q.id) FROM prompts AS q
    """
    assert all(num == expected > 0 for _, num, expected in rows(path, counted))
    uses = """
        SELECT piece_id, num_prompts, (SELECT COUNT(*) FROM prompts AS q WHERE piece_id IN
            (SELECT json_extract(value, '$[0]') FROM json_each(q.slices)))
        FROM pieces
    """
    assert all(num == expected > 0 for _, num, expected in rows(path, uses))


def test_a_turn_stores_only_what_it_adds_and_siblings_store_nothing(
    journal: Journal, path: Path
) -> None:
    turns = growing_prompts(8)
    for turn, prompt in enumerate(turns):
        put(journal, f"t{turn}", prompt, num=8)
    assert journal.drain()
    assert stored_bytes(path) == 4 * len(turns[-1])
    assert rows(path, "SELECT COUNT(*), SUM(num_calls) FROM prompts") == [(8, 64)]
    for turn, prompt in enumerate(turns):
        found = calls_of(journal, f"t{turn}", 8)
        assert found == [[replace(call(), prompt_ids=prompt)]] * 8


def test_the_calls_of_an_episode_share_their_prompts_and_alternating_sessions_too(
    journal: Journal, path: Path
) -> None:
    sessions = [growing_prompts(5, seed) for seed in (1, 2, 3)]
    for turn in range(5):
        for number, turns in enumerate(sessions):
            put(journal, f"e{number}", turns[turn], seq=turn)
    assert journal.drain()
    assert stored_bytes(path) == sum(4 * len(turns[-1]) for turns in sessions)


def test_a_restarted_server_shares_the_prompts_of_the_file(path: Path) -> None:
    turns = growing_prompts(4)
    for turn, prompt in enumerate(turns):
        journal = Journal(path)
        put(journal, f"t{turn}", prompt)
        journal.close()
    assert stored_bytes(path) == 4 * len(turns[-1])


def test_a_call_that_is_written_twice_leaves_no_prompt_behind(journal: Journal, path: Path) -> None:
    first, second = growing_prompts(2)
    put(journal, "g", first)
    put(journal, "g", second)
    assert journal.drain()
    assert calls_of(journal, "g") == [[replace(call(), prompt_ids=first)]] * 2
    assert_counted(path)
    assert rows(path, "SELECT COUNT(*) FROM prompts") == [(1,)]


@pytest.mark.parametrize("damage", ["UPDATE pieces SET data = x'07'", "DELETE FROM pieces"])
def test_groups_with_a_damaged_prompt_are_corrupt_and_later_ones_are_stored(
    path: Path, damage: str
) -> None:
    first, second = growing_prompts(2)
    journal = Journal(path)
    put(journal, "g", first)
    journal.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    journal = Journal(path)
    put(journal, "later", second)
    assert journal.drain()
    pending = journal.read(reads.pending_work, 0.0)
    journal.close()
    assert set(pending.corrupt) == {"g"} and list(pending.open_groups) == ["later"]
    assert pending.open_groups["later"][0] == [replace(call(), prompt_ids=second)]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(GROUPS), st.integers(0, 5), st.integers(0, 1)),
        st.tuples(st.just("delete"), st.sampled_from(GROUPS), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(""), st.just(0), st.just(0)),
    ),
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_what_another_call_needs_is_never_deleted(
    operations: list[tuple[str, str, int, int]],
) -> None:
    turns = growing_prompts(6)
    expected: dict[str, dict[int, Sequence[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        journal = Journal(path)
        for kind, group_id, turn, seq in operations:
            if kind == "put":
                put(journal, group_id, turns[turn], seq=seq)
                expected.setdefault(group_id, {}).setdefault(seq, turns[turn])
            elif kind == "delete":
                journal.put(row_changes.group_aborted(group_id))
                expected.pop(group_id, None)
            else:
                journal.close()
                journal = Journal(path)
        assert journal.drain()
        for group_id in GROUPS:
            by_seq = expected.get(group_id, {})
            own = [replace(call(), prompt_ids=by_seq[seq]) for seq in sorted(by_seq)]
            assert calls_of(journal, group_id) == [own, own]
        assert_counted(path)
        journal.close()
        if not expected:
            assert stored_bytes(path) == 0


def test_the_prompts_in_memory_have_a_limit() -> None:
    engine = create_engine("sqlite://")
    with engine.begin() as db:
        migrate(db, MIGRATIONS, "the file")
        recent = prompts.RecentPrompts()
        turns = growing_prompts(prompts.MAX_RECENT + 20)
        ids = [
            recent.put(db, bytes(4 * PROMPT_IDS) + bytes([turn]), str(turn))
            for turn in range(len(turns))
        ]
        assert len(set(ids)) == len(ids)
        assert len(recent) == prompts.MAX_RECENT
    engine.dispose()


def test_log_probabilities_take_four_bytes_if_nothing_is_lost() -> None:
    exact = call_row(replace(call(), logprobs=[-0.5, -0.25]))
    longer = call_row(replace(call(), logprobs=[-0.1, -0.2]))
    assert exact[2] is not None and len(exact[2]) == 8
    assert longer[2] is not None and len(longer[2]) == 16


def old_calls(path: Path) -> list[tuple[Any, ...]]:
    columns = "owner, seq, prompt_ids, response_ids, logprobs, facts_json, digest"
    return rows(path, f"SELECT {columns} FROM calls ORDER BY owner, seq")


def test_a_journal_that_a_released_version_wrote_has_the_same_calls(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "run" / "journal.sqlite"
    before = old_calls(path)
    journal = Journal(path)
    pending = journal.read(reads.pending_work, 0.0)
    journal.close()
    assert not pending.corrupt and len(pending.groups) == 2
    assert not any(group.is_sample for group in pending.groups)
    assert old_calls(path) == before and before


def test_long_prompts_of_an_older_journal_are_shared(path: Path) -> None:
    turns = growing_prompts(6)
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as db:
        migrate(db, [step for step in MIGRATIONS if step.__name__ < "m006"], "the file")
        for turn, prompt in enumerate(turns):
            values = call_row(replace(call(), prompt_ids=prompt))
            insert = (
                "INSERT INTO calls (owner, group_id, seq, prompt_ids, response_ids, logprobs, "
                "facts_json, digest) VALUES (?, ?, 0, ?, ?, ?, ?, ?)"
            )
            for index in range(2):
                db.exec_driver_sql(insert, (f"t{turn}/{index}", f"t{turn}", *values))
    engine.dispose()
    for _ in range(2):
        journal = Journal(path)
        for turn, prompt in enumerate(turns):
            assert calls_of(journal, f"t{turn}") == [[replace(call(), prompt_ids=prompt)]] * 2
        journal.close()
    assert stored_bytes(path) == 4 * len(turns[-1])
    assert_counted(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT SUM(length(prompt_ids)) FROM calls").fetchone() == (0,)
