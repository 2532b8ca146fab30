"""Long requests and prompts: each turn adds a piece, and the views return what was recorded."""

from __future__ import annotations

import json
import math
import random
import sqlite3
import tarfile
from base64 import b64decode
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.ledger.tables import CALLS, GROUPS
from fakevllm_adapters.protocol.packed_numbers import pack_ids, unpack_ids
from fakevllm_runtime import contents
from fakevllm_runtime.contents import (
    MAX_SLICES,
    Content,
    ContentStore,
    common_prefix,
    common_suffix,
    cut,
    digest_of,
)
from fakevllm_runtime.migrations import migrate
from tests.e2e.test_released_run import ARCHIVE
from tests.proxy.ledger.ledger_cases import call, group, rows

NUM_TURNS = 8
NUM_SIBLINGS = 4
PROMPT_IDS = 3_000


def requests(num_turns: int = NUM_TURNS) -> list[str]:
    """Return the request bodies of a session. Each request repeats the messages of the previous
    request and adds further messages. In each body, the tools follow the messages."""
    messages = [{"role": "system", "content": "Be brief. " * 400}]
    bodies: list[str] = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"Frage {turn}: größer? " + "é" * turn})
        tools = [{"name": "read", "description": "reads a file, " * 100}]
        bodies.append(json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False))
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return bodies


def prompts(num_turns: int = NUM_TURNS) -> list[list[int]]:
    chosen = random.Random(0)
    ids = [chosen.randrange(150_000) for _ in range(PROMPT_IDS)]
    return [
        ids := [*ids, *(chosen.randrange(150_000) for _ in range(50))] for _ in range(num_turns)
    ]


def record(ledger: Ledger, num_turns: int = NUM_TURNS, session: str = "s") -> list[GroupRecord]:
    records: list[GroupRecord] = []
    for turn, (body, ids) in enumerate(zip(requests(num_turns), prompts(num_turns), strict=True)):
        name = f"{session}{turn}"
        record = replace(
            group(name, [0.5] * NUM_SIBLINGS, received_at=float(turn)),
            request_json=body,
            session_id=session,
            parent_id=f"{session}{turn - 1}" if turn else None,
        )
        records.append(record)
        ledger.record(record)
        calls = [call().model_copy(update={"prompt_ids": pack_ids(ids)})] * NUM_SIBLINGS
        ledger.settle(name, "pooled", None, 1, [[one] for one in calls])
    assert ledger.drain() and ledger.health.dropped == 0
    return records


def assert_contents(path: Path, records: Sequence[GroupRecord]) -> None:
    """Check the columns that users query, and derive every digest again."""
    found = rows(path, "SELECT request_json FROM groups ORDER BY received_at")
    assert found == [(one.request_json,) for one in records]
    stored = rows(path, "SELECT prompt_ids FROM calls JOIN groups USING (group_id)")
    assert len(stored) == NUM_SIBLINGS * len(records)
    digests = """
        SELECT CAST(v.request_json AS BLOB), r.request_digest FROM groups AS v
        JOIN group_rows AS r USING (group_id) WHERE r.request_slices IS NOT NULL
        UNION ALL SELECT v.prompt_ids, q.digest FROM calls AS v
        JOIN call_rows AS r USING (group_id, sibling, seq)
        JOIN prompts AS q ON q.prompt_id = r.prompt
    """
    digested: list[Any] = rows(path, digests)
    assert len(digested) == (1 + NUM_SIBLINGS) * len(records)
    for data, digest in digested:
        assert digest_of(data) == digest


def test_requests_and_prompts_are_read_as_they_were_recorded(ledger: Ledger, path: Path) -> None:
    records = record(ledger)
    assert_contents(path, records)
    for turn, one in enumerate(records):
        found = ledger.group(one.group_id)
        assert found is not None and found.request_json == one.request_json
        for calls in ledger.calls.by_sibling(one.group_id).values():
            assert [unpack_ids(one.prompt_ids) for one in calls] == [prompts()[turn]]


def test_a_turn_stores_only_what_it_adds_to_its_parent(ledger: Ledger, path: Path) -> None:
    record(ledger)
    ((num_bytes,),) = rows(path, "SELECT SUM(length(data)) FROM pieces")
    assert isinstance(num_bytes, int)
    distinct = len(requests()[-1].encode()) + 4 * len(prompts()[-1])
    assert num_bytes < 1.02 * distinct
    assert rows(path, "SELECT COUNT(*) FROM group_rows WHERE request_json <> ''") == [(0,)]


ANSWER_IDS = 200


