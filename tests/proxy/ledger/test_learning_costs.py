"""What learning costs: tokens and seconds of training steps, and the versions that they made."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fakevllm.ledger.learning_costs import StepSeconds, TokenCosts
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.records import EVAL_KIND, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.swarm import LogEntry
from tests.proxy.ledger.ledger_cases import group, restored, trained


def of_tokens(
    name: str, tokens: Sequence[int | None], step: int | None = 1, *, served: int = 0
) -> GroupRecord:
    one = group(name, [0.5 for _ in tokens], step=step, served=served)
    siblings = [
        replace(sibling, completion_tokens=num)
        for sibling, num in zip(one.siblings, tokens, strict=True)
    ]
    return replace(one, siblings=siblings, run_id="r")


def put(ledger: Ledger, *records: GroupRecord) -> None:
    for record in records:
        ledger.record(record)
    assert ledger.drain()


def timed(seq: int, *names: str, step: int, step_s: float, update_s: float) -> LogEntry:
    metrics = {"step_seconds": step_s, "seconds": update_s}
    return trained(seq, *names, step=step).model_copy(update={"metrics": metrics, "version": seq})


def test_tokens_are_counted_by_step_for_apps_siblings_and_training(
    path: Path, ledger: Ledger
) -> None:
    put(
        ledger,
        of_tokens("a", [10, 20, 30], served=1),
        of_tokens("b", [5, None], step=2),
        replace(of_tokens("single", [7], step=None), state="served"),
    )
    ledger.apply_log("r", [trained(1, "a", step=1, siblings=[0, 2])])
    assert ledger.drain()
    summary = ReadOnlyLedger(path).summary
    first, second = summary.curve_points("r", 10)
    assert first.tokens == TokenCosts(sampled=60, served=20, trained=40)
    assert second.tokens == TokenCosts(sampled=5, served=5, trained=0)
    costs = summary.costs("r")
    assert costs.run_tokens == TokenCosts(sampled=65, served=25, trained=40)
    assert costs.all_tokens == TokenCosts(sampled=72, served=32, trained=40)
    assert (costs.run_tokens.others, costs.run_tokens.ratio) == (40, 65 / 25)
    (point,) = summary.curve_points("r", 1)
    assert point.tokens == costs.run_tokens
    assert summary.costs("other").run_tokens == TokenCosts()


def test_a_run_without_tokens_has_no_ratio() -> None:
    assert TokenCosts().ratio is None and TokenCosts(sampled=5).ratio is None


def test_groups_without_rewards_cost_tokens_too(path: Path, ledger: Ledger) -> None:
    put(ledger, replace(group("a", [None, None], step=1), run_id="r"))
    summary = ReadOnlyLedger(path).summary
    assert summary.curve_points("r", 10) == []
    assert summary.costs("r").run_tokens == TokenCosts(sampled=6, served=3)


def test_tokens_of_evaluations_are_counted_apart(path: Path, ledger: Ledger) -> None:
    put(ledger, replace(of_tokens("row", [4, 4], step=None), kind=EVAL_KIND))
    costs = ReadOnlyLedger(path).summary.costs("r")
    assert (costs.evaluated, costs.all_tokens) == (8, TokenCosts())


def test_a_step_has_the_seconds_that_the_server_has_measured(path: Path, ledger: Ledger) -> None:
    put(ledger, *(of_tokens(f"g{step}", [1, 1], step) for step in (1, 2, 3)))
    ledger.apply_log(
        "r",
        [
            trained(1, "g1", step=1),
            timed(2, "g2", step=2, step_s=3.0, update_s=0.5),
            timed(3, "g3", step=3, step_s=math.nan, update_s=math.inf),
        ],
    )
    assert ledger.drain() and ledger.health.ok
    summary = ReadOnlyLedger(path).summary
    seconds = [point.seconds for point in summary.curve_points("r", 10)]
    assert seconds == [StepSeconds(), StepSeconds(3.0, 0.5), StepSeconds()]
    assert summary.costs("r").run_seconds == StepSeconds(3.0, 0.5)
    assert summary.costs("other").run_seconds == StepSeconds()


def test_a_step_that_is_trained_again_costs_its_time_twice(path: Path, ledger: Ledger) -> None:
    put(ledger, of_tokens("g", [1, 1]))
    ledger.apply_log("r", [timed(1, "g", step=1, step_s=2.0, update_s=1.0)])
    ledger.apply_log("r", [restored(2), timed(3, "g", step=1, step_s=4.0, update_s=1.0)])
    assert ledger.drain()
    summary = ReadOnlyLedger(path).summary
    (point,) = summary.curve_points("r", 10)
    assert point.seconds == StepSeconds(6.0, 2.0)
    assert point.tokens == TokenCosts(sampled=2, served=1, trained=2)
    assert summary.steps_of_versions("r") == {1: 1, 3: 1}
    assert summary.steps_of_versions("other") == {}


def test_a_ledger_from_before_the_costs_gets_its_tokens_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(path)
    put(ledger, of_tokens("g", [4, 6]), replace(of_tokens("e", [5], None), kind=EVAL_KIND))
    ledger.apply_log("r", [timed(7, "g", step=2, step_s=1.0, update_s=1.0)])
    assert ledger.drain()
    ledger.close()
    before = ReadOnlyLedger(path).summary.costs("r")
    with closing(sqlite3.connect(path)) as db, db:
        for table in ("step_tokens", "trained_versions"):
            db.execute(f"DROP TABLE {table}")
        db.execute("DELETE FROM counters WHERE subject = 'tokens' AND name <> 'sampled'")
        db.execute("DELETE FROM migrations WHERE name = 'm019_costs'")
    Ledger.open(path).close()
    summary = ReadOnlyLedger(path).summary
    assert summary.costs("r") == replace(before, run_seconds=StepSeconds())
    assert summary.steps_of_versions("r") == {7: 2}
