"""What each policy does when; any order of it all is in test_fanout_any_order.py."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakevllm.config.serving import ServeRules
from fakevllm.groups.scheduler import (
    Abort,
    BreakOff,
    Cancel,
    GroupScheduler,
    Refuse,
    Relay,
    Score,
    Serve,
    Settle,
    Start,
)
from fakevllm.transport.request import Came

OK, FAILED, REFUSED, HIDDEN = Came.ANSWERED, Came.FAILED, Came.REFUSED, Came.HIDDEN


def begun(num: int, *, streamed: bool = True, **rules: Any) -> GroupScheduler:
    fanout = GroupScheduler(num, ServeRules(**rules), random.Random(0), comes_live=streamed)
    first = fanout.begin()
    assert first == ([Relay()] if streamed and "policy" in rules else [Start(tuple(range(num)))])
    return fanout


def test_the_best_of_all_is_served_and_the_group_settled_once_the_app_has_it() -> None:
    fanout = begun(3)
    assert fanout.finished(1, OK) == fanout.finished(0, OK) == []
    assert fanout.finished(2, OK) == [Score((0, 1, 2))]
    assert fanout.scored({0: 0.0, 1: 1.0, 2: 0.5}) == [Serve(1)]
    assert fanout.answer_ended() == [Settle()]
    assert (fanout.verdict.served, fanout.verdict.best, fanout.verdict.propensity) == (1, 1, 1.0)


def test_a_quorum_is_served_on_its_own_scores_and_the_late_one_is_scored_with_the_others() -> None:
    fanout = begun(4, quorum=3)
    assert fanout.finished(1, OK) == fanout.finished(0, OK) == []
    assert fanout.finished(3, OK) == [Score((0, 1, 3))]
    assert fanout.scored({0: 0.0, 1: 1.0, 3: 0.5}) == [Serve(1)]
    assert fanout.answer_ended() == []
    assert fanout.finished(2, OK) == [Score((0, 1, 2, 3))]
    assert fanout.scored({0: 0.0, 1: 0.5, 2: 1.0, 3: 0.1}) == [Settle()]
    assert (fanout.verdict.served, fanout.verdict.best) == (1, 2)


def test_who_comes_while_the_quorum_is_scored_does_not_hold_up_the_app() -> None:
    fanout = begun(3, quorum=2)
    assert fanout.finished(0, OK) == []
    assert fanout.finished(1, OK) == [Score((0, 1))]
    assert fanout.finished(2, OK) == []
    assert fanout.scored({0: 0.0, 1: 1.0}) == [Serve(1), Score((0, 1, 2))]


def test_a_quorum_counts_only_who_can_be_shown_and_falls_back_to_all() -> None:
    fanout = begun(3, quorum=2)
    assert fanout.finished(0, HIDDEN) == fanout.finished(1, OK) == []
    assert fanout.finished(2, FAILED) == [Score((0, 1))]
    assert fanout.scored({0: 1.0, 1: 0.0}) == [Serve(1)]


def test_a_late_sibling_that_fails_costs_no_second_scoring() -> None:
    fanout = begun(3, quorum=2)
    fanout.finished(0, OK)
    fanout.finished(1, OK)
    assert fanout.scored({0: 0.0, 1: 1.0}) == [Serve(1)]
    assert fanout.answer_ended() == []
    assert fanout.finished(2, FAILED) == [Settle()]


def test_behind_the_deadline_what_there_is_is_served() -> None:
    fanout = begun(4, deadline_s=1.0)
    fanout.finished(0, OK)
    fanout.finished(2, OK)
    assert fanout.deadline_passed() == [Score((0, 2))]
    assert fanout.scored({0: 1.0, 2: 0.0}) == [Serve(0)]


def test_behind_a_deadline_without_an_answer_the_first_one_is_served() -> None:
    fanout = begun(3, deadline_s=1.0)
    assert fanout.finished(0, FAILED) == fanout.deadline_passed() == []
    assert fanout.finished(2, OK) == [Serve(2)]
    assert fanout.answer_ended() == []
    assert fanout.finished(1, OK) == [Score((1, 2))]


def test_a_refusal_of_the_lead_is_told_at_once_and_ends_the_others() -> None:
    fanout = begun(3)
    fanout.finished(2, OK)
    assert fanout.finished(0, REFUSED) == [Cancel((1,)), Refuse()]
    assert fanout.answer_ended() == [Settle()]
    assert fanout.verdict.served is None


def test_a_lead_that_fails_is_not_seen_while_others_answer() -> None:
    fanout = begun(3)
    fanout.finished(0, FAILED)
    fanout.finished(1, OK)
    assert fanout.finished(2, FAILED) == [Serve(1)]


def test_where_nobody_answers_the_app_gets_the_leads_trouble() -> None:
    fanout = begun(2)
    fanout.finished(1, FAILED)
    assert fanout.finished(0, FAILED) == [Refuse()]
    assert fanout.answer_ended() == [Settle()]


@pytest.mark.parametrize("policy", ["lead", "greedy"])
def test_siblings_of_a_streaming_lead_start_at_its_first_token(policy: str) -> None:
    fanout = begun(3, policy=policy)
    assert fanout.lead_began() == [Start((1, 2))]
    assert fanout.lead_began() == []
    assert fanout.finished(1, OK) == fanout.finished(0, OK) == []
    assert fanout.finished(2, OK) == [Score((0, 1, 2))]
    assert fanout.scored({0: 0.0, 1: 1.0, 2: 0.5}) == [Settle()]
    assert (fanout.verdict.served, fanout.verdict.best) == (0, 1)


def test_a_lead_that_ends_with_its_first_token_still_has_siblings() -> None:
    fanout = begun(3, policy="lead")
    assert fanout.finished(0, OK) == [Start((1, 2))]


def test_a_streaming_lead_that_breaks_ends_its_group() -> None:
    fanout = begun(3, policy="lead")
    fanout.lead_began()
    fanout.finished(1, OK)
    assert fanout.finished(0, FAILED) == [Cancel((2,)), Settle()]
    assert fanout.verdict.served is None


def test_a_streaming_lead_that_is_refused_starts_nobody() -> None:
    fanout = begun(3, policy="lead")
    assert fanout.finished(0, REFUSED) == [Settle()]
    assert fanout.lead_began() == []


def test_a_whole_lead_is_served_at_once_and_scored_behind_the_app() -> None:
    fanout = begun(3, policy="lead", streamed=False)
    assert fanout.finished(1, OK) == []
    assert fanout.finished(0, OK) == [Serve(0)]
    assert fanout.finished(2, OK) == [Score((0, 1, 2))]
    assert fanout.scored({0: 0.0, 1: 1.0}) == []
    assert fanout.answer_ended() == [Settle()]


def test_a_whole_lead_that_fails_is_stood_in_for() -> None:
    fanout = begun(3, policy="lead", streamed=False)
    assert fanout.finished(0, FAILED) == []
    assert fanout.finished(2, OK) == [Serve(2)]


def test_an_app_that_leaves_cancels_its_group_where_the_policy_says_so() -> None:
    fanout = begun(3, on_disconnect="cancel")
    fanout.finished(1, OK)
    assert fanout.app_left() == [Cancel((0, 2)), Abort("client_disconnected")]
    assert fanout.finished(0, OK) == []


def test_an_app_that_leaves_a_group_to_be_finished_changes_nothing() -> None:
    fanout = begun(2, on_disconnect="finish")
    assert fanout.app_left() == fanout.finished(0, OK) == []
    assert fanout.finished(1, OK) == [Score((0, 1))]
    assert fanout.scored({0: 0.0, 1: 1.0}) == [Serve(1)]
    assert fanout.answer_ended() == [Settle()]


def test_an_app_that_leaves_a_streaming_lead_to_be_finished_changes_nothing() -> None:
    fanout = begun(2, policy="lead", on_disconnect="finish")
    assert fanout.app_left() == []
    assert fanout.lead_began() == [Start((1,))]


def test_a_stop_breaks_off_an_answer_that_has_not_ended() -> None:
    fanout = begun(2)
    assert fanout.give_up("proxy_stopped") == [
        BreakOff("proxy_stopped"),
        Cancel((0, 1)),
        Abort("proxy_stopped"),
    ]
    assert fanout.give_up("proxy_stopped") == []


def test_a_stop_behind_the_answer_breaks_nothing_off() -> None:
    fanout = begun(2, policy="lead", streamed=False)
    fanout.finished(0, OK)
    fanout.answer_ended()
    assert fanout.give_up("proxy_stopped") == [Cancel((1,)), Abort("proxy_stopped")]


def test_a_lead_that_is_refused_behind_a_served_quorum_is_one_sibling_less() -> None:
    fanout = begun(4, quorum=2)
    fanout.finished(1, OK)
    assert fanout.finished(2, OK) == [Score((1, 2))]
    assert fanout.scored({1: 0.0, 2: 1.0}) == [Serve(2)]
    assert fanout.finished(0, REFUSED) == fanout.answer_ended() == []
    assert fanout.finished(3, FAILED) == [Settle()]
    assert (fanout.verdict.best, fanout.rewards) == (2, {1: 0.0, 2: 1.0})


def test_a_lead_that_is_refused_while_a_quorum_is_scored_leaves_no_rewards() -> None:
    fanout = begun(3, quorum=2)
    fanout.finished(1, OK)
    fanout.finished(2, OK)
    assert fanout.finished(0, REFUSED) == [Refuse()]
    assert fanout.scored({1: 0.0, 2: 1.0}) == []
    assert fanout.answer_ended() == [Settle()]
    assert (fanout.verdict.best, dict(fanout.rewards)) == (None, {})
