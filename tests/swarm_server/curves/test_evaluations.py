"""When the evaluations of a step are charted, and that each step is charted whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.curves.points import QUIET_S, Cursor, Evaluation, Evaluations, Point


def evaluations(
    *steps: int, newest: int, since: int = -1, charted: int | None = None
) -> Evaluations:
    """One a second, of these steps, numbered from 1; their rewards are their numbers."""
    found = [Evaluation(step, float(seq), float(seq)) for seq, step in enumerate(steps, 1)]
    told = [one for one in found if one.step >= since]
    return Evaluations(told, newest, newest if charted is None else charted)


def means(points: list[Point]) -> list[tuple[int, float]]:
    return [(point.step, point.values["val/reward/mean"]) for point in points]


def test_a_step_is_charted_once_newer_weights_are_served() -> None:
    points, cursor = evaluations(1, 1, 2, newest=2).charted(Cursor(), 3.0, is_last=False)
    assert means(points) == [(1, 1.5)]
    assert cursor == Cursor(evaluated_step=1, num_evaluations=2)
    assert points[0].values["val/episodes"] == 2
    assert points[0].at == 2.0


def test_the_latest_step_is_charted_when_nothing_more_is_heard_of_it() -> None:
    of_one = evaluations(1, 1, newest=1)
    assert of_one.charted(Cursor(), 2 + QUIET_S, is_last=False)[0] == []
    points, cursor = of_one.charted(Cursor(), 2.1 + QUIET_S, is_last=False)
    assert means(points) == [(1, 1.5)]
    assert of_one.charted(cursor, 9 + QUIET_S, is_last=False) == ([], cursor)


def test_the_latest_step_is_charted_when_the_run_ends() -> None:
    assert means(evaluations(1, newest=1).charted(Cursor(), 1.0, is_last=True)[0]) == [(1, 1.0)]


def test_a_step_that_comes_to_more_is_charted_whole_once_more() -> None:
    _, cursor = evaluations(0, 1, newest=1).charted(Cursor(), 2.0, is_last=True)
    more = evaluations(0, 1, 1, newest=1, since=cursor.evaluated_step)
    assert means(more.charted(cursor, 3.0, is_last=True)[0]) == [(1, 2.5)]


def test_a_step_that_is_to_be_trained_again_is_charted_behind_it() -> None:
    again = evaluations(1, 3, newest=2, charted=2)
    points, cursor = again.charted(Cursor(), 99.0, is_last=True)
    assert means(points) == [(1, 1.0)]
    again = evaluations(1, 3, newest=3, charted=3, since=cursor.evaluated_step)
    assert means(again.charted(cursor, 99.0, is_last=True)[0]) == [(3, 2.0)]


@given(st.lists(st.integers(0, 4), min_size=1), st.data())
def test_however_often_one_looks_the_last_point_of_each_step_is_its_whole_mean(
    steps: list[int], data: st.DataObject
) -> None:
    steps.sort()
    cursor, told = Cursor(), dict[int, float]()
    looks = data.draw(st.lists(st.integers(1, len(steps)), unique=True).map(sorted))
    for num in [*looks, len(steps)]:
        newest = steps[num - 1]
        seen = evaluations(*steps[:num], newest=newest, since=cursor.evaluated_step)
        points, cursor = seen.charted(cursor, float(num), is_last=num == len(steps))
        told |= dict(means(points))
    whole = evaluations(*steps, newest=9).charted(Cursor(), 0.0, is_last=True)[0]
    assert told == dict(means(whole))
