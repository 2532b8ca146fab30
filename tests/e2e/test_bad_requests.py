"""Tests of invalid and unusual requests, which are refused or accepted as in vLLM."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from tests.e2e.stack import BOTH, CHAT, HELLO, JSON, VALID, Stack, post

GOLDEN: dict[str, tuple[str, str | dict[str, Any], int, dict[str, Any]]] = {
    "unknown model": (
        JSON,
        VALID | {"model": "zz"},
        404,
        {
            "message": "The model `zz` does not exist. Valid aliases: fake.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        },
    ),
    "no messages": (
        JSON,
        {"model": "fake"},
        400,
        {
            "message": "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', "
            "'msg': 'Field required', 'input': '<dict of 1 items>'}",
            "type": "Bad Request",
            "param": "body.messages",
            "code": 400,
        },
    ),
    "malformed JSON": (
        JSON,
        "{bad",
        400,
        {
            "message": "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1', "
            "'msg': 'JSON decode error', 'input': '<dict of 0 items>', "
            "'ctx': {'error': 'Expecting property name enclosed in double quotes'}}",
            "type": "Bad Request",
            "param": "body.1",
            "code": 400,
        },
    ),
    "wrong content type": (
        "text/plain",
        VALID,
        400,
        {
            "message": "1 validation error:\n"
            "  Unsupported Media Type: Only 'application/json' is allowed",
            "type": "Bad Request",
            "param": None,
            "code": 400,
        },
    ),
    "empty messages": (
        JSON,
        VALID | {"messages": []},
        400,
        {
            "message": "Cannot apply chat template to an empty conversation. "
            "Provide at least one message.",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
    "a text for a number": (
        JSON,
        VALID | {"max_tokens": "x"},
        400,
        {
            "message": "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', "
            "'msg': 'Input should be a valid integer, unable to parse string as an integer', "
            "'input': 'x'}",
            "type": "Bad Request",
            "param": "body.max_tokens",
            "code": 400,
        },
    ),
    "a value out of range": (
        JSON,
        VALID | {"temperature": -1},
        400,
        {
            "message": "temperature must be non-negative, got -1.0. "
            "(parameter=temperature, value=-1.0)",
            "type": "BadRequestError",
            "param": "temperature",
            "code": 400,
        },
    ),
    "several greedy choices": (
        JSON,
        VALID | {"temperature": 0, "n": 3},
        400,
        {
            "message": "n must be 1 when using greedy sampling, got 3.",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
    ),
}
"""Content type, body, status and error; the errors are exactly those of vLLM 0.33.0."""


@pytest.mark.parametrize(
    ("case", "siblings"),
    [
        (case, siblings)
        for case in GOLDEN
        for siblings in ("one", "three")
        if (case, siblings) != ("unknown model", "three")  # this proxy accepts any name
    ],
)
def test_a_bad_request_is_refused_with_vllms_error(stack: Stack, siblings: str, case: str) -> None:
    content_type, body, status, error = GOLDEN[case]
    answer = post(stack.proxy(siblings), body, content_type)
    assert (answer.status_code, answer.json()) == (status, {"error": error})
    assert answer.headers["content-type"] == JSON
    assert post(stack.server, body, content_type).json() == answer.json()


LOOSE_TOOL: dict[str, Any] = {"type": "function", "parameters": {}}
INVALID_BODIES: dict[str, str | bytes | dict[str, Any]] = {
    "nothing": b"",
    "not UTF-8": b"\xff\xfe{}",
    "null": "null",
    "a list": "[]",
    "a number": "3",
    "an unfinished text": '{"messages": "',
    "nested without end": "[" * 100_000,
    "half a surrogate pair": json.dumps(VALID | {"user": "\ud83d"}),
    "a number that is NaN": json.dumps(VALID | {"temperature": math.nan}),
    "messages as text": VALID | {"messages": "hello"},
    "messages as object": VALID | {"messages": {"role": "user"}},
    "a message that is a text": VALID | {"messages": ["hello"]},
    "a message that is null": VALID | {"messages": [None]},
    "model as number": VALID | {"model": 3},
    "model as object": VALID | {"model": {"a": 1}},
    "model as list": VALID | {"model": ["fake"]},
    "stream as text": VALID | {"stream": "perhaps"},
    "n as text": VALID | {"n": "many"},
    "temperature as list": VALID | {"temperature": [1]},
    "max_tokens of zero": VALID | {"max_tokens": 0},
}


@BOTH
@pytest.mark.parametrize("case", INVALID_BODIES)
def test_invalid_bodies_are_refused_with_400_and_the_servers_own_error(
    stack: Stack, siblings: str, case: str
) -> None:
    answer = post(stack.proxy(siblings), INVALID_BODIES[case])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    if case == "nested without end":
        return  # only the proxy has this limit, because the server trusts its proxies
    direct = post(stack.server, INVALID_BODIES[case])
    assert (direct.status_code, direct.json()) == (400, answer.json())


@BOTH
def test_unknown_fields_and_roles_are_accepted_as_in_vllm(stack: Stack, siblings: str) -> None:
    messages = [{"role": "bogus", "content": "x"}, {"role": "user", "content": HELLO}]
    for body in (
        {"messages": VALID["messages"]},
        VALID | {"surprise": {"a": 1}, "user": "u", "metadata": {"k": "v"}},
        VALID | {"messages": messages},
        VALID | {"max_tokens": 50, "max_completion_tokens": 50},
    ):
        answer = post(stack.proxy(siblings), body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "Hello, wörld."


def test_paths_and_methods_that_do_not_exist_are_refused_as_vllm_does(stack: Stack) -> None:
    missing = httpx.get(f"{stack.one.url}/v1/nothing")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    wrong = httpx.get(f"{stack.one.url}{CHAT}")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    assert wrong.headers["allow"] == "POST"


RESPONSES_REQUESTS: dict[str, dict[str, Any]] = {
    "body.input": {"model": "fake"},
    "body.max_output_tokens": {"model": "fake", "input": "hi", "max_output_tokens": "x"},
    "body.tools.0.FunctionTool.name": {"model": "fake", "input": "hi", "tools": [LOOSE_TOOL]},
    "tool_choice": {"model": "fake", "input": "hi", "tool_choice": "required"},
    "background": {"model": "fake", "input": "hi", "background": True},
    "temperature": {"model": "fake", "input": "hi", "temperature": -1},
}
"""Responses requests by the parameter that vLLM's error names."""


@BOTH
@pytest.mark.parametrize("param", RESPONSES_REQUESTS)
def test_a_bad_responses_request_is_refused_with_vllms_error(
    stack: Stack, siblings: str, param: str
) -> None:
    body = RESPONSES_REQUESTS[param]
    for url in (stack.proxy(siblings).url, stack.server.url):
        for streamed in (False, True):
            request = body | {"stream": streamed}
            answer = httpx.post(f"{url}/v1/responses", json=request, timeout=60)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, 400, param)
            assert "cannot answer this request in this format" not in error["message"]
