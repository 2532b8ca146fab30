"""Forgotten groups leave no byte in the ledger, and other groups read as before."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

from fakevllm.ledger.forgotten_groups import Cause, Target, TargetKind
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
