"""`fakevllm export` on the ledger of a real run, and `fakevllm import` before a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes

Json = dict[str, Any]
BY_INDEX = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sibling.index) for sibling in valid_results]
"""
"""Hooks that prefer the last sibling, so the others can be the rejected answers."""
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def run(folder: Path, *arguments: str) -> str:
    done = PRELOADED_PYTHON.run(["-m", "fakevllm", *arguments], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def export(folder: Path, proxy: Process, name: str, *arguments: str) -> list[Json]:
    """Export the proxy's ledger in a format, and return the rows."""
    file = folder / f"{name}.jsonl"
    run(
        folder,
        "export",
        "--as",
        name,
        "--run-dir",
        str(proxy.folder),
        "--to",
        str(file),
        *arguments,
    )
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def proxy(processes: Processes, tmp_path: Path) -> Process:
    """A proxy with two siblings."""
    hooks = write_hooks(tmp_path / "hooks", BY_INDEX)
    server = processes.server("--backend", "fake")
    return processes.proxy(server, "--hooks", str(hooks), "--n", "2")


def post(proxy: Process, path: str, **body: object) -> Json:
    reply = httpx.post(f"{proxy.url}/v1/{path}", json={"model": "fake", **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_requests_of_all_formats_are_exported_as_conversations(
    proxy: Process, tmp_path: Path
) -> None:
    asked = user('[[call add {"a": 1}]] [[say It is 3.]]')
    called = post(proxy, "chat/completions", messages=[asked], tools=[TOOL])
    call = called["choices"][0]["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    history = [asked, called["choices"][0]["message"], result]
    post(proxy, "chat/completions", messages=history, tools=[TOOL])
    first = post(proxy, "responses", input="[[say Three.]]", instructions="Be brief.")
    post(proxy, "responses", input="[[say Four.]]", previous_response_id=first["id"])
    parts = [{"type": "text", "text": "[[say Five.]]"}, {"type": "text", "text": "Really?"}]
    anthropic = [{"role": "user", "content": parts}]
    post(proxy, "messages", messages=anthropic, system="Be kind.", max_tokens=20)
    post(proxy, "completions", prompt="Once upon a time")
    wait_for_groups(proxy, 6, states="pooled trained dropped")

    exported = export(tmp_path, proxy, "messages")
    assert len(exported) == 5
    system = {"role": "system", "content": "Be brief."}
    exported_call = {
        "type": "function",
        "id": call["id"],
        "function": {"name": "add", "arguments": {"a": 1}},
    }
    calling = {"role": "assistant", "content": "", "tool_calls": [exported_call]}
    assert exported[0]["messages"] == [asked, calling]
    assert exported[1]["messages"] == [
        *(asked, calling, result),
        {"role": "assistant", "content": "It is 3."},
    ]
    assert exported[0]["tools"][0]["function"]["name"] == "add"
    three = [user("[[say Three.]]"), {"role": "assistant", "content": "Three."}]
    assert exported[2]["messages"] == [system, *three]
    # The instructions of a response do not apply to the next one.
    four = {"role": "assistant", "content": "Four."}
    assert exported[3]["messages"] == [*three, user("[[say Four.]]"), four]
    assert exported[4]["messages"] == [
        {"role": "system", "content": "Be kind."},
        user("[[say Five.]]\nReally?"),
        {"role": "assistant", "content": "Five."},
    ]
    groups = export(tmp_path, proxy, "groups")
    assert [group["route"] for group in groups][-1] == "/v1/completions"
    assert len(groups) == 6


def test_edits_make_pairs_and_thumbs_make_labels(proxy: Process, tmp_path: Path) -> None:
    def send_feedback(answer: Json, **feedback: object) -> None:
        body = {"id": answer["id"], **feedback}
        httpx.post(f"{proxy.url}/v1/feedback", json=body, timeout=60).raise_for_status()

    answers = [
        post(proxy, "chat/completions", messages=[user(f"[[say {word}]]")])
        for word in ("one", "two", "three", "four")
    ]
    wait_for_groups(proxy, 4, states="pooled trained dropped")
    send_feedback(answers[0], edited="1")
    send_feedback(answers[0], thumbs="down")  # it replaces earlier values, but not the edit
    send_feedback(answers[1], edited="2")
    send_feedback(answers[1], edited=None)
    send_feedback(answers[2], thumbs="up")
    send_feedback(answers[3], thumbs="down", comment="wrong")

    (pair,) = export(tmp_path, proxy, "preference")
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("1", "one")
    assert pair["source"] == "edit"
    labels = export(tmp_path, proxy, "kto")
    assert [(row["completion"][0]["content"], row["label"]) for row in labels] == [
        ("one", False),
        ("three", True),
        ("four", False),
    ]
    completions = export(tmp_path, proxy, "sft")
    assert [row["completion"][0]["content"] for row in completions] == ["1", "two", "three", "four"]
    output = run(
        *(tmp_path, "export", "--as", "kto", "--run-dir", str(proxy.folder)),
        *("--to", str(tmp_path / "kto.parquet"), "--last", "3"),
    )
    assert "kto.parquet: 2 rows as kto, from 3 groups" in output
    assert "1 group skipped: 1 no_feedback" in output


def test_an_imported_log_is_replayed_with_its_messages_and_tools(
    proxy: Process, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "Be brief."}
    turns = [system, user("Hi"), {"role": "assistant", "content": "Hello"}, user("[[say Bye]]")]
    lines = [
        {"model": "gpt", "messages": turns, "temperature": 0.0, "tools": [TOOL]},
        {"messages": [user("[[say A]]"), {"role": "assistant", "content": "B"}]},
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run(tmp_path, "import", str(log), "--to", "rows.jsonl")
    replay = ["replay", "--dataset", "rows.jsonl", "--url", proxy.url, "--concurrency", "1"]
    run(tmp_path, *replay)
    groups = wait_for_groups(proxy, 2, states="pooled trained dropped")
    bodies = [json.loads(group["request_json"]) for group in groups]
    assert bodies[0]["messages"] == turns
    assert bodies[0]["tools"] == [TOOL] and "temperature" not in bodies[0]
    assert bodies[1]["messages"] == [user("[[say A]]")]
    tasks = rows(proxy, "SELECT metadata_json FROM tasks ORDER BY task_id")
    assert [json.loads(task[0]).get("answer") for task in tasks] == [None, "B"]
