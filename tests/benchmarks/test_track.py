"""The history of figures: what is a regression, and the drawing."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.track_parts.chart import draw
from benchmarks.track_parts.figures import MEASUREMENTS
from benchmarks.track_parts.history import (
    MAX_WORSE,
    NUM_COMPARED,
    Entry,
    find_regressions,
    read_history,
)

FIRST = Entry("hop", 2.0, "a bare relay", "lower", "c0", "machine", "2026-01-01 00:00")
RATIOS = st.floats(0.01, 100.0)
ENTRIES = st.builds(
    Entry,
    st.sampled_from(["hop", "decode"]),
    RATIOS,
    st.just("a floor"),
    st.sampled_from(["lower", "higher"]),
    st.text("0123456789abcdef", min_size=7, max_size=7),
    st.sampled_from(["one, 2 cores", 'other <&"> ü']),
    st.just("2026-01-01 00:00"),
    st.booleans(),
)
HISTORIES = st.lists(ENTRIES, max_size=30)


def with_ratios(*ratios: float) -> list[Entry]:
    return [replace(FIRST, ratio=ratio, commit=f"c{at}") for at, ratio in enumerate(ratios)]


@given(HISTORIES, ENTRIES)
def test_a_regression_is_what_is_worse_than_the_median_of_the_last_five_by_more_than_a_tenth(
    history: list[Entry], new: Entry
) -> None:
    own = [entry for entry in history if entry.is_comparable_with(new)]
    found = find_regressions(history, [new])
    if not own:
        assert not found
        return
    middle = median(entry.ratio for entry in own[-NUM_COMPARED:])
    limit = middle * (1 + MAX_WORSE if new.better == "lower" else 1 - MAX_WORSE)
    is_worse = new.ratio > limit if new.better == "lower" else new.ratio < limit
    assert bool(found) == is_worse
    for regression in found:
        assert regression.median == middle and regression.last_good in own[-NUM_COMPARED:]
        assert not find_regressions(own[-NUM_COMPARED:], [regression.last_good])


@given(HISTORIES, ENTRIES, ENTRIES)
def test_entries_of_other_figures_machines_and_lengths_change_nothing(
    history: list[Entry], new: Entry, other: Entry
) -> None:
    if not other.is_comparable_with(new):
        assert find_regressions([*history, other], [new]) == find_regressions(history, [new])


@given(HISTORIES, ENTRIES, RATIOS)
def test_an_entry_that_is_better_than_a_good_one_is_good(
    history: list[Entry], new: Entry, ratio: float
) -> None:
    best = min if new.better == "lower" else max
    better = replace(new, ratio=best(new.ratio, ratio))
    if not find_regressions(history, [new]):
        assert not find_regressions(history, [better])


@given(HISTORIES)
def test_a_history_is_read_as_it_was_written(history: list[Entry]) -> None:
    assert read_history("".join(f"{entry.to_json()}\n" for entry in history)) == history


@given(HISTORIES)
def test_the_drawing_is_an_svg_with_one_point_per_entry_and_no_links(
    history: list[Entry],
) -> None:
    svg = draw(history)
    points = ElementTree.fromstring(svg).findall(".//{*}circle/{*}title")
    assert len(points) == len(history)
    assert "href" not in svg and "<script" not in svg


def test_fields_of_later_versions_are_ignored() -> None:
    assert Entry.from_json(FIRST.to_json()[:-1] + ', "later": 1}') == FIRST


def test_a_regression_names_both_commits() -> None:
    (regression,) = find_regressions(with_ratios(2.0, 2.1, 9.0), [replace(FIRST, ratio=2.5)])
    assert "at c0, and" in str(regression) and "2.1 at c1" in str(regression)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_measurement_names_the_floor_of_each_figure(name: str) -> None:
    measurement = MEASUREMENTS[name]
    assert measurement.floors and all(measurement.floors.values())
