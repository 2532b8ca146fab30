"""Learning curves that SQLite reduces to the points of a chart."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.records import GroupRecord, StepRow
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import group

HUGE = 1.7e308


def of_step(
    number: int, step: int, rewards: Sequence[float | None], hook: str = "h", by: str | None = None
) -> GroupRecord:
    one = group(f"g{number}", rewards, step=step, received_at=1000.0 + number)
    return replace(one, run_id="r", hook_hash=hook, served_by=by)


def put(ledger: Ledger, *groups: GroupRecord) -> None:
    for one in groups:
        ledger.record(one)
    assert ledger.drain()


def weighted(rows: Sequence[StepRow], value: Callable[[StepRow], float | None]) -> float | None:
    """Return the mean over the steps, weighted by the number of groups."""
    pairs = [(mean, row.groups) for row in rows if (mean := value(row)) is not None]
    num = sum(groups for _, groups in pairs)
    return sum(mean * groups for mean, groups in pairs) / num if num else None


def test_no_point_has_steps_from_both_sides_of_a_change(path: Path, ledger: Ledger) -> None:
    steps = [step for step in range(6) for _ in range(1 + step % 2)]
    put(
        ledger,
        *(of_step(at, step, (0.5, None), f"h{step // 3}") for at, step in enumerate(steps)),
    )
    summary = ReadOnlyLedger(path).summary
    points = summary.curve_points("r", 3)
    spans = [(point.first_step, point.last_step, point.changed) for point in points]
    assert spans == [(0, 1, ""), (2, 2, ""), (3, 4, "the hooks changed"), (5, 5, "")]
    assert [point.groups for point in points] == [3, 1, 3, 2]
    assert points[0].policy_mean == 0.5 and points[0].returned_random is None
    assert summary.curve_points("other", 3) == []


def test_a_point_has_the_means_of_its_steps(path: Path, ledger: Ledger) -> None:
    source = random.Random(7)
    groups = [
        of_step(
            number,
            source.randrange(3, 40),
            [source.choice([None, 0.0, 0.25, 1.0]) for _ in range(3)],
            by=source.choice([None, "random", "best"]),
        )
        for number in range(80)
    ]
    put(ledger, *groups)
    summary = ReadOnlyLedger(path).summary
    rows = summary.curve("r")
    for size in (1, 4, 100):
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        points = summary.curve_points("r", -(-len(rows) // size))
        assert len(points) == len(parts)
        for part, point in zip(parts, points, strict=True):
            assert (point.first_step, point.last_step) == (part[0].step, part[-1].step)
            assert point.groups == sum(row.groups for row in part)
            assert point.without_signal == sum(row.without_signal for row in part)
            for mean, value in (
                (point.policy_mean, weighted(part, lambda row: row.policy_mean)),
                (point.returned_best, weighted(part, lambda row: row.returned_best)),
                (point.returned_random, weighted(part, lambda row: row.returned_random)),
            ):
                assert mean == (None if value is None else pytest.approx(value))


def test_a_mean_of_huge_rewards_is_left_out(path: Path, ledger: Ledger) -> None:
    put(ledger, of_step(1, 1, (HUGE, HUGE)), of_step(2, 1, (HUGE, HUGE)))
    points = ReadOnlyLedger(path).summary.curve_points("r", 10)
    assert [point.policy_mean for point in points] == [None]
