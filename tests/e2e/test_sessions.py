"""Tests of sessions that the proxy recognizes only by the content of the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.ledgers import wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes

Json = dict[str, Any]


def chat(proxy: Process, messages: list[Any]) -> None:
    """Send the conversation, and append the answer to it."""
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-app", max_retries=0) as app:
        answer = app.chat.completions.create(model="fake", messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})


@pytest.mark.parametrize("num_siblings", [1, 2])
def test_a_conversation_continues_after_a_kill_of_the_proxy(
    processes: Processes, yes_hooks: Path, num_siblings: int
) -> None:
    server = processes.server("--backend", "fake")
    hooks = ["--hooks", str(yes_hooks)] if num_siblings > 1 else []
    proxy = processes.proxy(server, *hooks, "--n", str(num_siblings))
    one: list[Any] = [{"role": "user", "content": "[[say first]]"}]
    other: list[Any] = [{"role": "user", "content": "[[say first]]"}]
    chat(proxy, one)
    chat(proxy, other)
    one.append({"role": "user", "content": "[[say second]]"})
    chat(proxy, one)
    wait_for_groups(proxy, 3)
    proxy.kill()
    proxy.start()
    proxy.wait_until_healthy()
    one.append({"role": "user", "content": "[[say third]]"})
    chat(proxy, one)

    groups = wait_for_groups(proxy, 4)
    kinds = [(row["kind"], row["turn"], row["evidence"]) for row in groups]
    assert kinds == [
        ("new", 1, "none"),
        ("new", 1, "none"),
        ("continues", 2, "prefix"),
        ("continues", 3, "prefix"),
    ]
    assert len({row["session_id"] for row in groups}) == 2
    assert groups[3]["parent_id"] == groups[2]["group_id"]
    assert groups[3]["session_id"] == groups[2]["session_id"]
    shown = httpx.get(f"{proxy.url}/fakevllm/groups/{groups[2]['group_id']}").json()
    assert (shown["turn"], shown["kind"], shown["state"]) == (2, "continues", groups[2]["state"])
    assert shown["followed"] == [
        {"group_id": groups[3]["group_id"], "kind": "continues", "is_new_turn": True}
    ]
    assert httpx.get(f"{proxy.url}/fakevllm/groups/nobody").status_code == 404
    command = ["-m", "fakevllm", "sessions", groups[2]["session_id"][:10]]
    result = PRELOADED_PYTHON.run([*command, "--run-dir", str(proxy.folder)], processes.folder)
    assert result.returncode == 0, result.stderr
    assert "3 turns, 3 groups" in result.stdout and "[[say third]]" in result.stdout


def test_every_format_has_sessions(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server)
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-app", max_retries=0) as app:
        first = app.responses.create(model="fake", input="[[say one]]")
        app.responses.create(model="fake", input="[[say two]]", previous_response_id=first.id)
        text = app.completions.create(model="fake", prompt="Bot: [[say hello]]").choices[0].text
        app.completions.create(model="fake", prompt=f"Bot: [[say hello]]{text}\n[[say more]]")
    messages: list[Json] = [{"role": "user", "content": "[[say yes]]"}]
    for _ in range(2):
        body = {"model": "fake", "max_tokens": 20, "messages": messages}
        reply = httpx.post(
            f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": "sk-app"}
        ).json()
        messages += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": "[[say no]]"},
        ]
    groups = wait_for_groups(proxy, 6)
    for before, after in (groups[0:2], groups[2:4], groups[4:6]):
        assert (before["kind"], before["turn"]) == ("new", 1), before["route"]
        assert (after["kind"], after["turn"]) == ("continues", 2), after["route"]
        assert after["session_id"] == before["session_id"]
        assert after["parent_id"] == before["group_id"]
    assert len({row["session_id"] for row in groups}) == 3
    assert groups[1]["evidence"] == "response_id"
