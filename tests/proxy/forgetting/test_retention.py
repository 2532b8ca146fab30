"""Old groups of a ledger are pruned in the background."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.export.conversation import NotExported
from fakevllm.export.group_reader import GroupReader
from fakevllm.forgetting import retention as retention_module
from fakevllm.forgetting.forgetter import Forgetter
from fakevllm.forgetting.retention import Retention
from fakevllm.forgetting.retention_rules import BYTES_PER_MB, DAY_S, RetentionRules
from fakevllm.ledger.records import FeedbackRecord, FeedbackState, KeptAnswer
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.privacy.settings import PrivacySettings
from tests.proxy.ledger.ledger_cases import call, group

NOW = time.time()
OLD = NOW - 10 * DAY_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Generator[Ledger]:
    opened = Ledger.open(path)
    yield opened
    opened.close()


def put(ledger: Ledger, name: str, received_at: float = OLD, **changes: Any) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "{f"secret of {name} " * 40}"}}]}}'
    record = group(name, [0.5, 1.0], received_at=received_at, state="dropped")
    ledger.record(replace(record, request_json=body, session_id=name, **changes))
    ledger.settle(name, changes.get("state", "dropped"), None, 1, [[call()], [call()]])
    assert ledger.drain() and ledger.health.dropped == 0


def retention(ledger: Ledger, **settings: float) -> Retention:
    rules = RetentionRules(PrivacySettings.model_validate(settings))
    return Retention(rules, ledger, Forgetter(ledger), lambda: {"gate-7"}, lambda: NOW)


def left(ledger: Ledger, *names: str) -> list[str]:
    groups = {name: ledger.group(name) for name in names}
    return [name for name, one in groups.items() if one is not None and one.request_json != "{}"]


async def test_a_pruned_group_is_not_exported(ledger: Ledger) -> None:
    put(ledger, "old")
    reader = GroupReader(ledger, HeldOutRows([]), {})
    assert reader.read("old").record.group_id == "old"
    await retention(ledger, retention_days=7).prune()
    with pytest.raises(NotExported, match="forgotten"):
        reader.read("old")


async def test_groups_that_are_too_old_are_pruned_and_their_numbers_stay(
    ledger: Ledger, path: Path
) -> None:
    put(ledger, "old")
    put(ledger, "new", NOW - DAY_S)
    before = ledger.counts(), ledger.sampled_tokens()
    pruning = retention(ledger, retention_days=7)
    assert await pruning.prune() == 1
    assert left(ledger, "old", "new") == ["new"]
    assert b"secret of old" not in path.read_bytes()
    assert (ledger.counts(), ledger.sampled_tokens()) == before
    assert ledger.forgotten.counts() == {"pruned": 1} and ledger.forgotten.num_unsent() == 1
    assert (pruning.state.num_pruned, pruning.state.last_at) == (1, NOW)
    assert await pruning.prune() == 0


async def test_whatever_is_still_needed_is_not_pruned(ledger: Ledger) -> None:
    for state in ("scored", "pooled"):
        put(ledger, state, state=state)
    put(ledger, "evaluated", kind="eval", eval_id="gate-7")
    put(ledger, "was_evaluated", kind="eval", eval_id="gate-6")
    for name, until in (("kept", NOW + DAY_S), ("was_kept", NOW - 1)):
        put(ledger, name, kept_answer=KeptAnswer(name, name.encode(), until, 200, [], b"{}"))
    states = [FeedbackState.RECEIVED, FeedbackState.WAITING, FeedbackState.POOLED]
    for state in [*states, FeedbackState.TRAINED]:
        put(ledger, f"feedback_{state}")
        row = FeedbackRecord(group_id=f"feedback_{state}", feedback_id="f", received_at=OLD)
        ledger.feedback.record(replace(row, state=state.value))
    assert ledger.drain()
    needed = ["scored", "pooled", "evaluated", "kept", *(f"feedback_{one}" for one in states)]
    others = ["was_evaluated", "was_kept", "feedback_trained"]
    assert left(ledger, *needed, *others) == [*needed, *others]
    for settings in ({"retention_days": 7.0}, {"max_ledger_mb": 0.000_001}):
        await retention(ledger, **settings).prune()
        assert left(ledger, *needed, *others) == needed


async def test_a_group_that_comes_into_use_after_it_was_chosen_is_not_pruned(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pooled", "feedback", "kept", "unused"):
        put(ledger, name)
    pruning, forgetter = retention(ledger, retention_days=7), Forgetter(ledger)

    async def prune(group_ids: Sequence[str]) -> None:
        assert len(group_ids) == 4
        put(ledger, "pooled", state="pooled")
        ledger.feedback.record(FeedbackRecord(group_id="feedback", feedback_id="f", received_at=1))
        ledger.kept_answers.keep(KeptAnswer("kept", b"k", NOW + DAY_S, 200, [], b"{}"))
        await forgetter.prune(group_ids)

    monkeypatch.setattr(pruning, "_forgetter", SimpleNamespace(prune=prune))
    await pruning.prune()
    assert left(ledger, "pooled", "feedback", "kept", "unused") == ["pooled", "feedback", "kept"]
    assert ledger.forgotten.counts() == {"pruned": 1}


async def test_a_group_that_was_needed_is_pruned_later(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ledger, "pooled", state="pooled")
    put(ledger, "dropped")
    pruning = retention(ledger, retention_days=7)
    assert await pruning.prune() == 1
    put(ledger, "pooled")
    assert await pruning.prune() == 0  # the round continues behind the group
    monkeypatch.setattr(retention_module, "WHOLE_EVERY_S", 0.0)
    assert await pruning.prune() == 1 and left(ledger, "pooled", "dropped") == []


async def test_the_oldest_groups_go_first_until_the_ledger_is_small_enough(ledger: Ledger) -> None:
    names = [f"g{number}" for number in range(60)]
    for number, name in enumerate(names):
        put(ledger, name, OLD + number, question=f"{name} " * 2000)
    limit = 0.8 * ledger.num_bytes()
    pruning = retention(ledger, max_ledger_mb=limit / BYTES_PER_MB)
    while await pruning.prune():
        pass
    assert 0.9 * limit < ledger.num_bytes() <= limit
    stayed = left(ledger, *names)
    assert stayed and stayed == names[-len(stayed) :]
    assert pruning.state.trouble is None


async def test_a_ledger_that_stays_too_large_is_reported_once(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    put(ledger, "old")
    pruning = retention(ledger, max_ledger_mb=0.000_001)
    while await pruning.prune():
        pass
    await pruning.prune()
    assert pruning.state.trouble is not None and "nothing more to prune" in pruning.state.trouble
    assert caplog.text.count("nothing more to prune") == 1


async def test_without_settings_nothing_is_pruned(ledger: Ledger) -> None:
    put(ledger, "old")
    assert await retention(ledger).prune() == 0 and left(ledger, "old") == ["old"]
