"""When the evaluations of a step become a point, and that the point includes all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.curves.points import QUIET_S, Cursor, Evaluation, Evaluations, Point


def evaluations(
    *steps: int, newest: int, since: int = -1, charted: int | None = None
) -> Evaluations:
    """Return one evaluation for each of the steps, from step `since` on.

    The n-th evaluation has reward n and ends n seconds after the epoch, counted from 1.
    """
    numbered = [Evaluation(step, float(seq), float(seq)) for seq, step in enumerate(steps, 1)]
    selected = [evaluation for evaluation in numbered if evaluation.step >= since]
    return Evaluations(selected, newest, newest if charted is None else charted)


def means(points: list[Point]) -> list[tuple[int, float]]:
    return [(point.step, point.values["val/reward/mean"]) for point in points]


def test_a_step_has_a_point_once_newer_weights_are_served() -> None:
    points, cursor = evaluations(1, 1, 2, newest=2).new_points(Cursor(), 3.0, is_last=False)
    assert means(points) == [(1, 1.5)]
    assert cursor == Cursor(evaluated_step=1, num_evaluations=2)
    assert points[0].values["val/episodes"] == 2
    assert points[0].at == 2.0


def test_the_latest_step_has_a_point_after_a_time_without_evaluations() -> None:
    of_one_step = evaluations(1, 1, newest=1)
    assert of_one_step.new_points(Cursor(), 2 + QUIET_S, is_last=False)[0] == []
    points, cursor = of_one_step.new_points(Cursor(), 2.1 + QUIET_S, is_last=False)
    assert means(points) == [(1, 1.5)]
    assert of_one_step.new_points(cursor, 9 + QUIET_S, is_last=False) == ([], cursor)


def test_the_latest_step_has_a_point_when_the_run_ends() -> None:
    points, _ = evaluations(1, newest=1).new_points(Cursor(), 1.0, is_last=True)
    assert means(points) == [(1, 1.0)]


def test_a_step_with_more_evaluations_gets_a_second_point_with_all_of_them() -> None:
    _, cursor = evaluations(0, 1, newest=1).new_points(Cursor(), 2.0, is_last=True)
    more = evaluations(0, 1, 1, newest=1, since=cursor.evaluated_step)
    assert means(more.new_points(cursor, 3.0, is_last=True)[0]) == [(1, 2.5)]


def test_evaluations_of_a_step_to_be_trained_again_are_written_after_the_step() -> None:
    before = evaluations(1, 3, newest=2, charted=2)
    points, cursor = before.new_points(Cursor(), 99.0, is_last=True)
    assert means(points) == [(1, 1.0)]
    after = evaluations(1, 3, newest=3, charted=3, since=cursor.evaluated_step)
    assert means(after.new_points(cursor, 99.0, is_last=True)[0]) == [(3, 2.0)]


@given(st.lists(st.integers(0, 4), min_size=1), st.data())
def test_the_last_point_of_each_step_is_its_mean_however_often_points_are_written(
    steps: list[int], data: st.DataObject
) -> None:
    steps.sort()
    cursor, last_points = Cursor(), dict[int, float]()
    reads = data.draw(st.lists(st.integers(1, len(steps)), unique=True).map(sorted))
    for num in [*reads, len(steps)]:
        newest = steps[num - 1]
        known = evaluations(*steps[:num], newest=newest, since=cursor.evaluated_step)
        points, cursor = known.new_points(cursor, float(num), is_last=num == len(steps))
        last_points |= dict(means(points))
    all_points, _ = evaluations(*steps, newest=9).new_points(Cursor(), 0.0, is_last=True)
    assert last_points == dict(means(all_points))
