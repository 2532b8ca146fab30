"""The picture of a snapshot. `tests.proxy.overwatch.pictures` writes the expected files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fakevllm.overwatch.chart import bounds, chart
from fakevllm.overwatch.snapshot import Notice
from fakevllm_adapters.protocol.swarm import ReplicaStatus
from tests.proxy.overwatch.cases import (
    CASES,
    NOW,
    log_entry,
    pool,
    rendered_text,
    snapshot,
    snapshot_at_work,
    status,
    step_entries,
)
from tests.proxy.overwatch.pictures import FOLDER, picture_file, pictures


@pytest.mark.parametrize(("name", "width"), list(pictures()))
def test_each_picture_equals_its_reviewed_file(name: str, width: int) -> None:
    assert rendered_text(CASES[name], width) == picture_file(name, width).read_text()


def test_every_file_belongs_to_a_case() -> None:
    expected = {picture_file(name, width).name for name, width in pictures()}
    assert {file.name for file in FOLDER.iterdir()} == expected


def test_the_docs_show_the_current_picture() -> None:
    page = Path(__file__).parents[3] / "docs/records.md"
    assert picture_file("at_work", 80).read_text() in page.read_text()


@pytest.mark.parametrize("width", [1, 8, 20, 59, 60, 99, 100, 300])
@pytest.mark.parametrize("name", sorted(CASES))
def test_no_line_is_wider_than_the_screen(name: str, width: int) -> None:
    lines = rendered_text(CASES[name], width).splitlines()
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize("num_steps", [12, 2000])
def test_the_chart_has_a_gap_and_a_caption_where_the_hooks_changed(num_steps: int) -> None:
    log = step_entries([step / num_steps for step in range(num_steps)])
    before = rendered_text(snapshot(log=log), 80)
    log[num_steps // 2].changed = "the hooks changed"
    after = rendered_text(snapshot(log=log), 80)
    assert len(lowest_row(before).split()) == 1 and "not comparable" not in before
    assert len(lowest_row(after).split()) == 2
    caption = f"step {num_steps // 2 + 1}: the hooks changed; earlier rewards are not comparable"
    assert caption in after


def lowest_row(text: str) -> str:
    """Return the columns in the lowest row of the chart, in which each finite value is visible."""
    lines = text.splitlines()
    caption = next(at for at, line in enumerate(lines) if "mean reward, steps" in line)
    return lines[caption - 1].strip("│ ").partition(" ")[2].strip()


def test_the_released_version_is_shown_once_a_decision_was_made() -> None:
    assert "released" not in rendered_text(snapshot(status(released=0)), 80)
    shown = rendered_text(snapshot(status(released=8, num_releases=3)), 80)
    assert "version 12 · released 8 · my_model" in shown


def test_each_replica_is_a_line() -> None:
    replicas = [
        ReplicaStatus(name="replica-0", state="serving", version=3, running=2, waiting=1),
        ReplicaStatus(name="replica-1", state="loading", version=2),
    ]
    lines = rendered_text(replace(snapshot_at_work(), replicas=replicas), 100).splitlines()
    shown = [line for line in lines if "replica-" in line]
    assert "replica-0: version 3, 2 running, 1 waiting, serving" in shown[0]
    assert "replica-1: version 2, 0 running, loading" in shown[1]


def test_control_characters_of_others_are_escaped() -> None:
    evil = "\x1b]0;mine\x07[red]\nnext\x9b2J"
    evil_snapshot = snapshot(
        status(
            engine_status_detail=evil,
            model=evil,
            run_id=evil,
            totals={f"branch_{evil}": 1.0},
            dropped={evil: 1},
            waiting={evil: 1},
        ),
        pool(
            completed_tasks_details={evil: ["a"]},
            running_episode_details={evil: {"client_uuid": evil, "optional_task_id": evil}},
        ),
        log=[log_entry(1, metrics={f"train_{evil}": 1.0})],
        notices=(Notice(NOW, evil, evil),),
    )
    text = rendered_text(evil_snapshot, 120)
    assert "[red]⏎next" in text
    assert not set(text) & {"\x1b", "\x07", "\x9b"}


def test_a_chart_shows_means_if_there_are_more_values_than_columns() -> None:
    rows = chart([0.0, 1.0] * 500 + [1.0] * 1000, 20, 4)
    assert [len(row) for row in rows] == [20] * 4
    assert rows[0].rstrip().endswith("█") and rows[-1].startswith("▁")


@given(st.lists(st.floats(), max_size=300), st.integers(1, 50), st.integers(1, 6))
def test_a_chart_keeps_its_size_for_any_values(
    values: list[float], width: int, height: int
) -> None:
    rows = chart(values, width, height)
    assert len(rows) in (0, height)
    assert {len(row) for row in rows} <= {min(width, len(values))}
    assert bool(rows) == (bounds(values, width) is not None)
    assert bool(rows) <= any(map(math.isfinite, values))


def test_a_metric_that_was_not_measured_is_left_out() -> None:
    assert "mismatch" in rendered_text(snapshot_at_work(), 80)
    assert "mismatch" not in rendered_text(snapshot(), 80)