def record_answers(ledger: Ledger, *, restart: Path | None = None) -> list[list[bytes]]:
    """Record turns whose prompts begin with the prompt and the served answer of the turn before.
    Return the prompt and the response of each call."""
    chosen = random.Random(2)
    prompt = [chosen.randrange(150_000) for _ in range(PROMPT_IDS)]
    expected: list[list[bytes]] = []
    for turn in range(NUM_TURNS):
        if restart is not None:
            ledger.close()
            ledger = Ledger.open(restart)
        responses = [
            [chosen.randrange(150_000) for _ in range(ANSWER_IDS)] for _ in range(NUM_SIBLINGS)
        ]
        name = f"answered{turn}"
        one = group(name, [0.5] * NUM_SIBLINGS, served=turn % NUM_SIBLINGS, received_at=1e6 + turn)
        ledger.record(replace(one, parent_id=f"answered{turn - 1}" if turn else None))
        calls = [
            call().model_copy(
                update={"prompt_ids": pack_ids(prompt), "response_ids": pack_ids(response)}
            )
            for response in responses
        ]
        ledger.settle(name, "pooled", None, 1, [[one] for one in calls])
        expected += [[b64decode(one.prompt_ids), b64decode(one.response_ids)] for one in calls]
        prompt = [*prompt, *responses[turn % NUM_SIBLINGS], *(turn, turn, turn)]
    assert ledger.drain() and ledger.health.dropped == 0
    if restart is not None:
        ledger.close()
    return expected


def assert_answers(path: Path, expected: list[list[bytes]]) -> None:
    query = """
        SELECT prompt_ids, response_ids FROM calls JOIN groups USING (group_id)
        WHERE group_id LIKE 'answered%' ORDER BY received_at, sibling
    """
    assert [list(row) for row in rows(path, query)] == expected


def test_the_tokens_of_a_served_answer_are_stored_once(ledger: Ledger, path: Path) -> None:
    expected = record_answers(ledger)
    assert_answers(path, expected)
    query = "SELECT SUM(length(data)) FROM pieces UNION ALL SELECT SUM(length(response_ids)) FROM "
    pieces, in_rows = (row[0] for row in rows(path, f"{query} call_rows"))
    assert in_rows == 4 * ANSWER_IDS * NUM_TURNS * (NUM_SIBLINGS - 1)
    assert pieces == len(expected[-1][0]) + 4 * ANSWER_IDS
    assert rows(path, "SELECT COUNT(*) FROM prompts") == [(NUM_TURNS,)]


def test_a_restarted_proxy_continues_the_prompt_and_the_answer_of_the_file(path: Path) -> None:
    expected = record_answers(Ledger.open(path), restart=path)
    assert_answers(path, expected)
    ((pieces,),) = rows(path, "SELECT SUM(length(data)) FROM pieces")
    assert pieces == len(expected[-1][0]) + 4 * ANSWER_IDS


def test_a_restarted_proxy_reads_the_parent_from_the_file(path: Path) -> None:
    records = requests()
    sizes: list[object] = []
    for turn, body in enumerate(records):
        ledger = Ledger.open(path)
        parent_id = f"g{turn - 1}" if turn else None
        one = replace(group(f"g{turn}", received_at=float(turn)), request_json=body)
        ledger.record(replace(one, parent_id=parent_id))
        ledger.close()
        sizes.append(rows(path, "SELECT SUM(length(data)) FROM pieces")[0][0])
    assert rows(path, "SELECT request_json FROM groups ORDER BY received_at") == [
        (body,) for body in records
    ]
    assert isinstance(sizes[0], int) and isinstance(sizes[-1], int)
    assert sizes[-1] < len(records[-1].encode()) * 1.02


def test_a_content_with_too_many_slices_is_stored_whole(ledger: Ledger, path: Path) -> None:
    num_turns = MAX_SLICES + 20
    chosen = random.Random(1)
    body = json.dumps({"messages": ["x" * 900]})
    bodies: list[str] = []
    for _ in range(num_turns):  # inserted in the middle, so that no two slices are adjacent
        at = chosen.randrange(20, len(body) - 20)
        body = body[:at] + "yz" + body[at:]
        bodies.append(body)
    for turn, text in enumerate(bodies):
        parent_id = f"g{turn - 1}" if turn else None
        one = replace(group(f"g{turn}", received_at=float(turn)), request_json=text)
        ledger.record(replace(one, parent_id=parent_id))
    assert ledger.drain() and ledger.health.dropped == 0
    assert rows(path, "SELECT request_json FROM groups ORDER BY received_at") == [
        (text,) for text in bodies
    ]
    ((longest,),) = rows(path, "SELECT MAX(json_array_length(request_slices)) FROM group_rows")
    assert isinstance(longest, int) and 50 < longest <= MAX_SLICES


def test_pieces_of_a_rolled_back_transaction_are_not_used(ledger: Ledger, path: Path) -> None:
    first, second = requests(2)
    broken: Any = replace(group("bad"), question=object(), request_json=first)
    ledger.record(broken)
    ledger.record(replace(group("good"), request_json=second))
    assert ledger.drain() and ledger.health.dropped == 1
    ledger.record(replace(group("later"), request_json=first, parent_id="good"))
    assert ledger.drain() and ledger.health.dropped == 1
    found = rows(path, "SELECT group_id, request_json FROM groups ORDER BY group_id")
    assert found == [("good", second), ("later", first)]


