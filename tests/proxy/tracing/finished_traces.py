"""Notes about a made-up request with three siblings, from which tests make spans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from fakevllm.ledger.records import GroupRecord, SiblingRecord
from fakevllm.tracing.request_trace import CallTrace, FinishedTrace, HookTrace, RequestFacts
from fakevllm_adapters.formats.base import Answer

QUESTION = "Is my number 0171 1234567?"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sibling(index: int, **fields: Any) -> SiblingRecord:
    message = {"role": "assistant", "content": f"answer {index}"}
    own: dict[str, Any] = {
        "served": index == 1,
        "best": index == 1,
        "status": 200,
        "message_json": orjson.dumps(message).decode(),
        "text": message["content"],
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "completion_tokens": 3 + index,
        "reward": 0.5 * index,
    }
    return SiblingRecord(index=index, **own | fields)


def record(**fields: Any) -> GroupRecord:
    messages = [{"role": "user", "content": QUESTION}]
    own: dict[str, Any] = {
        "group_id": "g1",
        "received_at": 0.0,
        "route": "/v1/chat/completions",
        "model": "demo",
        "streamed": False,
        "task_id": None,
        "app_key": None,
        "request_json": orjson.dumps({"model": "gpt-4o", "messages": messages}).decode(),
        "question": QUESTION,
        "num_siblings": 3,
        "status": 200,
        "latency_s": 0.9,
        "served_index": 1,
        "best_index": 1,
        "state": "scored",
        "reason": None,
        "hook_hash": "abc",
        "siblings": [sibling(index) for index in range(3)],
        "served_by": "best",
        "propensity": 1.0,
        "session_id": "s1",
        "turn": 2,
        "kind": "turn",
        "answer_id": "chatcmpl-1",
    }
    return GroupRecord(**own | fields)


def call(index: int, **fields: Any) -> CallTrace:
    sampling: dict[str, Any] = {"model": "demo", "temperature": 1.0 if index else 0.2}
    answer = Answer({}, "stop", {"prompt_tokens": 7}, f"chatcmpl-{index}", "demo")
    own: dict[str, Any] = {
        "sampling": sampling | {"max_tokens": 20, "seed": 5 + index},
        "started_ns": 100 + index,
        "num_sharing": 2 if index else 1,
        "ended_ns": 500 + index,
        "status": 200,
        "answer": answer,
        "weight_version": "4",
    }
    return CallTrace(index, **own | fields)


def trace(**fields: Any) -> FinishedTrace:
    messages = [{"role": "user", "content": QUESTION}]
    sampling = {"model": "demo", "temperature": 0.2, "max_tokens": 20, "seed": 5}
    facts = RequestFacts("gpt-4o", sampling, messages=messages, parent={"traceparent": PARENT})
    hook = HookTrace("on_compute_relative_reward", 520, 600, None, "abc")
    calls = tuple(call(index) for index in range(3))
    return replace(FinishedTrace(facts, record(), 90, 650, 700, calls, (hook,)), **fields)
