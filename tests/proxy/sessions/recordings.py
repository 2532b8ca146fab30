"""Recorded traffic of real clients, as conversations of many users at once.

The recordings contain requests. The answer to a request is in the next request of its session. The
copy for each user has its own answers and call ids, as a sampling model produces them. The requests
of all users are interleaved at random.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, cast

from benchmarks.recorded_traffic import FOLDER, expand_lines
from fakevllm.admission.admission_rules import MARKERS
from fakevllm.admission.side_calls import SideCallRules
from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.registry import ADAPTERS

Json = dict[str, Any]

IS_THERE = any(FOLDER.glob("*.jsonl"))
SESSION_HEADERS = ("x-session-id", "X-OpenWebUI-Chat-Id")
_FORMATS = {adapter.path: adapter for adapter in ADAPTERS.values()}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded request of a session, with its answer."""

    session: str
    turn: int
    adapter: str
    body: Json
    headers: dict[bytes, bytes]
    is_failed: bool
    """Whether the client got no complete answer."""
    sent_at: float
    answer: Json = field(default_factory=dict[str, Any])

    @property
    def is_named(self) -> bool:
        return not self.session.rpartition("/")[1]

    @property
    def is_side(self) -> bool:
        body = ADAPTERS[self.adapter].open(self.body, EngineInfo("m")).body
        return SideCallRules(markers=MARKERS).matching_rule("m", self.headers, body) is not None


def sessions() -> dict[str, list[Recorded]]:
    """Return the requests of each session, in the order of arrival."""
    found: defaultdict[str, list[Recorded]] = defaultdict(list)
    for file in sorted(FOLDER.glob("*.jsonl")):
        for number, line in enumerate(expand_lines(file.read_text().splitlines())):
            one = _recorded(f"{file.stem}/{line['scenario']}", number, line)
            if one is not None:
                found[one.session].append(one)
    return {
        name: _answered(sorted(requests, key=lambda one: (one.turn, one.sent_at)))
        for name, requests in found.items()
    }


def _recorded(scenario: str, number: int, line: Json) -> Recorded | None:
    adapter = _FORMATS.get(line["path"])
    body = line["body"]
    if adapter is None or not isinstance(body, dict):
        return None
    body = cast(Json, body)
    try:
        adapter.open(body, EngineInfo("m"))
    except NotTranslated:
        return None
    headers = {name.lower().encode(): value.encode() for name, value in line["headers"].items()}
    named = [line["headers"][name] for name in SESSION_HEADERS if name in line["headers"]]
    if not named:
        named = [_without_headers(scenario, number)]
    turn = 2 if scenario.endswith("_t2") else 1
    is_failed = line["answer"].get("status") not in (200, "ok")
    return Recorded(named[0], turn, adapter.name, body, headers, is_failed, line["t"])


def _without_headers(scenario: str, number: int) -> str:
    """Return the session of a request without session headers.

    Usually a scenario is one session. The scenarios below repeat their conversation, so that each
    of their requests is a session.
    """
    many = ("owui_api_plain", "owui_api_stream", "openai_json_pad_nl")
    return f"{scenario}/{number}" if scenario.endswith(many) else scenario


def _answered(requests: list[Recorded]) -> list[Recorded]:
    """Return the requests with the answers that later requests contain, or with placeholders.

    A request that is repeated exactly counts as failed.
    """
    answered = list[Recorded]()
    for at, one in enumerate(requests):
        later = requests[at + 1 :]
        found = [
            *(_answer_in(other.body, one.body) for other in later),
            *(_answer_quoted(other.body) for other in later if other.turn == one.turn),
        ]
        answer = next(filter(None, found), None)
        placeholder = {"role": "assistant", "content": f"An answer without a continuation, {at}."}
        is_failed = one.is_failed or any(other.body == one.body for other in later)
        answered.append(replace(one, answer=answer or placeholder, is_failed=is_failed))
    return answered


def _answer_in(later: Json, earlier: Json) -> Json | None:
    """Return the message of `later` that follows the messages of `earlier`."""
    after, before = messages_in(later), messages_in(earlier)
    rest = after[len(before) :]
    is_same = [_plain(one) for one in after[: len(before)]] == [_plain(one) for one in before]
    if not is_same or not rest:
        return None
    if rest[0].get("type") == "function_call":
        calls = [one for one in rest if one.get("type") == "function_call"]
        functions = [{"name": one["name"], "arguments": one["arguments"]} for one in calls]
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": call["call_id"], "type": "function", "function": function}
                for call, function in zip(calls, functions, strict=True)
            ],
        }
    return rest[0] if rest[0].get("role") == "assistant" else None


def _answer_quoted(later: Json) -> Json | None:
    """Return the last answer that a side call of Open WebUI quotes."""
    last = (messages_in(later) or [{}])[-1].get("content")
    quoted = re.findall(r"^ASSISTANT: (.*)$", last, re.MULTILINE) if isinstance(last, str) else []
    return {"role": "assistant", "content": quoted[-1]} if quoted else None


def messages_in(body: Json) -> list[Json]:
    messages_field: object = body.get("messages") or body.get("input") or []
    messages = cast(list[Json], messages_field) if isinstance(messages_field, list) else []
    return [one for one in messages if one.get("role") != "system"]


def _plain(message: Json) -> str:
    return json.dumps(message, sort_keys=True)
