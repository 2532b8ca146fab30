from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.admission.kill_switch import KillSwitch
from fakevllm.admission.rules import (
    AdmissionRules,
    RequestFacts,
    Ruling,
    ServeOnly,
    ServeOnlyReason,
    Train,
    is_sampled,
    why_only_served,
)
from fakevllm.admission.side_calls import SessionSummary
from fakevllm.config.policy import PolicySection, SideRule
from fakevllm.groups.traffic_gate import TrafficGate
from fakevllm_adapters.protocol.reasons import OutageReason

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def facts(**changed: Any) -> RequestFacts:
    known: dict[str, Any] = {"route": "chat", "model": "big", "headers": {}, "body": ASKED}
    return RequestFacts(**known | changed)


def ruled(settings: dict[str, Any], subject: str = "s", paused: bool = False, **asked: Any) -> Any:
    asking = AdmissionRules(PolicySection.model_validate(settings))
    return asking.decide(facts(**asked), subject, is_paused=paused)


def test_an_ordinary_request_is_fanned_out() -> None:
    assert why_only_served(ASKED, 4) is None
    assert ruled({}) == Train()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "invalid_request"),
        ({"messages": []}, "invalid_request"),
        ({"messages": "hi"}, "invalid_request"),
        (ASKED | {"temperature": 0}, "greedy_request"),
        (ASKED | {"n": 2}, "several_choices_asked"),
        (ASKED | {"use_beam_search": True}, "not_a_sample"),
        (ASKED | {"max_tokens": 1}, "at_most_one_token"),
    ],
)
def test_what_cannot_be_compared_is_only_served_and_says_why(
    body: dict[str, Any], reason: str
) -> None:
    assert why_only_served(body, 4) == reason


def test_one_sibling_has_nobody_to_be_compared_with() -> None:
    assert why_only_served(ASKED, 1) == "one_sibling"


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
def test_a_rule_skips_what_it_names_and_nothing_else(
    rule: dict[str, Any], hit: dict[str, Any], miss: dict[str, Any]
) -> None:
    settings = {"skip": [{"name": "mine", **rule}]}
    assert ruled(settings, **hit) == ServeOnly(ServeOnlyReason.SKIP_RULE, "mine")
    assert ruled(settings, **miss) == Train()


def test_all_that_one_rule_names_must_be_so_and_any_rule_is_enough() -> None:
    both = {"skip": [{"route": "chat", "model": "small"}]}
    assert ruled(both) == Train()
    assert ruled(both, model="small", route="completions") == Train()
    assert ruled(both, model="small") == ServeOnly(ServeOnlyReason.SKIP_RULE, "1")
    several = {"skip": [{"model": "small"}, {"route": "chat"}]}
    assert ruled(several) == ServeOnly(ServeOnlyReason.SKIP_RULE, "2")


def test_the_first_message_is_the_users_first_behind_system_and_greeting() -> None:
    messages = [
        {"role": "system", "content": "Translate."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Translate this"},
        {"role": "user", "content": "no"},
    ]
    settings = {"skip": [{"first_message": "^Translate this$"}]}
    assert ruled(settings, body={"messages": messages}) == ServeOnly(ServeOnlyReason.SKIP_RULE, "1")
    assert ruled({"skip": [{"first_message": "no"}]}, body={"messages": messages}) == Train()


def test_a_models_number_of_siblings_goes_before_its_routes() -> None:
    settings = {"n": {"chat": 2, "big": 8}}
    assert ruled(settings) == Train(8)
    assert ruled(settings, model="other") == Train(2)
    assert ruled(settings, model="other", route="messages") == Train()


def test_shadow_is_part_of_what_is_decided() -> None:
    assert ruled({"shadow": True, "n": {"chat": 3}}) == Train(3, shadow=True)


def test_while_paused_nothing_is_fanned_out() -> None:
    assert ruled({"n": {"chat": 3}}, paused=True) == ServeOnly(ServeOnlyReason.PAUSED)


def test_a_side_call_is_named_by_its_rule() -> None:
    asking = AdmissionRules(PolicySection(side_models=("tiny",), side_markers=("Name it",)))
    named = {"messages": [{"role": "user", "content": "Name it: hi"}]}
    known, side_call = SessionSummary(has_tools=True), ServeOnlyReason.SIDE_CALL
    assert asking.side_call(facts(model="tiny"), None) == ServeOnly(side_call, "model")
    assert asking.side_call(facts(body=named), None) == ServeOnly(side_call, "marker")
    assert asking.side_call(facts(), known) == ServeOnly(side_call, "no_tools")
    assert asking.side_call(facts(), None) is None


@given(subject=st.text(), low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_subject_is_drawn_alike_each_time_and_stays_in_when_more_are_taken(
    subject: str, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    assert is_sampled(subject, low) is is_sampled(subject, low)
    assert is_sampled(subject, high) or not is_sampled(subject, low)
    assert is_sampled(subject, 1.0) and not is_sampled(subject, 0.0)


def test_of_many_subjects_the_asked_share_is_taken() -> None:
    taken = sum(is_sampled(f"session {number}", 0.2) for number in range(5000))
    assert 900 < taken < 1100


def test_what_is_not_drawn_says_so() -> None:
    rulings: list[Ruling] = [ruled({"sample_fraction": 0.5}, f"s{n}") for n in range(40)]
    assert {str(ruling) for ruling in rulings} == {
        str(Train()),
        str(ServeOnly(ServeOnlyReason.NOT_SAMPLED)),
    }


def test_every_reason_of_the_policy_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs" / "traffic.md").read_text()
    detailed = {ServeOnlyReason.SIDE_CALL, ServeOnlyReason.SKIP_RULE}
    plain = [reason for reason in ServeOnlyReason if reason not in detailed]
    assert [reason for reason in plain if f"`{reason}`" not in page] == []
    assert all(f"`side_call: {rule}`" in page for rule in ("header", "model", *get_args(SideRule)))
    assert all(f"`fallback: {reason}`" in page for reason in OutageReason)


def test_a_name_in_n_that_is_spelt_nearly_as_a_route_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = PolicySection(n={"chta": 4, "chat": 2, "qwen3-8b": 3})
    TrafficGate(settings, KillSwitch(tmp_path / "paused"))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "'chta' is not a route and is used as a model name; did you mean route chat?" in told
