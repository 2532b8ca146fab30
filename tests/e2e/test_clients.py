"""Unmodified clients against the proxy: what they get is what the server itself would answer.

One server, and two proxies before it: one that samples a single sibling, one that samples three.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from fakevllm_adapters.swarm import LogReply
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until

ALIAS = "gpt-4o"
HELLO = "[[say Hello, wörld.]]"
CHAT = "/v1/chat/completions"
UNIQUE = ("id", "created")
"""What no two answers share."""


@dataclass(frozen=True, slots=True)
class Stack:
    server: Process
    one: Process
    """N=1; knows one alias."""
    three: Process
    """N=3 with a hook; any model name will do."""

    def proxy(self, name: str) -> Process:
        return self.one if name == "one" else self.three


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    job = folder / "fakevllm.toml"
    job.write_text("[job]\nbatch_size = 2\nlr = 0.1\n")
    with Processes(folder) as started:
        server = started.server("--backend", "fake")
        shared = ["--config", str(job), "--hooks", str(hooks)]
        three = started.proxy(
            server, *shared, "--n", "3", "--alias", "*", folder="three", wait=False
        )
        one = started.proxy(server, *shared, "--n", "1", "--alias", ALIAS, folder="one", wait=False)
        yield Stack(server, one.wait_until_healthy(), three.wait_until_healthy())


BOTH = pytest.mark.parametrize("siblings", ["one", "three"])


def client_of(process: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="sk-test", max_retries=0)


def comparable(answer: Any) -> Any:
    shown: dict[str, Any] = answer.model_dump()
    assert set(UNIQUE) <= shown.keys()
    return {key: value for key, value in shown.items() if key not in UNIQUE}


ASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited": {"max_tokens": 5},
    "a stop string": {"stop": ["wör"]},
    "several choices": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "greedy": {"temperature": 0},
    "token ids": {"extra_body": {"return_token_ids": True}},
    "usage in the stream": {"stream": True, "stream_options": {"include_usage": True}},
    "a stream": {"stream": True},
    "a stream of several choices": {"stream": True, "n": 2},
    "a stream with logprobs": {"stream": True, "logprobs": True},
}


def ask(process: Process, fields: dict[str, Any]) -> list[Any]:
    """The answer, or the chunks of it, as the official client sees them."""
    with client_of(process) as client:
        create = cast(Callable[..., Any], client.chat.completions.create)
        answer = create(model="fake", messages=[{"role": "user", "content": HELLO}], **fields)
        return list(answer) if fields.get("stream") else [answer]


@BOTH
@pytest.mark.parametrize("fields", ASKS.values(), ids=ASKS.keys())
def test_the_openai_client_gets_what_the_server_itself_answers(
    stack: Stack, siblings: str, fields: dict[str, Any]
) -> None:
    direct = ask(stack.server, fields)
    through = ask(stack.proxy(siblings), fields)

    by_choice = fields.get("stream") and fields.get("n")  # their chunks interleave at will
    sort = sorted if by_choice else list
    assert sort(map(choice_first, through)) == sort(map(choice_first, direct))
    assert len({part.id for part in through}) == 1


def choice_first(answer: Any) -> str:
    """Comparable, and in an order in which the chunks of each choice stay together."""
    shown = comparable(answer)
    index = shown["choices"][0]["index"] if shown["choices"] else -1
    return f"{index} {json.dumps(shown)}"


@BOTH
def test_what_the_app_asked_for_is_there_and_what_it_did_not_ask_for_is_not(
    stack: Stack, siblings: str
) -> None:
    proxy = stack.proxy(siblings)
    (two,) = ask(proxy, {"n": 2})
    assert [choice.index for choice in two.choices] == [0, 1]
    (plain,) = ask(proxy, {})
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].token_ids is None
    (detailed,) = ask(proxy, {"logprobs": True, "extra_body": {"return_token_ids": True}})
    tokens = len("Hello, wörld.".encode()) + 1
    assert len(detailed.choices[0].logprobs.content) == tokens
    assert len(detailed.choices[0].token_ids) == tokens


@BOTH
async def test_the_async_client_works_whole_and_streamed(stack: Stack, siblings: str) -> None:
    url = f"{stack.proxy(siblings).url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-test", max_retries=0) as client:
        whole = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": HELLO}]
        )
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": HELLO}], stream=True
        )
        chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Hello, wörld."
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, wörld."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"


@BOTH
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("streamed", [False, True])
def test_curl_gets_the_servers_own_bytes_and_headers(
    stack: Stack, siblings: str, streamed: bool
) -> None:
    direct = curl(stack.server, streamed)
    assert curl(stack.proxy(siblings), streamed) == direct
    assert ("text/event-stream; charset=utf-8" if streamed else "application/json") in direct


def curl(process: Process, streamed: bool) -> str:
    """Headers and body, without what no two answers share."""
    messages = [{"role": "user", "content": HELLO}]
    body = {"model": "fake", "messages": messages, "stream": streamed}
    command = ["curl", "--silent", "--show-error", "--include", "--no-buffer", "--max-time", "20"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    told = subprocess.run(
        [*command, f"{process.url}{CHAT}"], check=True, capture_output=True, timeout=30
    ).stdout.decode()
    head, _, shown = told.partition("\r\n\r\n")
    kept = sorted(line for line in head.splitlines() if not is_about_framing(line))
    shown = re.sub(r'"id":"chatcmpl-[0-9a-f]{16}"', '"id":""', shown)
    return "\n".join([*kept, re.sub(r'"created":\d+', '"created":0', shown)])


def is_about_framing(line: str) -> bool:
    """A whole stream may come in one piece with a length, or in chunks without."""
    return line.lower().startswith(("date:", "content-length:", "transfer-encoding:"))


def test_the_served_model_and_the_aliases_are_listed(stack: Stack) -> None:
    with client_of(stack.one) as client, client_of(stack.three) as any_name:
        assert [card.id for card in client.models.list()] == ["fake", ALIAS]
        assert [card.id for card in any_name.models.list()] == ["fake"]


def test_an_alias_is_answered_by_the_served_model(stack: Stack) -> None:
    for process, name in ((stack.one, ALIAS), (stack.three, "whatever the app is set to")):
        with client_of(process) as client:
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": HELLO}]
            )
        assert answer.model == "fake"
        assert answer.choices[0].message.content == "Hello, wörld."


VALID: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": HELLO}]}
JSON = "application/json"
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
"""Content type, body, status and error, as vLLM 0.33.0 has them word for word."""


def post(
    process: Process, body: str | bytes | dict[str, Any], content_type: str = JSON
) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    headers = {"Content-Type": content_type}
    return httpx.post(f"{process.url}{CHAT}", content=content, headers=headers, timeout=20)


@pytest.mark.parametrize(
    ("case", "siblings"),
    [
        (case, siblings)
        for case in GOLDEN
        for siblings in ("one", "three")
        if (case, siblings) != ("unknown model", "three")  # where any name will do
    ],
)
def test_a_bad_request_is_refused_in_vllms_words(stack: Stack, siblings: str, case: str) -> None:
    content_type, body, status, error = GOLDEN[case]
    answer = post(stack.proxy(siblings), body, content_type)
    assert (answer.status_code, answer.json()) == (status, {"error": error})
    assert answer.headers["content-type"] == JSON
    assert post(stack.server, body, content_type).json() == answer.json()


ODD: dict[str, str | bytes | dict[str, Any]] = {
    "nothing": b"",
    "not UTF-8": b"\xff\xfe{}",
    "null": "null",
    "a list": "[]",
    "a number": "3",
    "an unfinished text": '{"messages": "',
    "nested without end": "[" * 100_000,
    "half a surrogate pair": json.dumps(VALID | {"user": "\ud83d"}),
    "a number that is none": json.dumps(VALID | {"temperature": math.nan}),
    "messages as text": VALID | {"messages": "hello"},
    "messages as object": VALID | {"messages": {"role": "user"}},
    "a message that is none": VALID | {"messages": ["hello"]},
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
@pytest.mark.parametrize("case", ODD)
def test_odd_bodies_are_400_and_answered_as_the_server_answers_them(
    stack: Stack, siblings: str, case: str
) -> None:
    answer = post(stack.proxy(siblings), ODD[case])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    if case == "nested without end":
        return  # the proxy's own limit: the server trusts its proxies
    direct = post(stack.server, ODD[case])
    assert (direct.status_code, direct.json()) == (400, answer.json())


@BOTH
def test_loose_input_is_taken_as_vllm_takes_it(stack: Stack, siblings: str) -> None:
    strange = [{"role": "bogus", "content": "x"}, {"role": "user", "content": HELLO}]
    for body in (
        {"messages": VALID["messages"]},
        VALID | {"surprise": {"a": 1}, "user": "u", "metadata": {"k": "v"}},
        VALID | {"messages": strange},
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


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_every_request_has_one_group_its_siblings_and_exactly_one_served(
    stack: Stack, siblings: str, streamed: bool
) -> None:
    proxy = stack.proxy(siblings)
    num_siblings = 1 if siblings == "one" else 3
    before = len(rows(proxy, "select * from groups"))
    questions = [f"[[say number {number}]]" for number in range(5)]
    for question in questions:
        message = {"role": "user", "content": question}
        assert post(proxy, VALID | {"messages": [message], "stream": streamed}).status_code == 200

    groups = wait_for_groups(proxy, before + len(questions))[before:]
    assert [group["question"] for group in groups] == questions
    for number, group in enumerate(groups):
        assert (group["num_siblings"], group["streamed"]) == (num_siblings, streamed)
        assert (group["status"], group["route"]) == (200, CHAT)
        found = rows(
            proxy,
            'select * from siblings where group_id = ? order by "index"',
            group["group_id"],
        )
        assert [sibling["index"] for sibling in found] == list(range(num_siblings))
        assert [sibling["text"] for sibling in found] == [f"number {number}"] * num_siblings
        served = [sibling["index"] for sibling in found if sibling["served"]]
        assert served == [group["served_index"]]


def test_a_refused_request_is_one_failed_group_with_none_served(stack: Stack) -> None:
    for proxy in (stack.one, stack.three):
        before = len(rows(proxy, "select * from groups"))
        assert post(proxy, VALID | {"max_tokens": -3}).status_code == 400
        (group,) = wait_for_groups(proxy, before + 1)[before:]
        assert (group["state"], group["status"], group["served_index"]) == ("failed", 400, None)


def test_the_siblings_the_server_says_it_trained_are_those_in_the_ledger(stack: Stack) -> None:
    for number in range(12):
        answer = post(stack.three, VALID | {"messages": [{"role": "user", "content": f"{number}"}]})
        assert answer.status_code == 200

    def told() -> set[tuple[str, int, int]]:
        reply = httpx.get(f"{stack.server.url}/get_run_log", params={"after": 0})
        entries = LogReply.model_validate_json(reply.content).entries
        return {
            (group.group_id, index, entry.step)
            for entry in entries
            if entry.kind == "step"
            for group in entry.groups
            for index in group.siblings
        }

    def kept() -> set[tuple[str, int, int]]:
        trained = rows(
            stack.three,
            'select s.group_id, s."index", g.trained_step from siblings s '
            "join groups g using (group_id) where s.trained",
        )
        return {tuple(row) for row in trained}

    def is_settled() -> bool:
        states = {row["state"] for row in rows(stack.three, "select distinct state from groups")}
        return "scored" not in states and told() == kept() != set()

    wait_until(
        is_settled, 20, lambda: f"equal records: {len(told())} told, {len(kept())} in the ledger"
    )
    assert rows(stack.one, "select count(*) from siblings where trained")[0][0] == 0
