"""Siblings may call different tools. The app gets only the tool calls of the served sibling."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, encode
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER, EndGroupReply, SuccessReply
from tests.e2e.hook_files import write_hooks
from tests.fuzz.in_process_stack import proxy_over
from tests.proxy.scripted_swarm import ScriptedSwarm, until

PREFER_TWO = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(result.index == 2) for result in valid_results]
"""
USER = {"role": "user", "content": "go"}
CHAT_TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "tools": [CHAT_TOOL]},
    "completions": {"prompt": "go"},
    "responses": {
        "input": "go",
        "tools": [{"type": "function", "name": "run", "parameters": {"type": "object"}}],
    },
    "messages": {
        "messages": [USER],
        "max_tokens": 99,
        "tools": [{"name": "run", "input_schema": {"type": "object"}}],
    },
}
MARKS = re.compile(rb"mark-of-(\d)")
"""For each sibling, a mark that occurs in all parts of the sibling's answer: the text, and the
name, arguments and id of the tool call."""


class CallingSwarm(ScriptedSwarm):
    """A server on which each sibling calls a different tool, in all parts of the answer."""

    async def _answer(self, request: web.Request) -> web.Response:
        index = request.headers.get(SIBLING_HEADER, "/0").rpartition("/")[2]
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        if request.path == "/v1/completions":
            choice = {"index": 0, "text": f"mark-of-{index}", "finish_reason": "stop"}
            return _reply("text_completion", choice, body)
        if request.path == "/v1/chat/completions":
            function = {"name": f"mark-of-{index}", "arguments": f'{{"a":"mark-of-{index}"}}'}
            call = {"index": 0, "id": f"mark-of-{index}", "type": "function", "function": function}
            message = {"role": "assistant", "content": f"mark-of-{index}", "tool_calls": [call]}
            part = "delta" if body.get("stream") else "message"
            choice = {"index": 0, part: message, "finish_reason": "tool_calls"}
            return _reply("chat.completion", choice, body)
        return await super()._answer(request)


def _reply(kind: str, choice: dict[str, Any], body: dict[str, Any]) -> web.Response:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "a", "object": kind, "created": 1, "model": "fake", "choices": [choice]}
    if not body.get("stream"):
        return web.json_response(answer | {"usage": usage})
    events = encode(answer | {"object": f"{kind}.chunk"}) + DONE
    return web.Response(body=events, content_type="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", list(ADAPTERS))
@pytest.mark.parametrize(
    ("sections", "served"),
    [({}, 2), ({"serve": {"policy": "lead"}}, 0), ({"policy": {"shadow": True}}, 0)],
)
async def test_only_the_served_siblings_tool_calls_reach_the_app(
    tmp_path: Path, sections: dict[str, Any], served: int, name: str, stream: bool
) -> None:
    hooks = write_hooks(tmp_path / "hooks", PREFER_TWO)
    body = REQUESTS[name] | {"model": "fake"} | ({"stream": True} if stream else {})
    async with CallingSwarm() as swarm:
        swarm.answers["/end_group"] = EndGroupReply(success=True, pooled=True)
        swarm.answers["/abort_group"] = SuccessReply(success=True)
        job = {"job": {"num_repeat": 3}}
        async with (
            proxy_over(tmp_path, swarm.url, hooks, **job, **sections) as proxy,
            aiohttp.ClientSession() as http,
            http.post(f"{proxy}{ADAPTERS[name].path}", json=body) as answer,
        ):
            received = await answer.read()
            await until(lambda: len(_siblings(tmp_path)) == 3)
    assert answer.status == 200
    assert {int(mark) for mark in MARKS.findall(received)} == {served}, received
    rows = _siblings(tmp_path)
    assert [row[0] for row in rows if row[1]] == [served]
    assert all(f"mark-of-{index}" in message for index, _, message in rows), "all were sampled"


def _siblings(folder: Path) -> list[Any]:
    with closing(sqlite3.connect(folder / "proxy" / "ledger.sqlite")) as ledger:
        query = 'SELECT "index", served, message_json FROM siblings ORDER BY "index"'
        return ledger.execute(query).fetchall()
