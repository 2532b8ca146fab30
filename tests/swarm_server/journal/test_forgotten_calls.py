"""Forgotten groups leave no byte in the journal's files, and other groups keep their calls."""

from __future__ import annotations

import sqlite3
import tempfile
from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.compression import decompress_numbers
from fakevllm_server.journal.forgotten_calls import (
    calls_forgotten,
    loose_pieces,
    num_calls,
    unused_bytes_erased,
    used_ranges,
)
from fakevllm_server.journal.store import Journal
from fakevllm_server.types.calls import RecordedCall
from tests.swarm_server.journal.disk_faults import rows
from tests.swarm_server.journal.test_prompts import assert_counted, growing_prompts
from tests.swarm_server.samples import call

SECRET = 140_001
SHARED = growing_prompts(1)[0]


def put(journal: Journal, group_id: str, prompt: Sequence[int], answer: int = 7) -> None:
    one = replace(call(), prompt_ids=prompt, response_ids=[answer, answer + 1])
    for index in range(2):
        journal.put(row_changes.call_recorded(f"{group_id}/{index}", 0, one, group_id))


def stored_ids(path: Path) -> set[int]:
    """Return all token ids that the journal's pieces and calls have."""
    found: set[int] = set()
    pieces = [data for (data,) in rows(path, "SELECT data FROM pieces")]
    calls = [
        data for row in rows(path, "SELECT prompt_ids, response_ids FROM calls") for data in row
    ]
    for data in (*pieces, *filter(None, calls)):
        numbers = decompress_numbers(data)
        found |= set(array("i", numbers[: len(numbers) // 4 * 4]))
    return found


def erase(journal: Journal) -> None:
    assert journal.drain()
    pieces = journal.read(loose_pieces)
    journal.put(unused_bytes_erased(pieces, used_ranges(journal, pieces)))
    assert journal.drain() and journal.read(loose_pieces) == []


def prompt_of(journal: Journal, group_id: str) -> list[int]:
    return list(journal.read(reads.calls_by_sibling, group_id, 1)[0][0].prompt_ids)


def test_a_shared_prompt_stays_until_its_last_user_is_forgotten(
    journal: Journal, path: Path
) -> None:
    put(journal, "first", [*SHARED, *([SECRET] * 200)])
    put(journal, "second", [*SHARED, *([9] * 200)])
    assert journal.drain() and SECRET in stored_ids(path)
    journal.put(calls_forgotten(["first"]))
    erase(journal)
    assert prompt_of(journal, "second") == [*SHARED, *([9] * 200)]
    assert SECRET not in stored_ids(path) and set(SHARED) <= stored_ids(path)
    assert_counted(path)
    journal.put(calls_forgotten(["second"]))
    assert journal.drain()
    assert stored_ids(path) == set()


def test_a_prompt_that_follows_a_forgotten_one_is_stored_whole(
    journal: Journal, path: Path
) -> None:
    put(journal, "first", [*SHARED, *([SECRET] * 200)])
    put(journal, "second", [*SHARED, *([9] * 200)])
    journal.put(calls_forgotten(["first"]))
    third = [*SHARED, *([SECRET] * 100), *([9] * 100)]
    put(journal, "third", third)
    assert journal.drain()
    assert prompt_of(journal, "third") == third
    assert_counted(path)


def test_what_was_deleted_before_leaves_no_byte_in_shared_pieces_either(
    journal: Journal, path: Path
) -> None:
    put(journal, "first", [*SHARED, *([SECRET] * 200)])
    put(journal, "second", [*SHARED, *([9] * 200)])
    journal.put(row_changes.group_aborted("first"))
    assert journal.drain() and SECRET in stored_ids(path)
    erase(journal)
    assert SECRET not in stored_ids(path)
    assert prompt_of(journal, "second") == [*SHARED, *([9] * 200)]


def test_prompts_that_come_and_go_during_an_erasure_are_counted(
    journal: Journal, path: Path
) -> None:
    prompts = {
        name: [*SHARED, *([number] * 200)]
        for name, number in (("first", SECRET), ("second", 9), ("third", SECRET + 1))
    }
    for name, prompt in prompts.items():
        put(journal, name, prompt)
    journal.put(calls_forgotten(["first"]))
    assert journal.drain()
    pieces = journal.read(loose_pieces)
    used = used_ranges(journal, pieces)
    put(journal, "new", prompts["third"])
    journal.put(calls_forgotten(["third"]))
    journal.put(unused_bytes_erased(pieces, used))
    assert journal.drain()
    assert prompt_of(journal, "new") == prompts["third"]
    assert prompt_of(journal, "second") == prompts["second"]
    journal.put(calls_forgotten(["new"]))
    erase(journal)
    assert not {SECRET, SECRET + 1} & stored_ids(path)
    assert prompt_of(journal, "second") == prompts["second"]


def test_no_byte_of_a_deleted_call_is_left_in_the_files(journal: Journal, path: Path) -> None:
    # Answers of a call are short, and zlib stores them unchanged in part. A long logprob array of
    # one value would be compressed, so the facts carry the text.
    secret = replace(call(), untrainable="a-text-that-is-secret")
    for name in ("first", "second"):
        journal.put(row_changes.call_recorded(f"{name}/0", 0, secret, name))
    assert journal.drain()

    def files() -> bytes:
        return path.read_bytes() + path.with_name(f"{path.name}-wal").read_bytes()

    ((facts,),) = set(rows(path, "SELECT facts_json FROM calls"))
    digest = rows(path, "SELECT digest FROM calls")[0][0]
    assert facts in files() and digest in files()
    journal.put(calls_forgotten(["first", "second"]))
    assert journal.drain() and journal.truncate_log(5.0)
    assert facts not in files() and digest not in files()


def test_an_older_journal_loses_the_bytes_of_rows_that_were_deleted_before(path: Path) -> None:
    journal = Journal(path)
    put(journal, "first", [*SHARED, *([9] * 200)])
    assert journal.drain()
    journal.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA secure_delete = OFF")
        db.execute("CREATE TABLE old (data TEXT)")
        db.execute("INSERT INTO old VALUES (?)", ("an older secret " * 500,))
        for name in ("TABLE old", "TABLE loose_pieces", "TRIGGER loosen_pieces"):
            db.execute(f"DROP {name}")
        db.execute("DROP TRIGGER forget_loose_piece")
        db.execute("DELETE FROM migrations WHERE name = 'm008_loose_pieces'")
    assert b"an older secret" in path.read_bytes()
    journal = Journal(path)
    assert b"an older secret" not in path.read_bytes()
    assert prompt_of(journal, "first") == [*SHARED, *([9] * 200)]
    journal.close()


GROUPS = st.lists(st.integers(0, 5), min_size=2, max_size=8)


@given(GROUPS, st.sets(st.integers(0, 7)))
@settings(max_examples=40, deadline=None)
def test_whatever_is_forgotten_the_other_groups_read_as_before(
    turns: list[int], forgotten: set[int]
) -> None:
    prompts = growing_prompts(6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        journal = Journal(path)
        written: dict[str, list[int]] = {}
        for number, turn in enumerate(turns):
            name = f"g{number}"
            written[name] = [*prompts[turn], *([100_000 + number] * 150)]
            put(journal, name, written[name], answer=1000 * (number + 1))
        ids = [f"g{number}" for number in forgotten if number < len(turns)]
        assert journal.drain()
        assert journal.read(num_calls, ids) == 2 * len(ids)
        journal.put(calls_forgotten(ids))
        erase(journal)
        kept = {name: prompt for name, prompt in written.items() if name not in ids}
        assert {name: prompt_of(journal, name) for name in kept} == kept
        unwanted = {100_000 + int(name[1:]) for name in ids}
        assert not unwanted & stored_ids(path)
        assert_counted(path)
        journal.close()


def test_a_group_that_is_read_again_has_no_calls(journal: Journal) -> None:
    put(journal, "first", SHARED)
    journal.put(calls_forgotten(["first"]))
    assert journal.drain()
    nothing: list[RecordedCall] = []
    assert journal.read(reads.calls_by_sibling, "first", 2) == [nothing, nothing]
