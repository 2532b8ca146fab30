"""Admission rules: which requests are fanned out, and the reasons for serving only."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.admission.admission_rules import (
    AdmissionRules,
    RequestFacts,
    Ruling,
    ServeOnly,
    ServeOnlyReason,
    Train,
    is_sampled,
    why_only_served,
)
from fakevllm.admission.kill_switch import KillSwitch
from fakevllm.admission.side_calls import SessionSummary
from fakevllm.config.policy import PolicySection, SideRule
from fakevllm.groups.request_admission import TrafficGate
from fakevllm_adapters.protocol.outage_reasons import OutageReason

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def facts(**changed: Any) -> RequestFacts:
    defaults: dict[str, Any] = {"route": "chat", "model": "big", "headers": {}, "body": BODY}
    return RequestFacts(**defaults | changed)


def ruling_for(
    settings: dict[str, Any], subject: str = "s", paused: bool = False, **changed: Any
) -> Any:
    rules = AdmissionRules(PolicySection.model_validate(settings))
    return rules.decide(facts(**changed), subject, is_paused=paused)


def test_an_ordinary_request_is_fanned_out() -> None:
    assert why_only_served(BODY, 4) is None
    assert ruling_for({}) == Train()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "invalid_request"),
        ({"messages": []}, "invalid_request"),
        ({"messages": "hi"}, "invalid_request"),
        (BODY | {"temperature": 0}, "greedy_request"),
        (BODY | {"n": 2}, "several_choices_asked"),
        (BODY | {"use_beam_search": True}, "not_a_sample"),
        (BODY | {"max_tokens": 1}, "at_most_one_token"),
    ],
)
def test_a_request_that_cannot_be_compared_is_only_served_with_a_reason(
    body: dict[str, Any], reason: str
) -> None:
    assert why_only_served(body, 4) == reason


def test_a_group_of_one_sibling_is_only_served() -> None:
    assert why_only_served(BODY, 1) == "one_sibling"


@pytest.mark.parametrize(
    ("rule", "hit", "miss"),
    [
        ({"route": "completions"}, {"route": "completions"}, {}),
        ({"model": "*-small"}, {"model": "big-small"}, {}),
        ({"header": "X-Env"}, {"headers": {b"x-env": b"test"}}, {}),
        (
            {"header": "x-env: test*"},
            {"headers": {b"x-env": b"test-7"}},
            {"headers": {b"x-env": b"live"}},
        ),
        ({"key": "my-app"}, {"key_names": ("my-app", "0a1b2c3d")}, {"key_names": ("other",)}),
        ({"key": "0a1b2c3d"}, {"key_names": ("0a1b2c3d",)}, {"key_names": ()}),
        ({"prompt_chars": 1}, {}, {"body": {"messages": [{"role": "user", "content": "h"}]}}),
        ({"prompt_chars": 3}, {"body": {"prompt": "four"}}, {"body": {"prompt": "own"}}),
        ({"images": True}, {"body": {"messages": [{"role": "user", "content": [IMAGE]}]}}, {}),
        ({"first_message": "^h.$"}, {}, {"body": {"prompt": "oh hi"}}),
    ],
)
def test_a_rule_skips_matching_requests_and_no_others(
    rule: dict[str, Any], hit: dict[str, Any], miss: dict[str, Any]
) -> None:
    settings = {"skip": [{"name": "mine", **rule}]}
    assert ruling_for(settings, **hit) == ServeOnly(ServeOnlyReason.SKIP_RULE, "mine")
    assert ruling_for(settings, **miss) == Train()


def test_all_conditions_of_a_rule_must_match_and_one_matching_rule_is_enough() -> None:
    both = {"skip": [{"route": "chat", "model": "small"}]}
    assert ruling_for(both) == Train()
    assert ruling_for(both, model="small", route="completions") == Train()
    assert ruling_for(both, model="small") == ServeOnly(ServeOnlyReason.SKIP_RULE, "1")
    several = {"skip": [{"model": "small"}, {"route": "chat"}]}
    assert ruling_for(several) == ServeOnly(ServeOnlyReason.SKIP_RULE, "2")


def test_the_first_message_is_the_first_user_message_after_system_and_greeting() -> None:
    messages = [
        {"role": "system", "content": "Translate."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Translate this"},
        {"role": "user", "content": "no"},
    ]
    settings = {"skip": [{"first_message": "^Translate this$"}]}
    assert ruling_for(settings, body={"messages": messages}) == ServeOnly(
        ServeOnlyReason.SKIP_RULE, "1"
    )
    assert ruling_for({"skip": [{"first_message": "no"}]}, body={"messages": messages}) == Train()


def test_the_number_of_siblings_of_a_model_takes_precedence_over_that_of_a_route() -> None:
    settings = {"n": {"chat": 2, "big": 8}}
    assert ruling_for(settings) == Train(8)
    assert ruling_for(settings, model="other") == Train(2)
    assert ruling_for(settings, model="other", route="messages") == Train()


def test_the_ruling_contains_the_shadow_mode() -> None:
    assert ruling_for({"shadow": True, "n": {"chat": 3}}) == Train(3, shadow=True)


def test_while_paused_nothing_is_fanned_out() -> None:
    assert ruling_for({"n": {"chat": 3}}, paused=True) == ServeOnly(ServeOnlyReason.PAUSED)


def test_the_ruling_of_a_side_call_names_its_rule() -> None:
    rules = AdmissionRules(PolicySection(side_models=("tiny",), side_markers=("Name it",)))
    named = {"messages": [{"role": "user", "content": "Name it: hi"}]}
    session, side_call = SessionSummary(has_tools=True), ServeOnlyReason.SIDE_CALL
    assert rules.side_call(facts(model="tiny"), None) == ServeOnly(side_call, "model")
    assert rules.side_call(facts(body=named), None) == ServeOnly(side_call, "marker")
    assert rules.side_call(facts(), session) == ServeOnly(side_call, "no_tools")
    assert rules.side_call(facts(), None) is None


@given(subject=st.text(), low=st.floats(0, 1), high=st.floats(0, 1))
def test_sampling_is_deterministic_and_a_larger_fraction_contains_a_smaller_one(
    subject: str, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    assert is_sampled(subject, low) is is_sampled(subject, low)
    assert is_sampled(subject, high) or not is_sampled(subject, low)
    assert is_sampled(subject, 1.0) and not is_sampled(subject, 0.0)


def test_the_configured_fraction_of_many_subjects_is_sampled() -> None:
    num_sampled = sum(is_sampled(f"session {number}", 0.2) for number in range(5000))
    assert 900 < num_sampled < 1100


def test_a_request_outside_the_fraction_is_ruled_not_sampled() -> None:
    rulings: list[Ruling] = [ruling_for({"sample_fraction": 0.5}, f"s{n}") for n in range(40)]
    assert {str(ruling) for ruling in rulings} == {
        str(Train()),
        str(ServeOnly(ServeOnlyReason.NOT_SAMPLED)),
    }


def test_every_rule_for_side_calls_and_every_cause_of_a_fallback_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "traffic.md").read_text()
    assert all(f"`side_call: {rule}`" in page for rule in ("header", "model", *get_args(SideRule)))
    assert all(f"`fallback: {reason}`" in page for reason in OutageReason)


def test_a_name_in_n_that_resembles_a_route_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = PolicySection(n={"chta": 4, "chat": 2, "qwen3-8b": 3})
    TrafficGate(settings, KillSwitch(tmp_path / "paused"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'chta' is not a route and is used as a model name; did you mean route chat?" in message


@pytest.mark.parametrize(
    ("settings", "paused", "num_scans"),
    [({}, True, 0), ({"skip": [{"model": "big"}]}, False, 0), ({}, False, 1)],
)
def test_a_request_is_searched_for_held_out_rows_only_if_no_cheaper_rule_decides(
    settings: dict[str, Any], paused: bool, num_scans: int
) -> None:
    scans: list[str] = []

    def scan() -> bool:
        scans.append("scan")
        return True

    rules = AdmissionRules(PolicySection.model_validate(settings))
    ruling = rules.decide(facts(), "s", is_paused=paused, is_held_out=scan)
    assert len(scans) == num_scans
    assert isinstance(ruling, ServeOnly)
    assert (ruling.reason is ServeOnlyReason.HELD_OUT) == bool(num_scans)
