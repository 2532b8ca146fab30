"""The programs that meet every fault: OpenAI's Node client and the command-line agents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clients.asking import TRIES, Ask, Client, Told
from tests.clients.programs import TITLED, ClaudeCode, Codex, Node, OpenCode, items, parts
from tests.clients.words import user

LIMIT_S = 12.0
"""They take long to begin, and wait for none."""
LIMIT_MS = int(LIMIT_S * 1000)


def _node(name: str, asked: Callable[[str], Any]) -> Ask:
    def ask(url: str, question: str, folder: Path) -> Told:
        told = Node(f"{url}/v1", folder, timeout=LIMIT_MS)(name, **asked(question))
        if "error" in told:
            assert not told["error"].startswith("APIConnection"), told
            return Told(error=json.dumps(told), status=told.get("status"))
        return _READ_BY_NODE[name](told["answer"])

    return ask


def _node_chat(answer: Any) -> Told:
    choice = answer["choices"][0]
    return Told(choice["message"]["content"] or "", choice["finish_reason"])


def _node_chat_stream(chunks: Any) -> Told:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Told(text, ends[-1] if ends else None)


def _node_response(answer: Any) -> Told:
    if answer["status"] == "failed":
        return Told(error=json.dumps(answer["error"]))
    return Told(answer["output_text"], answer["status"])


def _node_events(events: Any) -> Told:
    last = events[-1]
    if last["type"] == "error":
        return Told(error=json.dumps(last))
    response = last["response"]
    if response["status"] == "failed":
        return Told(error=json.dumps(response["error"]))
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    return Told("".join(texts), response["status"])


_READ_BY_NODE: dict[str, Callable[[Any], Told]] = {
    "chat": _node_chat,
    "chat_stream": _node_chat_stream,
    "chat_helper": _node_chat,
    "responses": _node_response,
    "responses_stream": _node_events,
}


def _opencode(url: str, question: str, folder: Path) -> Told:
    limits = {"headerTimeout": LIMIT_MS, "chunkTimeout": LIMIT_MS}
    opencode = OpenCode(f"{url}/v1", folder / "project", options=limits)
    code, events = opencode(question, *TITLED)
    errors = [event for event in events if event["type"] == "error"]
    if errors:
        assert code != 0
        status = errors[-1]["error"].get("data", {}).get("statusCode")
        return Told(error=json.dumps(errors), status=status)
    assert code == 0
    text = "".join(part["text"] for part in parts(events, "text"))
    ends = [part["reason"] for part in parts(events, "step_finish")]
    return Told(text, ends[-1] if ends else None)


def _codex(url: str, question: str, folder: Path) -> Told:
    codex = Codex(
        f"{url}/v1",
        folder / "project",
        stream_idle_timeout_ms=LIMIT_MS,
        request_max_retries=1,
        stream_max_retries=1,
    )
    code, events = codex(question)
    if code == 0:
        texts = [item["text"] for item in items(events, "agent_message")]
        return Told("".join(texts), events[-1]["type"])
    assert events[-1]["type"] == "turn.failed", events
    return Told(error=events[-1]["error"]["message"])


def _claude_code(url: str, question: str, folder: Path) -> Told:
    limits = {"API_TIMEOUT_MS": str(LIMIT_MS), "CLAUDE_CODE_MAX_RETRIES": str(TRIES - 1)}
    code, told = ClaudeCode(url, folder / "project", **limits)(question)
    assert (code != 0) == told["is_error"]
    if told["is_error"]:
        return Told(error=told["result"])
    return Told(told["result"], "end_turn")


def _asked(question: str) -> Any:
    return {"messages": user(question)}


def _input(question: str) -> Any:
    return {"input": question}


PROGRAMS: dict[str, Client] = {
    "Node, chat": Client(_node("chat", _asked), False, LIMIT_S),
    "Node, chat streamed": Client(_node("chat_stream", _asked), True, LIMIT_S),
    "Node, chat gathered": Client(_node("chat_helper", _asked), True, LIMIT_S),
    "Node, responses": Client(_node("responses", _input), False, LIMIT_S),
    "Node, responses streamed": Client(_node("responses_stream", _input), True, LIMIT_S),
    "opencode": Client(_opencode, True, LIMIT_S, tells_status=False, is_endless=True),
    "Codex": Client(
        _codex, True, LIMIT_S, tells_status=False, most_requests=4, most_when_refused=4
    ),
    "Claude Code": Client(
        _claude_code, True, LIMIT_S, tells_status=False, most_requests=6, most_when_refused=3
    ),
}
