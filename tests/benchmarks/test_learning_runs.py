"""Tables of learning benchmarks: runs, their frozen controls, and the cells of each benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks import demo_learning, gsm8k_format, learning_runs, opencode_sessions
from fakevllm.ledger.records import EVAL_KIND
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import group


@dataclass(frozen=True, slots=True)
class ShortRun(learning_runs.LearningRun):
    WINDOW = 2

    def own_cells(self) -> dict[str, str]:
        return {"steps": str(len(self.policy_mean))}


def run_briefly(folder: Path, seed: int, control: str) -> ShortRun:
    assert folder.name == f"{control}-{seed}"
    return ShortRun(seed, control, [0.2, 0.4, 0.9, 0.7], 59.6)


def test_the_control_of_a_seed_comes_right_after_its_training_run(tmp_path: Path) -> None:
    runs = learning_runs.run_with_controls(run_briefly, tmp_path, 2)
    assert [(one.seed, one.control) for one in runs] == [
        (0, "none"),
        (0, "frozen"),
        (1, "none"),
        (1, "frozen"),
    ]


def test_start_and_end_are_means_over_the_first_and_the_last_steps() -> None:
    done = run_briefly(Path("none-0"), 0, "none")
    assert (done.start, done.end) == (pytest.approx(0.3), pytest.approx(0.8))


def test_a_benchmarks_own_columns_come_before_the_last_column(tmp_path: Path) -> None:
    header, rows = learning_runs.create_table(
        learning_runs.run_with_controls(run_briefly, tmp_path, 1)
    )
    assert header == [
        "seed",
        "updates",
        "policy mean at the start",
        "at the end",
        "change",
        "steps",
        "wall s",
    ]
    assert rows == [
        ["0", "yes", "0.300", "0.800", "+0.500", "4", "60"],
        ["0", "no (frozen)", "0.300", "0.800", "+0.500", "4", "60"],
    ]


def test_the_gsm8k_table_shows_groups_by_state() -> None:
    groups: dict[tuple[str, str | None], int] = {("trained", None): 8, ("dropped", "stale"): 2}
    cells = gsm8k_format.Gsm8kRun(0, "none", [0.5] * 3, 1.0, groups, "").own_cells()
    assert cells == {"steps": "3", "groups by state": "2 dropped, 8 trained"}


def test_the_opencode_table_shows_the_first_and_the_last_calls() -> None:
    calls = [0.0] * 24 + [1.0] * 24
    cells = opencode_sessions.OpencodeRun(0, "none", [0.5] * 3, 1.0, calls, "2 turns").own_cells()
    assert cells == {
        "first 24 calls": "0.000",
        "last 24": "1.000",
        "steps": "3",
        "the users saw": "2 turns",
        "releases": "-",
    }


def test_the_table_of_the_demo_shows_both_probes_and_the_lowest_of_the_last_steps() -> None:
    numbers = {
        "before": 0.52,
        "after": 0.97,
        "policy_mean": [0.4, 0.1] + [0.9] * 49 + [0.75],
        "wall_s": 90.0,
        "seed": 1,
        "control": "none",
        "groups": {"trained": 1200, "dropped": 90},
        "steps": 150,
    }
    done = demo_learning.DemoRun.from_json(numbers)
    assert (done.seed, done.control, done.wall_s) == (1, "none", 90.0)
    assert done.own_cells() == {
        "lowest of the last 50": "0.75",
        "probe before": "0.520",
        "after": "0.970",
        "steps": "52",
        "groups by state": "90 dropped, 1200 trained",
    }


def test_rows_of_evaluations_are_not_among_the_calls_of_a_run(tmp_path: Path) -> None:
    request = '{"messages":[{"role":"user","content":"hi"}]}'
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.record(replace(group("app", [0.0, 1.0]), request_json=request))
    ledger.record(replace(group("row", [1.0, 1.0]), request_json=request, kind=EVAL_KIND))
    assert ledger.drain()
    ledger.close()
    assert opencode_sessions.call_means(tmp_path / "ledger.sqlite") == [0.5]
