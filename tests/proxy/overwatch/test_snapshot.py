"""What is made of a server's replies, and that it is told whole as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError

import pytest

from fakevllm.overwatch.history import MAX_LINES, MAX_STEPS, Evaluated, History
from fakevllm.overwatch.snapshot import AWAY, EvaluationPoint, Speed, away, taken
from fakevllm_adapters.protocol.pool import PoolInformation
from tests.proxy.overwatch.cases import (
    EMPTY,
    NOW,
    STEP,
    URL,
    at_work,
    entry,
    evaluated,
    pool,
    shot,
    status,
    steps,
    text_of,
)


def test_tasks_under_way_stand_before_whole_ones_and_count_who_plays_them() -> None:
    told = [(task.task_id, task.ended, task.running, task.mean) for task in at_work().tasks]
    assert told == [
        ("sum-3", 2, 1, 0.375),
        ("sum-4", 0, 1, None),
        ("sum-1", 4, 0, 0.5),
        ("sum-2", 4, 0, 1.0),
    ]


def test_running_episodes_stand_with_the_longest_idle_first() -> None:
    told = [(one.uuid, one.idle_s, one.idle_limit_s, one.calls) for one in at_work().running]
    assert told == [("33334444bbbb", 200.0, 240.0, 3), ("11112222aaaa", 4.0, 240.0, 3)]


def test_a_client_that_only_plays_is_shown_beside_those_with_a_say() -> None:
    first, second = at_work().clients
    assert (first.uuid, first.idle_s, first.has_agreed, first.running) == (
        "f383a582b2af9eea",
        4.0,
        True,
        1,
    )
    assert (second.uuid, second.idle_s, second.has_agreed) == ("0badc0de", 200.0, False)


def test_a_clock_that_goes_before_the_servers_makes_no_negative_times() -> None:
    told = taken(URL, NOW - 50, status("BOOTING"), pool(booting_start_time=NOW), History())
    assert told.booting_s == 0.0 and told.clients[0].idle_s == 0.0


def test_a_server_that_went_away_keeps_what_was_seen_and_says_when() -> None:
    before = at_work()
    gone = away(URL, NOW + 60, "refused", before)
    assert (gone.state, gone.trouble, gone.seen_at, gone.at) == (AWAY, "refused", NOW, NOW + 60)
    assert gone.tasks == before.tasks
    assert away(URL, NOW, "refused", None).seen_at is None


def test_a_server_that_tells_no_batch_has_none() -> None:
    told = taken(URL, NOW, status(), None, History())
    assert told.batch is None and told.tasks == () and told.clients == ()


@pytest.mark.parametrize("odd_number", ["N/A", "", "nan", "inf", "-1e999s"])
def test_an_agentjet_servers_details_of_other_kinds_are_read(odd_number: str) -> None:
    names = ("time_since_last_activity", "discard_episode_timeout", "llm_call_count")
    odd = {"episode_status": "claimed"} | dict.fromkeys(names, odd_number)
    told = shot(batch=PoolInformation(running_episode_details={"a": odd})).running[0]
    assert (told.idle_s, told.idle_limit_s, told.calls, told.client) == (0.0, None, 0, "")


def test_speed_is_the_mean_of_the_last_steps_whose_time_is_known() -> None:
    first = entry(1, metrics={key: value for key, value in STEP.items() if key != "step_seconds"})
    assert shot(log=[first]).speed is None
    assert shot(log=[first, *steps([0.1] * 9)[1:]]).speed == Speed(345.0, 26.5, 2.0)


def test_a_huge_reward_is_shown_and_not_stumbled_over() -> None:
    huge = pool(completed_tasks_rewards={"sum-1": [1e308] * 4})
    task = next(task for task in shot(batch=huge).tasks if task.task_id == "sum-1")
    assert task.mean == math.inf


# --- the log


def test_steps_that_are_undone_and_trained_again_are_in_the_curve_once() -> None:
    log = [*steps([0.1, 0.2, 0.3]), entry(4, "restored", step=1, reason="the trainer died")]
    history = History().followed(log)
    assert [step.number for step in history.steps] == [1]
    again = history.followed([entry(5, step=2, metrics={"reward_mean": 0.9})])
    assert [step.metrics["reward_mean"] for step in again.steps] == [0.1, 0.9]
    assert again.last_seq == 5 and again.lines[-2].is_trouble


def test_evaluations_stand_by_the_step_of_their_weights() -> None:
    log = [evaluated(1, 0, 0.25), *steps([0.1, 0.2]), evaluated(3, 2, 0.5), evaluated(4, 2, 1)]
    assert shot(log=log).evaluations == (
        EvaluationPoint(0, 0.25, 0.25, 0.25, 1),
        EvaluationPoint(2, 0.75, 0.5, 1.0, 2),
    )
    page_by_page = History()
    for one in log:
        page_by_page = page_by_page.followed([one])
    assert page_by_page.evaluated == History().followed(log).evaluated


def test_evaluations_of_steps_that_are_trained_again_stay() -> None:
    log = [*steps([0.1, 0.2]), evaluated(3, 1, 0.5), evaluated(4, 2, 0.75)]
    history = History().followed([*log, entry(5, "restored", step=1), evaluated(6, 1, 1.0)])
    assert history.evaluated == (
        Evaluated(1, 2, 1.5, 0.5, 1.0),
        Evaluated(2, 1, 0.75, 0.75, 0.75),
    )


def test_evaluations_of_steps_that_were_given_up_go_with_them() -> None:
    log = [*steps([0.1, 0.2]), evaluated(3, 1, 0.5), evaluated(4, 2, 0.75)]
    history = History().followed([*log, entry(5, "restored", step=1, reason="gone_back")])
    assert history.evaluated == (Evaluated(1, 1, 0.5, 0.5, 0.5),)


def test_evaluations_that_came_before_any_step_are_told() -> None:
    told = shot(log=[evaluated(1, 0, 0.25)])
    assert told.evaluations[0].reward == 0.25
    assert "evaluated  0.25, from 0.25 to 0.25, 1 episode at step 0" in text_of(told, 80)


def test_a_single_evaluation_is_a_number_and_no_curve() -> None:
    log = [evaluated(1, 0, 0.25), *steps([0.1, 0.2])]
    assert "of evaluations" not in text_of(shot(log=log), 80)
    log.append(evaluated(3, 2, 0.5))
    assert "mean reward of evaluations, steps 0 to 2" in text_of(shot(log=log), 80)


def test_another_run_begins_an_empty_log() -> None:
    history = History().of_run("a").followed(steps([0.1]))
    assert history.of_run("a") is history
    assert history.of_run("b") == History("b")


def test_a_kind_of_entry_that_is_not_known_is_gone_on_behind() -> None:
    history = History().followed([entry(7, "of_the_future")])
    assert (history.last_seq, history.lines) == (7, ())


def test_what_is_told_again_and_again_is_one_line_with_a_count() -> None:
    log = [entry(seq, "dropped", step=21, reasons={f"g{seq}": "stale"}) for seq in (1, 2, 3)]
    history = History().followed(log[:2]).followed(log[2:])
    (line,) = history.lines
    assert line.times == 3
    assert "dropped 1 group at step 21: 1 stale  (3 times)" in text_of(shot(log=log), 80)


def test_a_long_run_is_kept_in_bounds() -> None:
    number = MAX_STEPS + 10
    measured = [evaluated(number + step, step, 0.5) for step in range(number)]
    history = History().followed([*steps([0.5] * number), *measured])
    assert len(history.steps) == MAX_STEPS and len(history.lines) == MAX_LINES
    assert history.evaluated[0].step == history.steps[0].number - 1


# --- as JSON


def test_a_snapshot_is_told_whole_as_json_and_its_odd_numbers_by_name() -> None:
    log = [entry(1, metrics={"reward_mean": math.nan, "loss": -math.inf})]
    told = json.loads(json.dumps(shot(log=log).as_json(), allow_nan=False))
    assert told["state"] == "ROLLING" and told["batch"]["tasks_wanted"] == 4
    assert told["metrics"] == {"reward_mean": "NaN", "loss": "-Infinity"}
    assert told["curve"] == [{"step": 1, "reward": "NaN"}]
    assert told["running"][0]["idle_s"] == 200.0


def test_nobody_changes_a_snapshot() -> None:
    with pytest.raises(FrozenInstanceError):
        shot(batch=EMPTY).__setattr__("state", "OFFLINE")
