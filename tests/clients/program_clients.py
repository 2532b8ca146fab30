"""Programs in the fault tests: OpenAI's Node client and the command-line agents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clients.fault_client import ATTEMPTS, Client, Outcome, SendQuestion
from tests.clients.programs import TITLED, ClaudeCode, Codex, Node, OpenCode, items, parts
from tests.clients.prompts import user

LIMIT_S = 12.0
"""Time limit of the programs in seconds; they take long to start."""
LIMIT_MS = int(LIMIT_S * 1000)


def _node(name: str, fields: Callable[[str], Any]) -> SendQuestion:
    def send(url: str, question: str, folder: Path) -> Outcome:
        result = Node(f"{url}/v1", folder, timeout=LIMIT_MS)(name, **fields(question))
        if "error" in result:
            assert not result["error"].startswith("APIConnection"), result
            return Outcome(error=json.dumps(result), status=result.get("status"))
        return _NODE_OUTCOMES[name](result["answer"])

    return send


def _node_chat(answer: Any) -> Outcome:
    choice = answer["choices"][0]
    return Outcome(choice["message"]["content"] or "", choice["finish_reason"])


def _node_chat_stream(chunks: Any) -> Outcome:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Outcome(text, ends[-1] if ends else None)


def _node_response(answer: Any) -> Outcome:
    if answer["status"] == "failed":
        return Outcome(error=json.dumps(answer["error"]))
    return Outcome(answer["output_text"], answer["status"])


def _node_events(events: Any) -> Outcome:
    last = events[-1]
    if last["type"] == "error":
        return Outcome(error=json.dumps(last))
    response = last["response"]
    if response["status"] == "failed":
        return Outcome(error=json.dumps(response["error"]))
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    return Outcome("".join(texts), response["status"])


_NODE_OUTCOMES: dict[str, Callable[[Any], Outcome]] = {
    "chat": _node_chat,
    "chat_stream": _node_chat_stream,
    "chat_helper": _node_chat,
    "responses": _node_response,
    "responses_stream": _node_events,
}


def _opencode(url: str, question: str, folder: Path) -> Outcome:
    limits = {"headerTimeout": LIMIT_MS, "chunkTimeout": LIMIT_MS}
    opencode = OpenCode(f"{url}/v1", folder / "project", options=limits)
    code, events = opencode(question, *TITLED)
    errors = [event for event in events if event["type"] == "error"]
    if errors:
        assert code != 0
        status = errors[-1]["error"].get("data", {}).get("statusCode")
        return Outcome(error=json.dumps(errors), status=status)
    assert code == 0
    text = "".join(part["text"] for part in parts(events, "text"))
    ends = [part["reason"] for part in parts(events, "step_finish")]
    return Outcome(text, ends[-1] if ends else None)


def _codex(url: str, question: str, folder: Path) -> Outcome:
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
        return Outcome("".join(texts), events[-1]["type"])
    assert events[-1]["type"] == "turn.failed", events
    return Outcome(error=events[-1]["error"]["message"])


def _claude_code(url: str, question: str, folder: Path) -> Outcome:
    limits = {"API_TIMEOUT_MS": str(LIMIT_MS), "CLAUDE_CODE_MAX_RETRIES": str(ATTEMPTS - 1)}
    code, result = ClaudeCode(url, folder / "project", **limits)(question)
    assert (code != 0) == result["is_error"]
    if result["is_error"]:
        return Outcome(error=result["result"])
    return Outcome(result["result"], "end_turn")


def _messages(question: str) -> Any:
    return {"messages": user(question)}


def _input(question: str) -> Any:
    return {"input": question}


PROGRAMS: dict[str, Client] = {
    "Node, chat": Client(_node("chat", _messages), False, LIMIT_S),
    "Node, chat streamed": Client(_node("chat_stream", _messages), True, LIMIT_S),
    "Node, chat gathered": Client(_node("chat_helper", _messages), True, LIMIT_S),
    "Node, responses": Client(_node("responses", _input), False, LIMIT_S),
    "Node, responses streamed": Client(_node("responses_stream", _input), True, LIMIT_S),
    "opencode": Client(_opencode, True, LIMIT_S, reports_status=False, retries_forever=True),
    "Codex": Client(
        _codex, True, LIMIT_S, reports_status=False, max_requests=4, max_when_refused=4
    ),
    "Claude Code": Client(
        _claude_code, True, LIMIT_S, reports_status=False, max_requests=6, max_when_refused=3
    ),
}

AGENTS = ("opencode", "Codex", "Claude Code")
"""Command-line agents, which take seconds to start."""
