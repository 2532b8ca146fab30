"""Headers and fields with which known clients name their sessions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.sessions.client_session_ids import Hints, hints_of

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.mark.parametrize(
    ("headers", "body", "session", "parent"),
    [
        ({b"x-session-id": b"ses_1"}, {}, "ses_1", None),
        ({b"x-session-affinity": b"ses_1"}, {}, "ses_1", None),
        ({b"x-session-id": b"s2", b"x-parent-session-id": b"s1"}, {}, "s2", "s1"),
        ({b"x-claude-code-session-id": b"c"}, {}, "c", None),
        ({b"x-claude-code-session-id": b"c", b"x-claude-code-agent-id": b"a"}, {}, "c/a", "c"),
        (
            {b"x-claude-code-session-id": b"c", b"x-claude-code-agent-id": b"b"}
            | {b"x-claude-code-parent-agent-id": b"a"},
            {},
            "c/b",
            "c/a",
        ),
        ({b"session-id": b"t", b"thread-id": b"t"}, {}, "t", None),
        ({b"session-id": b"t", b"thread-id": b"u"}, {}, "u", "t"),
        ({b"session-id": b"s"}, {}, "s", None),
        ({b"thread-id": b"t"}, {}, "t", None),
        ({b"x-openwebui-chat-id": b"w"}, {}, "w", None),
        ({}, {"metadata": {"session_id": "m"}}, "m", None),
        ({}, {"metadata": {"user_id": f"user_1_account__session_{UUID}"}}, UUID, None),
        ({}, {"metadata": {"user_id": f'{{"session_id":"{UUID}"}}'}}, UUID, None),
        ({}, {"conversation": {"id": "conv_1"}}, "conv_1", None),
        ({}, {"conversation": "conv_1"}, "conv_1", None),
        ({b"user-agent": b"x"}, {"model": "m"}, None, None),
    ],
)
def test_session_names_of_known_clients_are_recognized(
    headers: dict[bytes, bytes], body: Any, session: str | None, parent: str | None
) -> None:
    found = hints_of(headers, body)
    assert (found.session, found.parent) == (session, parent)
    assert found.is_header is (bool(headers) and session is not None)


def test_a_user_name_is_not_a_session_name() -> None:
    headers = {b"x-openwebui-user-id": b"u"}
    assert hints_of(headers, None) == Hints(user="u")
    assert hints_of({}, {"user": "u", "prompt_cache_key": "k"}) == Hints(user="u", cache_key="k")
    assert hints_of({}, {"user": "u"}) == Hints(user="u")
    assert hints_of({}, {"metadata": {"user_id": "u"}}) == Hints(user="u")


def test_a_body_field_without_headers_is_a_hint() -> None:
    assert hints_of({}, {"prompt_cache_key": "k"}) == Hints(cache_key="k")
    assert hints_of({}, {"previous_response_id": "resp_1"}) == Hints(response_id="resp_1")


@pytest.mark.parametrize(("count", "is_retry"), [(b"0", False), (b"1", True), (b"", False)])
def test_the_retry_header_of_client_libraries_is_recognized(count: bytes, is_retry: bool) -> None:
    assert hints_of({b"x-stainless-retry-count": count}, {}).is_retry is is_retry
    assert hints_of({b"x-stainless-retry-count": count}, None).is_retry is is_retry


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
FIELDS = ("metadata", "user", "conversation", "prompt_cache_key", "previous_response_id")


@given(st.fixed_dictionaries({}, optional={name: ANYTHING for name in FIELDS}))
def test_invalid_fields_are_ignored(body: dict[str, Any]) -> None:
    found = hints_of({b"x-session-id": b"\xff"}, body)
    assert found.session == "\xff" and isinstance(found.user, str)
