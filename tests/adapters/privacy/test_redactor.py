"""Tests of redaction: the patterns, texts, JSON documents and answers."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import encode
from fakevllm_adapters.privacy.patterns import (
    BUILT_IN,
    MARKER,
    compile_expression,
    has_check_digit,
)
from fakevllm_adapters.privacy.redactor import Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings

ALL = PrivacySettings(redact=("email", "phone", "card", "api_key")).redactor
WITH_OWN = PrivacySettings(
    redact=("email", "phone", "card", "api_key"), patterns={"customer": r"K-\d{3}", "ab": r"a+b?"}
).redactor

SECRETS = {
    "email": ["ann@example.org", "a.b+c@mail.example.co.uk", "jürgen@bücher.example"],
    "phone": ["+49 30 1234567", "(212) 555-0123", "030 1234567", "01 23 45 67 89", "+14155550123"],
    "card": ["4111111111111111", "4111 1111 1111 1111", "3782-822463-10005", "5555555555554444"],
    "api_key": [
        "sk-proj-abcdefghijklmnop",
        "ghp_abcdefghijklmnopqrst",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK",
        "Bearer abcdefghijklmnopq",
    ],
}
PLAIN = [
    "2026-11-27 02:22:12,123 INFO fakevllm: step 12",
    "4111111111111112",
    "3.141592653589793",
    "http://127.0.0.1:10086/v1/chat/completions",
    "a1b2c3d4e5f60718293a4b5c6d7e8f90",
    "f4111111111111111f",
    "see sk-1 and @home",
]


def luhn(digits: str) -> str:
    return next(digits + end for end in "0123456789" if has_check_digit(digits + end))


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ["@", "\\", '"', "{", "[redacted: email]", "ab", "K-12", "3", " ", "\\u0040"]
        ),
        st.sampled_from([secret for secrets in SECRETS.values() for secret in secrets]),
    ),
    max_size=12,
).map("".join)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(TEXTS, inner, max_size=4),
        st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3),
    ),
    max_leaves=12,
)


@given(TEXTS)
def test_a_redacted_text_has_no_match_outside_of_its_markers(text: str) -> None:
    redacted = WITH_OWN.text(text)
    assert not any(WITH_OWN.finds(part) for part in MARKER.split(redacted))


@given(TEXTS)
def test_redacting_a_text_twice_changes_nothing(text: str) -> None:
    redacted = WITH_OWN.text(text)
    assert WITH_OWN.text(redacted) == redacted
    assert not WITH_OWN.finds(redacted)


@given(VALUES)
def test_redacting_a_document_twice_changes_nothing(value: object) -> None:
    redacted = WITH_OWN.value(value)
    assert WITH_OWN.value(redacted) == redacted


@given(VALUES)
def test_a_redacted_document_is_json_and_has_none_of_the_matching_strings(value: object) -> None:
    redacted = WITH_OWN.json_text(json.dumps(value))
    json.loads(redacted)
    assert WITH_OWN.json_text(redacted) == redacted


@given(st.text(alphabet="0123456789", min_size=11, max_size=18))
def test_exactly_one_last_digit_is_the_check_digit(digits: str) -> None:
    assert sum(has_check_digit(digits + end) for end in "0123456789") == 1


@given(st.text(alphabet="0123456789", min_size=12, max_size=18), st.data())
def test_a_check_digit_finds_each_wrong_digit(digits: str, data: st.DataObject) -> None:
    number = luhn(digits)
    place = data.draw(st.integers(0, len(number) - 1))
    other = data.draw(st.sampled_from([digit for digit in "0123456789" if digit != number[place]]))
    assert not has_check_digit(number[:place] + other + number[place + 1 :])


@pytest.mark.parametrize(
    ("name", "secret"), [(name, secret) for name, secrets in SECRETS.items() for secret in secrets]
)
def test_a_secret_is_redacted_wherever_it_stands(name: str, secret: str) -> None:
    redactor = Redactor([BUILT_IN[name]])
    for before, after in (("", ""), ("my ", " now"), ("(", ")"), ("x: ", ", y"), ("é ", ". Ü")):
        expected = f"{before}[redacted: {name}]{after}"
        assert redactor.text(before + secret + after) == expected


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert ALL.text(text) == text


def test_a_card_is_found_beside_other_numbers() -> None:
    assert ALL.text("4111 1111 1111 1111 12/27 123") == "[redacted: card] 12/27 123"
    assert ALL.text("7 4111-1111-1111-1111") == "7 [redacted: card]"


def test_escapes_of_json_hide_nothing() -> None:
    inner = json.dumps({"mail": "ann@example.org"}).replace("@", "\\u0040")
    call = {"function": {"name": "send", "arguments": inner}}
    redacted = ALL.json_text(json.dumps(call).replace("a", "\\u0061"))
    arguments = json.loads(json.loads(redacted)["function"]["arguments"])
    assert arguments == {"mail": "[redacted: email]"}
    assert ALL.text(r"ann\u0040example.org") == "[redacted: unreadable]"
    assert ALL.text(r"ann\\u0040example.org") == "[redacted: unreadable]"


def test_keys_and_numbers_are_redacted() -> None:
    document = {"ann@example.org": 4111111111111111, "n": 1, "list": [4111111111111111]}
    assert json.loads(ALL.json_text(json.dumps(document))) == {
        "[redacted: email]": "[redacted: card]",
        "n": 1,
        "list": ["[redacted: card]"],
    }


def test_a_repeated_key_hides_nothing() -> None:
    assert ALL.json_text('{"a":"ann@example.org","a":"x"}') == '{"a":"x"}'


@pytest.mark.parametrize("cut", range(1, 19))
def test_a_secret_in_several_parts_of_a_message_is_redacted(cut: int) -> None:
    card = "4111 1111 1111 1111"
    parts = [{"type": "text", "text": "my " + card[:cut]}, {"type": "image_url"}]
    parts.append({"type": "text", "text": card[cut:] + " now"})
    redacted = ALL.value([{"role": "user", "content": parts}])
    texts = [part.get("text", "") for part in redacted[0]["content"]]
    assert "".join(texts) == "my [redacted: card] now"


def test_a_prompt_of_token_ids_is_not_kept() -> None:
    assert ALL.value({"prompt": [1, 2], "n": 1}) == {"prompt": "[redacted: tokens]", "n": 1}
    assert ALL.value({"prompt": "text"}) == {"prompt": "text"}


def test_logprobs_of_redacted_texts_are_not_kept() -> None:
    choice = {
        "message": {"content": "ann@example.org"},
        "logprobs": {"content": [{"token": "ann"}]},
    }
    assert ALL.value(choice)["logprobs"] is None


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_secret_in_a_stream_is_found_whatever_its_events_contain(size: int) -> None:
    text = "write to ann@example.org now"
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    for field in ("content", "reasoning"):
        events = [{"id": "x", "choices": [{"index": 0, "delta": {field: part}}]} for part in parts]
        assert ALL.finds_in_body(b"".join(map(encode, events)))
    calls = [{"index": 0, "function": {"arguments": part}} for part in parts]
    events = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls]
    assert ALL.finds_in_body(b"".join(map(encode, events)))
    assert not ALL.finds_in_body(encode({"choices": [{"delta": {"content": "hello"}}]}))


def test_a_stop_string_that_the_engine_cut_off_is_searched_too() -> None:
    choice = {"text": "ann@example.", "stop_reason": "org"}
    assert ALL.finds_in_body(encode({"choices": [choice]}))


@pytest.mark.parametrize(
    "text",
    [
        *("a" * 200_000, "1 " * 100_000, "eyJ" * 60_000, "@" * 200_000, "+1 " * 60_000),
        *("a@b." * 50_000, "K-12é" * 40_000, "[redacted: email]" * 10_000, "\\" * 100_000),
    ],
)
def test_no_text_takes_more_than_linear_time(text: str) -> None:
    settings = PrivacySettings(
        redact=("email", "phone", "card", "api_key"), patterns={"bad": "(a+)+$x"}
    )
    began = time.process_time()
    settings.redactor.text(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("expression", ["(", "a*", "", r"(?=a)", "a" * 1001])
def test_a_useless_expression_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        compile_expression("own", expression)


@pytest.mark.parametrize("name", ["Upper", "email", "tokens", "a b", "", "x" * 33])
def test_a_name_that_cannot_stand_in_a_marker_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        PrivacySettings(patterns={name: "x"})


def test_the_union_of_two_settings_redacts_what_one_of_them_redacts() -> None:
    one = PrivacySettings(redact=("email",), patterns={"own": "K-1"})
    other = PrivacySettings(redact=("card",), patterns={"own": "K-2", "same": "K-1"})
    both = one.union(other).redactor
    for text in ("ann@example.org", "4111111111111111", "K-1", "K-2"):
        assert both.finds(text)
    assert one.union(PrivacySettings()) == one
    assert PrivacySettings().union(one) == one


def test_nothing_is_changed_without_patterns() -> None:
    off = PrivacySettings().redactor
    assert not off
    assert off.text("ann@example.org") == "ann@example.org"
    assert not off.finds_in_body(b'{"a":"ann@example.org"}')
