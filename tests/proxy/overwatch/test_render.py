"""The picture, as it was looked at: `python -m tests.overwatch.pictures` draws the files anew."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fakevllm.overwatch.chart import bounds, chart
from fakevllm.overwatch.snapshot import Notice
from tests.proxy.overwatch.cases import CASES, NOW, at_work, entry, pool, shot, status, text_of
from tests.proxy.overwatch.pictures import FOLDER, file_of, pictures


@pytest.mark.parametrize(("name", "width"), list(pictures()))
def test_the_picture_is_the_one_that_was_looked_at(name: str, width: int) -> None:
    assert text_of(CASES[name], width) == file_of(name, width).read_text()


def test_no_picture_is_left_over() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {file_of(*one).name for one in pictures()}


def test_the_docs_show_the_picture_as_it_is() -> None:
    page = Path(__file__).parents[3] / "docs/records.md"
    assert file_of("at_work", 80).read_text() in page.read_text()


@pytest.mark.parametrize("width", [1, 8, 20, 59, 60, 99, 100, 300])
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_width_is_kept_to(name: str, width: int) -> None:
    assert all(cell_len(line) <= width for line in text_of(CASES[name], width).splitlines())


def test_what_others_say_is_shown_and_not_obeyed() -> None:
    evil = "\x1b]0;mine\x07[red]\nnext\x9b2J"
    told = shot(
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
        log=[entry(1, metrics={f"train_{evil}": 1.0})],
        notices=(Notice(NOW, evil, evil),),
    )
    text = text_of(told, 120)
    assert "[red]⏎next" in text
    assert not set(text) & {"\x1b", "\x07", "\x9b"}


def test_a_longer_run_than_the_chart_is_wide_is_drawn_by_means() -> None:
    rows = chart([0.0, 1.0] * 500 + [1.0] * 1000, 20, 4)
    assert [len(row) for row in rows] == [20] * 4
    assert rows[0].rstrip().endswith("█") and rows[-1].startswith("▁")


@given(st.lists(st.floats(), max_size=300), st.integers(1, 50), st.integers(1, 6))
def test_a_chart_keeps_its_bounds_whatever_is_drawn(
    values: list[float], width: int, height: int
) -> None:
    rows = chart(values, width, height)
    assert len(rows) in (0, height)
    assert {len(row) for row in rows} <= {min(width, len(values))}
    assert bool(rows) == (bounds(values, width) is not None)
    assert bool(rows) <= any(map(math.isfinite, values))


def test_an_unmeasured_number_is_left_out() -> None:
    assert "mismatch" in text_of(at_work(), 80)
    assert "mismatch" not in text_of(shot(), 80)
