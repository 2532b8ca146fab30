"""Tests of redaction: the patterns, texts, JSON documents and answers."""

from __future__ import annotations

import base64
import json
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import encode
from fakevllm_adapters.privacy.continued_text import continued_texts
from fakevllm_adapters.privacy.patterns import (
    BUILT_IN,
    MARKER,
    compile_expression,
    has_check_digit,
)
from fakevllm_adapters.privacy.redactor import AnswerTexts, Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings

ALL = PrivacySettings(redact=("email", "phone", "card", "api_key")).redactor
WITH_OWN = PrivacySettings(
    redact=("email", "phone", "card", "api_key"), patterns={"customer": r"K-\d{3}", "ab": r"a+b?"}
).redactor

SECRETS = {
    "email": ["ann@example.org", "a.b+c@mail.example.co.uk", "jürgen@bücher.example"],
    "phone": [
        "+49 30 1234567",
        "(212) 555-0123",
        "030 1234567",
        "01 23 45 67 89",
        "+14155550123",
        "(030) 1234567",
        "(020) 7946 0958",
        "03-1234-5678",
        "06-12-34-56-78",
        "010-62345678",
    ],
    "card": [
        "4111111111111111",
        "4111 1111 1111 1111",
        "3782-822463-10005",
        "5555555555554444",
        "4111\u00a01111\u00a01111\u00a01111",
        "4111  1111  1111  1111",
    ],
    "api_key": [
        "sk-proj-abcdefghijkl0mnop",
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
    "sk-text-repr-fallback",
    "git clone git@github.com:owner/name",
    "+2026-11-27 fixed",
    "[1.00000000e+00 2.00000000e+00]",
    "n = 1+10000000 and x+1234567",
    "000 001 002 003 and 0000 1234 5678",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "4.111111111111111 and 0.4111111111111111",
    "550e8400-e29b-41d4-a716-446655440000",
    "4111\n1111\n1111\n1111",
    "4111.1111.1111.1111",
    "4111 1111-1111 1111",
    "9111111111111112",
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
    for before, after in (
        ("", ""),
        ("my ", " now"),
        ("(", ")"),
        ("x: ", ", y"),
        ("é ", ". Ü"),
        ("卡号 ", " 是"),
    ):
        expected = f"{before}[redacted: {name}]{after}"
        assert redactor.text(before + secret + after) == expected


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert ALL.text(text) == text


def test_a_card_is_found_beside_other_numbers() -> None:
    assert ALL.text("4111 1111 1111 1111 12/27 123") == "[redacted: card] 12/27 123"
    assert ALL.text("7 4111-1111-1111-1111") == "7 [redacted: card]"


def test_a_number_is_found_beside_characters_of_languages_without_spaces() -> None:
    assert ALL.text("卡号4111111111111111是我的") == "卡号[redacted: card]是我的"
    assert ALL.text("电话212-555-0123请") == "电话[redacted: phone]请"


@pytest.mark.parametrize(
    "key",
    [
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,AB\n\n"
        "MIIE\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: x.1\n\nMIIE\n"
        "-----END PGP PRIVATE KEY BLOCK-----",
        "-----BEGIN PRIVATE KEY-----\nMIIE\nabcd",
    ],
)
def test_a_private_key_is_redacted_up_to_its_end(key: str) -> None:
    assert ALL.text(f"a {key}") == "a [redacted: api_key]"
    if "END" in key:
        assert ALL.text(f"a {key}. b") == "a [redacted: api_key]. b"


def test_floats_are_not_searched() -> None:
    assert ALL.value({"score": 4111111111111111.0}) == {"score": 4111111111111111.0}


def test_random_numbers_and_ids_are_rarely_redacted() -> None:
    rng = random.Random(1)

    def share(make: Callable[[], object], num: int = 4000) -> float:
        return sum(ALL.finds(str(make())) for _ in range(num)) / num

    assert share(rng.random) == 0
    assert share(lambda: rng.uniform(1, 10)) == 0
    assert share(lambda: json.dumps([rng.random() for _ in range(10)]), 500) == 0
    assert share(lambda: rng.randrange(17 * 10**11, 18 * 10**11)) == 0  # milliseconds
    assert share(lambda: rng.randrange(17 * 10**17, 18 * 10**17)) == 0  # nanoseconds
    assert share(lambda: uuid.UUID(int=rng.getrandbits(128), version=4)) == 0
    assert share(lambda: f"{rng.getrandbits(128):032x}") == 0
    assert share(lambda: rng.randrange(10**17, 10**18)) < 0.005
    assert share(lambda: base64.b64encode(rng.randbytes(20_000)).decode(), 20) == 0
    table = [[rng.randrange(1900, 2100) for _ in range(6)] for _ in range(500)]
    assert share(lambda: " ".join(map(str, table.pop())), 500) == 0


def test_this_projects_pages_and_code_have_almost_no_false_match() -> None:
    root = Path(__file__).parents[3]
    files = [*root.glob("docs/*.md"), *root.glob("*.md"), *root.glob("benchmarks/*.md")]
    files += [*root.glob("fakevllm/**/*.py"), *root.glob("server/**/*.py")]
    found = [
        (file.name, pattern.name, text[start:end])
        for file in files
        for text in [file.read_text()]
        for pattern in BUILT_IN.values()
        for start, end in pattern.spans(text)
        if "example" not in text[start:end]
    ]
    assert sum(file.stat().st_size for file in files) > 1_000_000
    assert len(found) <= 3, found


def test_ids_and_bytes_of_images_are_not_searched() -> None:
    payload = base64.b64encode(bytes(range(256)) * 4).decode() + "+49301234567"
    url = f"data:image/png;base64,{payload}"
    assert ALL.text(url) == url
    assert ALL.text(f"{url} ann@example.org") == f"{url} [redacted: email]"


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


def test_strings_of_a_list_are_not_joined() -> None:
    document = {"names": ["ann@", "example.org"], "enum": ["4111", "1111", "1111", "1111"]}
    assert ALL.value(document) == document


def test_an_answer_that_completes_a_secret_of_the_prompt_is_redacted() -> None:
    assert ALL.continued("write to ann@", "example.org now") == " now"
    assert ALL.continued("write to ann@", "nobody") == "nobody"
    assert ALL.finds_continued(["write to ann@"], ["example.org now"])
    assert not ALL.finds_continued([], ["example.org now"])
    assert continued_texts({"prompt": ["a", "b"]}) == ["a", "b"]
    parts = [{"type": "text", "text": "I am"}, {"type": "text", "text": " a"}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}]
    assert continued_texts({"messages": messages}) == ["I am a"]
    assert continued_texts({"messages": messages[:1]}) == continued_texts([]) == []


@pytest.mark.parametrize("depth", [90, 150, 300, 900])
def test_deep_json_never_raises_and_hides_nothing(depth: int) -> None:
    for inner in ("1", '"ann@example.org"', '"ann\\u0040example.org"'):
        deep = "[" * depth + inner + "]" * depth
        is_secret = inner != "1"
        for text in (deep, json.dumps({"arguments": deep}), f'["\\n",{deep}]'):
            assert "example" not in ALL.text(text) + ALL.json_text(text)
            assert ALL.finds_in_body(text.encode()) == ALL.finds(text) == is_secret
        assert "example" not in str(ALL.value(json.loads(deep)))
        AnswerTexts().add_answer(deep.encode())


@given(
    st.lists(
        st.sampled_from([secret for secrets in SECRETS.values() for secret in secrets]),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
def test_no_planted_secret_is_left_in_a_document(planted: list[str], data: st.DataObject) -> None:
    words = st.text(alphabet="abc ,.!?\n", max_size=10)

    def text(secret: str) -> str:
        before, after = data.draw(words), data.draw(words)
        return f"{before} {secret}, {after}"

    document: object = [text(secret) for secret in planted]
    for _ in range(data.draw(st.integers(0, 4))):
        around: list[object] = [[document], {"a": document}, {"b": json.dumps(document)}]
        document = around[data.draw(st.integers(0, 2))]
    redacted = ALL.json_text(json.dumps(document))
    for secret in planted:
        forms = (secret, json.dumps(secret)[1:-1], json.dumps(json.dumps(secret)[1:-1])[1:-1])
        assert not any(form in redacted for form in forms)


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


def processor_s(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


@pytest.mark.parametrize(
    "unit",
    ["a", "1 ", "eyJ", "@", "+1 ", "a@b.", "a@b", "-----BEGIN PRIVATE KEY-----", "sk-", "0000-"],
)
def test_four_times_the_text_takes_about_four_times_as_long(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    once = processor_s(lambda: ALL.text(text))
    assert processor_s(lambda: ALL.text(text * 4)) < 10 * once + 0.1


def test_four_times_the_parts_take_about_four_times_as_long() -> None:
    parts = [{"type": "text", "text": text} for text in ["a@", "b.de"] * 1000]
    once = processor_s(lambda: ALL.value(parts))
    assert processor_s(lambda: ALL.value(parts * 4)) < 10 * once + 0.1


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


def test_the_union_of_patterns_and_limits_has_both() -> None:
    patterns = PrivacySettings(redact=("email",), retention_days=30, max_journal_mb=5)
    limits = PrivacySettings(patterns={"own": "K-1"}, retention_days=7, max_ledger_mb=2)
    expected = PrivacySettings(
        redact=("email",),
        patterns={"own": "K-1"},
        retention_days=7,
        max_ledger_mb=2,
        max_journal_mb=5,
    )
    assert patterns.union(limits) == limits.union(patterns) == expected
    assert patterns.redacts
    assert limits.redacts
    assert not PrivacySettings(retention_days=7).redacts


def test_nothing_is_changed_without_patterns() -> None:
    off = PrivacySettings().redactor
    assert not off
    assert off.text("ann@example.org") == "ann@example.org"
    assert not off.finds_in_body(b'{"a":"ann@example.org"}')
