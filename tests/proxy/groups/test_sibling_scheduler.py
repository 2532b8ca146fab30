"""The decisions of each serve policy. test_scheduler_any_order.py covers other orders of events."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakevllm.config.serving import ServeRules
from fakevllm.groups.sibling_scheduler import (
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
from fakevllm.transport.request import SiblingOutcome

OK, FAILED, REFUSED, HIDDEN = (
    SiblingOutcome.ANSWERED,
    SiblingOutcome.FAILED,
    SiblingOutcome.REFUSED,
    SiblingOutcome.HIDDEN,
)


def begun(num: int, *, streamed: bool = True, **rules: Any) -> GroupScheduler:
    scheduler = GroupScheduler(num, ServeRules(**rules), random.Random(0), can_stream=streamed)
    first = scheduler.begin()
    assert first == ([Relay()] if streamed and "policy" in rules else [Start(tuple(range(num)))])
    return scheduler


def test_the_best_sibling_is_served_and_then_the_group_is_settled() -> None:
    scheduler = begun(3)
    assert scheduler.sibling_finished(1, OK) == scheduler.sibling_finished(0, OK) == []
    assert scheduler.sibling_finished(2, OK) == [Score((0, 1, 2))]
    assert scheduler.scoring_finished({0: 0.0, 1: 1.0, 2: 0.5}) == [Serve(1)]
    assert scheduler.answer_sent() == [Settle()]
    assert (
        scheduler.selection.served,
        scheduler.selection.best,
        scheduler.selection.propensity,
    ) == (1, 1, 1.0)


def test_a_quorum_is_served_by_its_own_rewards_and_a_late_sibling_is_scored_with_all() -> None:
    scheduler = begun(4, quorum=3)
    assert scheduler.sibling_finished(1, OK) == scheduler.sibling_finished(0, OK) == []
    assert scheduler.sibling_finished(3, OK) == [Score((0, 1, 3))]
    assert scheduler.scoring_finished({0: 0.0, 1: 1.0, 3: 0.5}) == [Serve(1)]
    assert scheduler.answer_sent() == []
    assert scheduler.sibling_finished(2, OK) == [Score((0, 1, 2, 3))]
    assert scheduler.scoring_finished({0: 0.0, 1: 0.5, 2: 1.0, 3: 0.1}) == [Settle()]
    assert (scheduler.selection.served, scheduler.selection.best) == (1, 2)


def test_an_answer_that_arrives_while_the_quorum_is_scored_does_not_delay_the_app() -> None:
    scheduler = begun(3, quorum=2)
    assert scheduler.sibling_finished(0, OK) == []
    assert scheduler.sibling_finished(1, OK) == [Score((0, 1))]
    assert scheduler.sibling_finished(2, OK) == []
    assert scheduler.scoring_finished({0: 0.0, 1: 1.0}) == [Serve(1), Score((0, 1, 2))]


def test_a_quorum_counts_only_servable_siblings_and_is_lifted_once_all_have_ended() -> None:
    scheduler = begun(3, quorum=2)
    assert scheduler.sibling_finished(0, HIDDEN) == scheduler.sibling_finished(1, OK) == []
    assert scheduler.sibling_finished(2, FAILED) == [Score((0, 1))]
    assert scheduler.scoring_finished({0: 1.0, 1: 0.0}) == [Serve(1)]


def test_a_late_sibling_that_fails_causes_no_second_scoring() -> None:
    scheduler = begun(3, quorum=2)
    scheduler.sibling_finished(0, OK)
    scheduler.sibling_finished(1, OK)
    assert scheduler.scoring_finished({0: 0.0, 1: 1.0}) == [Serve(1)]
    assert scheduler.answer_sent() == []
    assert scheduler.sibling_finished(2, FAILED) == [Settle()]


def test_after_the_deadline_the_best_of_the_existing_answers_is_served() -> None:
    scheduler = begun(4, deadline_s=1.0)
    scheduler.sibling_finished(0, OK)
    scheduler.sibling_finished(2, OK)
    assert scheduler.deadline_passed() == [Score((0, 2))]
    assert scheduler.scoring_finished({0: 1.0, 2: 0.0}) == [Serve(0)]


def test_after_a_deadline_without_answers_the_next_answer_is_served() -> None:
    scheduler = begun(3, deadline_s=1.0)
    assert scheduler.sibling_finished(0, FAILED) == scheduler.deadline_passed() == []
    assert scheduler.sibling_finished(2, OK) == [Serve(2)]
    assert scheduler.answer_sent() == []
    assert scheduler.sibling_finished(1, OK) == [Score((1, 2))]


def test_a_refusal_of_the_lead_is_sent_at_once_and_cancels_the_siblings() -> None:
    scheduler = begun(3)
    scheduler.sibling_finished(2, OK)
    assert scheduler.sibling_finished(0, REFUSED) == [Cancel((1,)), Refuse()]
    assert scheduler.answer_sent() == [Settle()]
    assert scheduler.selection.served is None


def test_a_failed_lead_does_not_matter_if_a_sibling_answers() -> None:
    scheduler = begun(3)
    scheduler.sibling_finished(0, FAILED)
    scheduler.sibling_finished(1, OK)
    assert scheduler.sibling_finished(2, FAILED) == [Serve(1)]


def test_if_no_sibling_answers_the_app_gets_the_leads_error() -> None:
    scheduler = begun(2)
    scheduler.sibling_finished(1, FAILED)
    assert scheduler.sibling_finished(0, FAILED) == [Refuse()]
    assert scheduler.answer_sent() == [Settle()]


@pytest.mark.parametrize("policy", ["lead", "greedy"])
def test_siblings_of_a_relayed_lead_start_at_its_first_token(policy: str) -> None:
    scheduler = begun(3, policy=policy)
    assert scheduler.lead_began() == [Start((1, 2))]
    assert scheduler.lead_began() == []
    assert scheduler.sibling_finished(1, OK) == scheduler.sibling_finished(0, OK) == []
    assert scheduler.sibling_finished(2, OK) == [Score((0, 1, 2))]
    assert scheduler.scoring_finished({0: 0.0, 1: 1.0, 2: 0.5}) == [Settle()]
    assert (scheduler.selection.served, scheduler.selection.best) == (0, 1)


def test_siblings_start_even_if_the_relayed_lead_ends_without_a_first_token_event() -> None:
    scheduler = begun(3, policy="lead")
    assert scheduler.sibling_finished(0, OK) == [Start((1, 2))]


def test_a_relayed_lead_that_fails_ends_its_group() -> None:
    scheduler = begun(3, policy="lead")
    scheduler.lead_began()
    scheduler.sibling_finished(1, OK)
    assert scheduler.sibling_finished(0, FAILED) == [Cancel((2,)), Settle()]
    assert scheduler.selection.served is None


def test_a_relayed_lead_that_is_refused_starts_no_siblings() -> None:
    scheduler = begun(3, policy="lead")
    assert scheduler.sibling_finished(0, REFUSED) == [Settle()]
    assert scheduler.lead_began() == []


def test_a_lead_without_streaming_is_served_at_once_and_scored_later() -> None:
    scheduler = begun(3, policy="lead", streamed=False)
    assert scheduler.sibling_finished(1, OK) == []
    assert scheduler.sibling_finished(0, OK) == [Serve(0)]
    assert scheduler.sibling_finished(2, OK) == [Score((0, 1, 2))]
    assert scheduler.scoring_finished({0: 0.0, 1: 1.0}) == []
    assert scheduler.answer_sent() == [Settle()]


def test_a_sibling_is_served_in_place_of_a_failed_lead() -> None:
    scheduler = begun(3, policy="lead", streamed=False)
    assert scheduler.sibling_finished(0, FAILED) == []
    assert scheduler.sibling_finished(2, OK) == [Serve(2)]


def test_a_disconnect_aborts_the_group_if_the_rule_is_cancel() -> None:
    scheduler = begun(3, on_disconnect="cancel")
    scheduler.sibling_finished(1, OK)
    assert scheduler.app_disconnected() == [Cancel((0, 2)), Abort("client_disconnected")]
    assert scheduler.sibling_finished(0, OK) == []


def test_a_disconnect_changes_nothing_if_the_rule_is_finish() -> None:
    scheduler = begun(2, on_disconnect="finish")
    assert scheduler.app_disconnected() == scheduler.sibling_finished(0, OK) == []
    assert scheduler.sibling_finished(1, OK) == [Score((0, 1))]
    assert scheduler.scoring_finished({0: 0.0, 1: 1.0}) == [Serve(1)]
    assert scheduler.answer_sent() == [Settle()]


def test_a_disconnect_from_a_relayed_lead_changes_nothing_if_the_rule_is_finish() -> None:
    scheduler = begun(2, policy="lead", on_disconnect="finish")
    assert scheduler.app_disconnected() == []
    assert scheduler.lead_began() == [Start((1,))]


def test_a_stop_of_the_proxy_breaks_off_an_open_answer() -> None:
    scheduler = begun(2)
    assert scheduler.abort("proxy_stopped") == [
        BreakOff("proxy_stopped"),
        Cancel((0, 1)),
        Abort("proxy_stopped"),
    ]
    assert scheduler.abort("proxy_stopped") == []


def test_a_stop_after_the_answer_only_aborts_the_group() -> None:
    scheduler = begun(2, policy="lead", streamed=False)
    scheduler.sibling_finished(0, OK)
    scheduler.answer_sent()
    assert scheduler.abort("proxy_stopped") == [Cancel((1,)), Abort("proxy_stopped")]


def test_a_lead_that_is_refused_after_a_quorum_was_served_only_drops_out() -> None:
    scheduler = begun(4, quorum=2)
    scheduler.sibling_finished(1, OK)
    assert scheduler.sibling_finished(2, OK) == [Score((1, 2))]
    assert scheduler.scoring_finished({1: 0.0, 2: 1.0}) == [Serve(2)]
    assert scheduler.sibling_finished(0, REFUSED) == scheduler.answer_sent() == []
    assert scheduler.sibling_finished(3, FAILED) == [Settle()]
    assert (scheduler.selection.best, scheduler.rewards) == (2, {1: 0.0, 2: 1.0})


def test_a_lead_that_is_refused_while_a_quorum_is_scored_discards_the_rewards() -> None:
    scheduler = begun(3, quorum=2)
    scheduler.sibling_finished(1, OK)
    scheduler.sibling_finished(2, OK)
    assert scheduler.sibling_finished(0, REFUSED) == [Refuse()]
    assert scheduler.scoring_finished({1: 0.0, 2: 1.0}) == []
    assert scheduler.answer_sent() == [Settle()]
    assert (scheduler.selection.best, dict(scheduler.rewards)) == (None, {})
