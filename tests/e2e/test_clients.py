"""Tests of unmodified clients with the proxy.

A client gets the answer that the server itself would give, and its request is in the ledger.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Collection
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from fakevllm_adapters.protocol.swarm import LogReply
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, wait_until
from tests.e2e.stack import ALIAS, BOTH, CHAT, HELLO, VALID, Stack, post

UNIQUE = ("id", "created")
"""Fields that differ between any two answers."""


def client_of(process: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="sk-test", max_retries=0)


def groups_of(proxy: Process, questions: Collection[str]) -> list[Any]:
    """Wait for the groups of these questions, and return them, oldest first.

    The ledger is written shortly after the app's answer.
    """

    def matching() -> list[Any]:
        groups = rows(proxy, "select * from groups order by received_at")
        return [group for group in groups if group["question"] in questions]

    wait_until(lambda: len(matching()) >= len(questions), 20, "the groups of these questions")
    return matching()


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


def send(process: Process, fields: dict[str, Any]) -> list[Any]:
    """Send a request with the official client, and return the answer or its chunks."""
    with client_of(process) as client:
        create = cast(Callable[..., Any], client.chat.completions.create)
        answer = create(model="fake", messages=[{"role": "user", "content": HELLO}], **fields)
        return list(answer) if fields.get("stream") else [answer]


@BOTH
@pytest.mark.parametrize("fields", ASKS.values(), ids=ASKS.keys())
def test_the_openai_client_gets_what_the_server_itself_answers(
    stack: Stack, siblings: str, fields: dict[str, Any]
) -> None:
    direct = send(stack.server, fields)
    through = send(stack.proxy(siblings), fields)

    by_choice = fields.get("stream") and fields.get(
        "n"
    )  # the chunks of several choices interleave in any order
    sort = sorted if by_choice else list
    assert sort(map(choice_first, through)) == sort(map(choice_first, direct))
    assert len({part.id for part in through}) == 1


def choice_first(answer: Any) -> str:
    """Return a sort key that keeps the chunks of each choice together."""
    shown = comparable(answer)
    index = shown["choices"][0]["index"] if shown["choices"] else -1
    return f"{index} {json.dumps(shown)}"


@BOTH
def test_an_answer_has_the_fields_that_the_app_requested_and_no_others(
    stack: Stack, siblings: str
) -> None:
    proxy = stack.proxy(siblings)
    (two,) = send(proxy, {"n": 2})
    assert [choice.index for choice in two.choices] == [0, 1]
    (plain,) = send(proxy, {})
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].token_ids is None
    (detailed,) = send(proxy, {"logprobs": True, "extra_body": {"return_token_ids": True}})
    tokens = len("Hello, wörld.".encode()) + 1
    assert len(detailed.choices[0].logprobs.content) == tokens
    assert len(detailed.choices[0].token_ids) == tokens


@BOTH
async def test_the_async_client_works_with_and_without_streaming(
    stack: Stack, siblings: str
) -> None:
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
    """Return headers and body without the fields that differ between any two answers, and without
    the headers of receipts, which the proxy adds."""
    messages = [{"role": "user", "content": HELLO}]
    body = {"model": "fake", "messages": messages, "stream": streamed}
    command = ["curl", "--silent", "--show-error", "--include", "--no-buffer", "--max-time", "20"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    output = subprocess.run(
        [*command, f"{process.url}{CHAT}"], check=True, capture_output=True, timeout=30
    ).stdout.decode()
    head, _, shown = output.partition("\r\n\r\n")
    recorded = sorted(line for line in head.splitlines() if not is_left_out(line))
    shown = re.sub(r'"id":"chatcmpl-[0-9a-f]{16}"', '"id":""', shown)
    return "\n".join([*recorded, re.sub(r'"created":\d+', '"created":0', shown)])


def is_left_out(line: str) -> bool:
    """Whether the header is about framing (a body has a length or is sent in chunks), or the
    proxy's own."""
    left_out = ("date:", "content-length:", "transfer-encoding:", "x-fakevllm-")
    return line.lower().startswith(left_out)


def test_the_served_model_and_the_aliases_are_listed(stack: Stack) -> None:
    with client_of(stack.one) as client, client_of(stack.three) as any_name:
        assert [card.id for card in client.models.list()] == ["fake", ALIAS]
        assert [card.id for card in any_name.models.list()] == ["fake"]


def test_an_alias_is_answered_by_the_served_model_in_the_name_of_the_alias(stack: Stack) -> None:
    for process, name in ((stack.one, ALIAS), (stack.three, "whatever the app is set to")):
        with client_of(process) as client:
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": HELLO}]
            )
        assert answer.model == name
        assert answer.choices[0].message.content == "Hello, wörld."


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_every_request_has_one_group_its_siblings_and_exactly_one_served(
    stack: Stack, siblings: str, streamed: bool
) -> None:
    proxy = stack.proxy(siblings)
    num_siblings = 1 if siblings == "one" else 3
    mode = "streamed" if streamed else "whole"
    texts = {f"[[say {mode} number {number}]]": f"{mode} number {number}" for number in range(5)}
    for question in texts:
        message = {"role": "user", "content": question}
        assert post(proxy, VALID | {"messages": [message], "stream": streamed}).status_code == 200

    groups = groups_of(proxy, texts)
    assert [group["question"] for group in groups] == list(texts)
    for text, group in zip(texts.values(), groups, strict=True):
        assert (group["num_siblings"], group["streamed"]) == (num_siblings, streamed)
        assert (group["status"], group["route"]) == (200, CHAT)
        records = rows(
            proxy,
            'select * from siblings where group_id = ? order by "index"',
            group["group_id"],
        )
        assert [sibling["index"] for sibling in records] == list(range(num_siblings))
        assert [sibling["text"] for sibling in records] == [text] * num_siblings
        served = [sibling["index"] for sibling in records if sibling["served"]]
        assert served == [group["served_index"]]


def test_a_refused_request_is_one_failed_group_with_none_served(stack: Stack) -> None:
    for proxy in (stack.one, stack.three):
        messages = [{"role": "user", "content": "refuse me"}]
        refused = VALID | {"max_tokens": -3, "messages": messages}
        assert post(proxy, refused).status_code == 400
        (group,) = groups_of(proxy, ["refuse me"])
        assert (group["state"], group["status"], group["served_index"]) == ("failed", 400, None)


def test_the_trained_siblings_in_the_run_log_are_those_in_the_ledger(stack: Stack) -> None:
    for number in range(12):
        answer = post(stack.three, VALID | {"messages": [{"role": "user", "content": f"{number}"}]})
        assert answer.status_code == 200

    def logged() -> set[tuple[str, int, int]]:
        reply = httpx.get(f"{stack.server.url}/get_run_log", params={"after": 0})
        entries = LogReply.model_validate_json(reply.content).entries
        return {
            (group.group_id, index, entry.step)
            for entry in entries
            if entry.kind == "step"
            for group in entry.groups
            for index in group.siblings
        }

    def recorded() -> set[tuple[str, int, int]]:
        trained = rows(
            stack.three,
            'select s.group_id, s."index", g.trained_step from siblings s '
            "join groups g using (group_id) where s.trained",
        )
        return {tuple(row) for row in trained}

    def is_settled() -> bool:
        states = {row["state"] for row in rows(stack.three, "select distinct state from groups")}
        return "scored" not in states and logged() == recorded() != set()

    wait_until(
        is_settled,
        60,
        lambda: f"equal records: {len(logged())} in the run log, {len(recorded())} in the ledger",
    )
    assert rows(stack.one, "select count(*) from siblings where trained")[0][0] == 0
