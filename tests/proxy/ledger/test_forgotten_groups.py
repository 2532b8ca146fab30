"""Forgotten groups leave no byte in the ledger, and other groups read as before."""

from __future__ import annotations

import sqlite3
from array import array
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.forgetting import forgetter
from fakevllm.forgetting.forgetter import Forgetter
from fakevllm.ledger.forgotten_groups import Cause, Target, TargetKind
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.rescored_rows import RescoredRow, RescoredSibling
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.packed_numbers import pack_ids
from tests.proxy.ledger.ledger_cases import call, group
from tests.proxy.ledger.test_contents import prompts

SHARED = "Be brief. " * 100


def put(ledger: Ledger, name: str, secret: int) -> None:
    body = '{{"messages": [{{"role": "system", "content": "{}"}}, "{}"]}}'.format(
        SHARED,
        f"secret-{secret} " * 40,
    )
    ledger.record(replace(group(name, [0.5, 1.0]), request_json=body, session_id=name))
    ids = [*prompts(1)[0], *([secret] * 200)]
    one = call().model_copy(update={"prompt_ids": pack_ids(ids)})
    ledger.settle(name, "pooled", None, 1, [[one], [one]])
    assert ledger.drain() and ledger.health.dropped == 0


def forget(ledger: Ledger, session: str) -> None:
    found = ledger.forgotten.find(Target(TargetKind.SESSION, session))
    ledger.forgotten.forget(found.ready, Cause.FORGOTTEN, 1.0)
    assert ledger.drain()


def erase(ledger: Ledger) -> None:
    pieces = ledger.forgotten.loose_pieces()
    ledger.forgotten.erase(pieces, ledger.forgotten.used_ranges(pieces))
    assert ledger.drain() and ledger.forgotten.loose_pieces() == []
    assert ledger.truncate_log(5.0) and ledger.health.dropped == 0


def is_in_files(path: Path, secret: int) -> bool:
    data = path.read_bytes() + path.with_name(f"{path.name}-wal").read_bytes()
    return f"secret-{secret}".encode() in data or array("i", [secret] * 2).tobytes() in data


def test_a_shared_prompt_stays_until_its_last_user_is_forgotten(ledger: Ledger, path: Path) -> None:
    put(ledger, "a", 150_001)
    put(ledger, "b", 150_002)
    before = ledger.group("b"), ledger.calls.by_sibling("b")
    assert is_in_files(path, 150_001)
    forget(ledger, "a")
    erase(ledger)
    assert not is_in_files(path, 150_001)
    assert (ledger.group("b"), ledger.calls.by_sibling("b")) == before
    forgotten = ledger.group("a")
    assert forgotten is not None and forgotten.request_json == "{}"
    assert [sibling.reward for sibling in forgotten.siblings] == [0.5, 1.0]
    forget(ledger, "b")
    erase(ledger)
    assert SHARED.encode() not in path.read_bytes()


def test_a_group_that_comes_during_an_erasure_keeps_its_contents(
    ledger: Ledger, path: Path
) -> None:
    put(ledger, "a", 150_001)
    put(ledger, "b", 150_002)
    forget(ledger, "a")
    pieces = ledger.forgotten.loose_pieces()
    used = ledger.forgotten.used_ranges(pieces)
    put(ledger, "c", 150_002)
    before = ledger.group("c"), ledger.calls.by_sibling("c")
    ledger.forgotten.erase(pieces, used)
    assert ledger.drain()
    assert (ledger.group("c"), ledger.calls.by_sibling("c")) == before


def test_calls_that_arrive_after_the_deletion_are_not_stored(ledger: Ledger) -> None:
    put(ledger, "a", 150_001)
    forget(ledger, "a")
    ledger.settle("a", "pooled", None, 1, [[call()], [call()]])
    assert ledger.drain() and ledger.calls.by_sibling("a") == {}


def test_the_counters_equal_a_count_of_the_rows_after_a_deletion(ledger: Ledger) -> None:
    put(ledger, "a", 150_001)
    before = ledger.counts(), ledger.runs(), ledger.sampled_tokens()
    forget(ledger, "a")
    assert (ledger.counts(), ledger.runs(), ledger.sampled_tokens()) == before


def test_texts_that_arrive_after_the_deletion_are_not_stored(ledger: Ledger, path: Path) -> None:
    put(ledger, "a", 150_001)
    late = FeedbackRecord(group_id="a", feedback_id="f", received_at=2.0, app_key="0a1b2c3d")
    ledger.feedback.record(replace(late, feedback_id="early", comment="secret-9"))
    assert ledger.drain()
    assert ledger.feedback.find_group("a", "0a1b2c3d") == "a"
    forget(ledger, "a")
    assert ledger.feedback.find_group("a", "0a1b2c3d") is None
    ledger.feedback.record(replace(late, thumbs="up", edited="secret-9", comment="secret-9"))
    ledger.feedback.set_outcome(late, FeedbackState.KEPT, "hook_error: secret-9", value=1.0)
    siblings = [RescoredSibling(0, 0.5, {"note": "secret-9"}), RescoredSibling(1, None, {})]
    ledger.rescored.put(RescoredRow("a", "h", siblings, "hook_error: secret-9", 3.0))
    assert ledger.drain() and ledger.truncate_log(5.0) and not is_in_files(path, 9)
    (_, kept) = ledger.feedback.of_group("a")
    assert (kept.thumbs, kept.value, kept.reason) == ("up", 1.0, "hook_error")
    assert ledger.rescored.find("a", "h") == ({0: 0.5, 1: None}, "hook_error")


def test_damaged_slices_of_other_groups_keep_no_group_from_being_forgotten(
    ledger: Ledger, path: Path
) -> None:
    for name, secret in (("a", 150_001), ("b", 150_002), ("c", 150_003)):
        put(ledger, name, secret)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE group_rows SET request_slices = '[[1, 0' WHERE group_id = 'b'")
        db.execute("UPDATE group_rows SET request_slices = '[7, null]' WHERE group_id = 'c'")
    for name in ("a", "b", "c"):
        forget(ledger, name)
        erase(ledger)
    assert not is_in_files(path, 150_001)


async def test_a_restarted_proxy_erases_what_an_interrupted_deletion_left(
    ledger: Ledger, path: Path
) -> None:
    put(ledger, "a", 150_001)
    forget(ledger, "a")
    assert is_in_files(path, 150_001)
    await Forgetter(ledger).finish()
    assert not is_in_files(path, 150_001)


async def test_a_log_that_another_process_kept_from_being_truncated_is_truncated_later(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetter, "TRUNCATE_S", 0.1)
    put(ledger, "a", 150_001)
    deleting = Forgetter(ledger, wait_s=0.0)
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN").execute("SELECT COUNT(*) FROM pieces").fetchone()
        ledger.settle("a", "pooled", None, 1, [])
        done = await deleting.forget([Target(TargetKind.SESSION, "a")])
        assert not done.is_log_truncated and is_in_files(path, 150_001)
    await deleting.finish()
    assert not is_in_files(path, 150_001)


def test_the_number_of_forgotten_groups_is_counted_once(ledger: Ledger) -> None:
    put(ledger, "a", 150_001)
    forget(ledger, "a")
    ledger.forgotten.forget(["a"], Cause.PRUNED, 1.0)
    assert ledger.drain() and ledger.forgotten.counts() == {"forgotten": 1}
    assert ledger.forgotten.num_unsent() == ledger.forgotten.num_unsent(["a"]) == 1
    assert ledger.forgotten.num_unsent([]) == 0
