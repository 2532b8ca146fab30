"""Snapshots and histories that are built from a server's replies, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError

import pytest

from fakevllm.overwatch.history import (
    MAX_LINES,
    MAX_STEPS,
    EvaluationRewards,
    History,
    describe_entry,
)
from fakevllm.overwatch.snapshot import AWAY, EvaluationPoint, Speed, away_snapshot, build_snapshot
from fakevllm_adapters.protocol.batch_status import PoolInformation
from tests.proxy.overwatch.cases import (
    EMPTY,
    NOW,
    STEP,
    URL,
    evaluation_entry,
    log_entry,
    pool,
    rendered_text,
    snapshot,
    snapshot_at_work,
    status,
    step_entries,
)


def test_incomplete_tasks_come_first_and_count_their_running_episodes() -> None:
    tasks = snapshot_at_work().tasks
    assert [(task.task_id, task.ended, task.running, task.mean) for task in tasks] == [
        ("sum-3", 2, 1, 0.375),
        ("sum-4", 0, 1, None),
        ("sum-1", 4, 0, 0.5),
        ("sum-2", 4, 0, 1.0),
    ]


def test_running_episodes_are_ordered_by_idle_time() -> None:
    episodes = snapshot_at_work().running
    facts = [(one.uuid, one.idle_s, one.idle_limit_s, one.calls) for one in episodes]
    assert facts == [("33334444bbbb", 200.0, 240.0, 3), ("11112222aaaa", 4.0, 240.0, 3)]


def test_a_client_that_only_runs_episodes_follows_the_active_clients() -> None:
    first, second = snapshot_at_work().clients
    assert (first.uuid, first.idle_s, first.has_agreed, first.running) == (
        "f383a582b2af9eea",
        4.0,
        True,
        1,
    )
    assert (second.uuid, second.idle_s, second.has_agreed) == ("0badc0de", 200.0, False)


def test_a_clock_behind_the_servers_gives_no_negative_durations() -> None:
    booting = pool(booting_start_time=NOW)
    early = build_snapshot(URL, NOW - 50, status("BOOTING"), booting, History())
    assert early.booting_s == 0.0 and early.clients[0].idle_s == 0.0


def test_the_snapshot_of_an_absent_server_keeps_the_last_data_and_their_time() -> None:
    before = snapshot_at_work()
    gone = away_snapshot(URL, NOW + 60, "refused", before)
    assert (gone.state, gone.trouble, gone.seen_at, gone.at) == (AWAY, "refused", NOW, NOW + 60)
    assert gone.tasks == before.tasks
    assert away_snapshot(URL, NOW, "refused", None).seen_at is None


def test_without_pool_information_there_is_no_batch() -> None:
    without_pool = build_snapshot(URL, NOW, status(), None, History())
    assert without_pool.batch is None
    assert without_pool.tasks == without_pool.clients == ()


@pytest.mark.parametrize("odd_number", ["N/A", "", "nan", "inf", "-1e999s"])
def test_odd_numbers_of_an_agentjet_server_are_accepted(odd_number: str) -> None:
    names = ("time_since_last_activity", "discard_episode_timeout", "llm_call_count")
    odd = {"episode_status": "claimed"} | dict.fromkeys(names, odd_number)
    pool_reply = PoolInformation(running_episode_details={"a": odd})
    (episode,) = snapshot(pool_reply=pool_reply).running
    assert (episode.idle_s, episode.idle_limit_s, episode.calls) == (0.0, None, 0)
    assert episode.client == ""


def test_speed_is_the_mean_over_the_last_steps_of_known_duration() -> None:
    first = log_entry(
        1, metrics={key: value for key, value in STEP.items() if key != "step_seconds"}
    )
    assert snapshot(log=[first]).speed is None
    assert snapshot(log=[first, *step_entries([0.1] * 9)[1:]]).speed == Speed(345.0, 26.5, 2.0)


def test_rewards_whose_sum_exceeds_any_float_have_an_infinite_mean() -> None:
    huge = pool(completed_tasks_rewards={"sum-1": [1e308] * 4})
    task = next(task for task in snapshot(pool_reply=huge).tasks if task.task_id == "sum-1")
    assert task.mean == math.inf


# --- the log


def test_a_step_that_is_trained_again_is_in_the_curve_once() -> None:
    log = [
        *step_entries([0.1, 0.2, 0.3]),
        log_entry(4, "restored", step=1, reason="the trainer died"),
    ]
    history = History().with_entries(log)
    assert [step.number for step in history.steps] == [1]
    again = history.with_entries([log_entry(5, step=2, metrics={"reward_mean": 0.9})])
    assert [step.metrics["reward_mean"] for step in again.steps] == [0.1, 0.9]
    assert again.last_seq == 5 and again.lines[-2].is_trouble


def test_evaluations_belong_to_the_step_of_their_weights() -> None:
    log = [
        evaluation_entry(1, 0, 0.25),
        *step_entries([0.1, 0.2]),
        evaluation_entry(3, 2, 0.5),
        evaluation_entry(4, 2, 1),
    ]
    assert snapshot(log=log).evaluations == (
        EvaluationPoint(0, 0.25, 0.25, 0.25, 1),
        EvaluationPoint(2, 0.75, 0.5, 1.0, 2),
    )
    page_by_page = History()
    for entry in log:
        page_by_page = page_by_page.with_entries([entry])
    assert page_by_page.evaluations == History().with_entries(log).evaluations


def test_evaluations_of_steps_that_are_trained_again_are_kept() -> None:
    log = [*step_entries([0.1, 0.2]), evaluation_entry(3, 1, 0.5), evaluation_entry(4, 2, 0.75)]
    history = History().with_entries(
        [*log, log_entry(5, "restored", step=1), evaluation_entry(6, 1, 1.0)]
    )
    assert history.evaluations == (
        EvaluationRewards(1, 2, 1.5, 0.5, 1.0),
        EvaluationRewards(2, 1, 0.75, 0.75, 0.75),
    )


def test_evaluations_of_steps_that_were_given_up_are_removed() -> None:
    log = [*step_entries([0.1, 0.2]), evaluation_entry(3, 1, 0.5), evaluation_entry(4, 2, 0.75)]
    history = History().with_entries([*log, log_entry(5, "restored", step=1, reason="gone_back")])
    assert history.evaluations == (EvaluationRewards(1, 1, 0.5, 0.5, 0.5),)


def test_evaluations_before_the_first_step_are_shown() -> None:
    shown = snapshot(log=[evaluation_entry(1, 0, 0.25)])
    assert shown.evaluations[0].reward == 0.25
    assert "evaluated  0.25, from 0.25 to 0.25, 1 episode at step 0" in rendered_text(shown, 80)


def test_a_single_evaluation_is_a_number_without_a_chart() -> None:
    log = [evaluation_entry(1, 0, 0.25), *step_entries([0.1, 0.2])]
    assert "of evaluations" not in rendered_text(snapshot(log=log), 80)
    log.append(evaluation_entry(3, 2, 0.5))
    assert "mean reward of evaluations, steps 0 to 2" in rendered_text(snapshot(log=log), 80)


def test_the_history_of_another_run_is_empty() -> None:
    history = History().for_run("a").with_entries(step_entries([0.1]))
    assert history.for_run("a") is history
    assert history.for_run("b") == History("b")


def test_an_entry_of_an_unknown_kind_is_skipped() -> None:
    history = History().with_entries([log_entry(7, "of_the_future")])
    assert (history.last_seq, history.lines) == (7, ())


@pytest.mark.parametrize(("num_updates", "part"), [(6.0, ", 6 updates"), (1.0, "")])
def test_the_line_of_a_step_shows_its_updates_if_there_are_several(
    num_updates: float, part: str
) -> None:
    metrics = {"tokens_trained": 53.0, "updates_made": num_updates, "step_seconds": 2.0}
    line = describe_entry(log_entry(3, version=4, metrics=metrics))
    assert line is not None
    assert line.text == f"step 3 → version 4: 53 tokens trained{part}, 2.0 s"


def test_repeated_lines_are_one_line_with_a_count() -> None:
    log = [log_entry(seq, "dropped", step=21, reasons={f"g{seq}": "stale"}) for seq in (1, 2, 3)]
    history = History().with_entries(log[:2]).with_entries(log[2:])
    (line,) = history.lines
    assert line.times == 3
    assert "dropped 1 group at step 21: 1 stale  (3 times)" in rendered_text(snapshot(log=log), 80)


def test_the_history_of_a_long_run_is_bounded() -> None:
    number = MAX_STEPS + 10
    measured = [evaluation_entry(number + step, step, 0.5) for step in range(number)]
    history = History().with_entries([*step_entries([0.5] * number), *measured])
    assert len(history.steps) == MAX_STEPS and len(history.lines) == MAX_LINES
    assert history.evaluations[0].step == history.steps[0].number - 1


# --- as JSON


def test_json_contains_the_snapshot_and_names_numbers_that_are_not_finite() -> None:
    log = [log_entry(1, metrics={"reward_mean": math.nan, "loss": -math.inf})]
    data = json.loads(json.dumps(snapshot(log=log).as_json(), allow_nan=False))
    assert data["state"] == "ROLLING" and data["batch"]["tasks_wanted"] == 4
    assert data["metrics"] == {"reward_mean": "NaN", "loss": "-Infinity"}
    assert data["curve"] == [{"step": 1, "reward": "NaN", "changed": ""}]
    assert data["running"][0]["idle_s"] == 200.0


def test_a_snapshot_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        snapshot(pool_reply=EMPTY).__setattr__("state", "OFFLINE")