def test_a_ledger_that_a_released_version_wrote_has_the_same_contents(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "run" / "ledger.sqlite"
    columns = "group_id, sibling, seq, prompt_ids, response_ids, logprobs, weight_versions_json"
    queries = (
        f"SELECT {columns} FROM calls ORDER BY group_id, sibling, seq",
        "SELECT group_id, request_json, state, reason FROM groups ORDER BY group_id",
        'SELECT * FROM siblings ORDER BY group_id, "index"',
    )
    before = [rows(path, query) for query in queries]
    ledger = Ledger.open(path)
    assert (ledger.edits.waiting(math.inf), ledger.edits.counts()) == ([], {})
    ledger.close()
    assert [rows(path, query) for query in queries] == before
    assert len(before[0]) > 100


def test_long_contents_of_an_older_ledger_move_to_pieces(path: Path) -> None:
    ledger = Ledger.open(path)
    records = record(ledger)
    ledger.close()
    undo_pieces(path)
    ((before,),) = rows(path, "SELECT SUM(length(prompt_ids)) FROM calls")
    assert isinstance(before, int)
    Ledger.open(path).close()
    assert_contents(path, records)
    ((after,),) = rows(path, "SELECT SUM(length(data)) FROM pieces")
    assert isinstance(after, int) and after < before / 10
    ((in_rows,),) = rows(path, "SELECT SUM(length(prompt_ids)) FROM call_rows")
    assert in_rows == 0


def test_served_answers_of_an_older_ledger_are_stored_once(path: Path) -> None:
    ledger = Ledger.open(path)
    expected = record_answers(ledger)
    ledger.close()
    names = [column.name for column in GROUPS.columns]
    # These columns are newer than pieces, as is the column `replica` of the calls.
    groups = ", ".join(name for name in names if not name.startswith(("eval_", "arm")))
    calls = ", ".join(column.name for column in CALLS.columns if column.name != "replica")
    queries = [
        f"SELECT {groups} FROM groups",
        "SELECT * FROM siblings",
        f"SELECT {calls} FROM calls",
    ]
    before = [rows(path, query) for query in queries]
    undo_pieces(path)
    assert [rows(path, query) for query in queries] == before
    Ledger.open(path).close()
    assert [rows(path, query) for query in queries] == before
    assert_answers(path, expected)
    ((pieces,),) = rows(path, "SELECT SUM(length(data)) FROM pieces")
    assert pieces == len(expected[-1][0]) + 4 * ANSWER_IDS


def undo_pieces(path: Path) -> None:
    """Convert the ledger file to the schema that it had before long contents were stored as
    pieces."""
    old = path.with_name("old.sqlite")
    engine = create_engine(f"sqlite:///{old}")
    with engine.begin() as db:
        migrate(db, [step for step in MIGRATIONS if step.__name__ < "m013"], "the file")
    engine.dispose()
    with closing(sqlite3.connect(old)) as db:
        db.execute("ATTACH ? AS new", (str(path),))
        with db:
            for name in ("groups", "siblings", "calls"):
                old_columns = [row[1] for row in db.execute(f"PRAGMA main.table_info({name})")]
                columns = ", ".join(f'"{column}"' for column in old_columns)
                db.execute(f"INSERT INTO main.{name} SELECT {columns} FROM new.{name}")
    old.rename(path)


BYTES = st.lists(st.sampled_from([b"a", b"b", "é".encode(), b"\0"]), max_size=12).map(b"".join)


@given(BYTES, BYTES, st.integers(0, 30))
def test_prefix_and_suffix_are_the_longest(first: bytes, second: bytes, limit: int) -> None:
    prefix = common_prefix(first, second)
    assert first[:prefix] == second[:prefix]
    assert first[prefix : prefix + 1] != second[prefix : prefix + 1] or prefix in (
        len(first),
        len(second),
    )
    suffix = common_suffix(first, second, limit)
    assert suffix <= limit and first[len(first) - suffix :] == second[len(second) - suffix :]


@settings(max_examples=50, deadline=None)
@given(st.lists(BYTES, min_size=1, max_size=8))
@example([b"aabb", b"aacbb", b"aabb", b""])
def test_contents_are_read_as_they_were_stored(all_data: list[bytes]) -> None:
    engine = create_engine("sqlite://")
    with engine.begin() as db, pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "MIN_SHARED", 1)
        db.exec_driver_sql("CREATE TABLE pieces (piece_id INTEGER PRIMARY KEY, data BLOB)")
        store = ContentStore()
        stored: list[Content] = []
        for data in all_data:
            stored.append(store.store(db, data, stored))
        for data, content in zip(all_data, stored, strict=True):
            assert store.load(db, content.slices_json) == content
            assert content.data == data and sum(size for *_, size in content.slices) == len(data)
            assert cut(content.slices, 0, len(data)) == [one for one in content.slices if one[2]]
    engine.dispose()


def test_the_recent_contents_have_a_limit() -> None:
    store = ContentStore(max_recent_bytes=10)
    for number in range(5):
        store.remember(str(number), Content(b"abcd", ((number, 0, 4),)))
    assert [store.find(str(number)) is not None for number in range(5)] == [False] * 3 + [True] * 2
    store.remember("4", Content(b"a" * 11, ((9, 0, 11),)))
    assert store.find("4") is None
