"""Valid request and response bodies of every route, with as many fields as possible, to be
garbled."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "hi"}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_CALL: Json = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: Json = {
    **{"model": "fake", "messages": [USER], "temperature": 1.0, "seed": 3, "n": 1, "stop": ["x"]},
    **{"logit_bias": {"5": 1}, "stream": False, "max_tokens": 5, "logprobs": True},
    **{"top_logprobs": 1, "response_format": {"type": "text"}, "tools": [TOOL]},
    **{"tool_choice": "auto", "request_id": "abc", "top_k": 3, "chat_template_kwargs": {}},
    **{"return_token_ids": True, "kv_transfer_params": {"a": 1}, "truncate_prompt_tokens": 50},
    **{"stop_token_ids": [1], "priority": 1, "allowed_token_ids": None, "bad_words": None},
    **{"min_tokens": 0, "structured_outputs": None, "cache_salt": "s", "stream_options": None},
}
CHAT_STREAMED: Json = {
    "messages": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]},
    ],
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "include_reasoning": False,
    "structured_outputs": {"choice": ["a"]},
}
TEXT: Json = {
    **{"model": "fake", "prompt": "hi", "max_tokens": 3, "stream": False, "logprobs": 1},
    **{"echo": False, "seed": 4, "suffix": None, "best_of": 1},
}
TEXT_STREAMED: Json = {
    **{"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}},
}
RESPONSES: Json = {
    "model": "fake",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    **{"instructions": "be", "tool_choice": "auto", "max_output_tokens": 5, "stream": False},
    **{"metadata": {"a": "b"}, "previous_response_id": None, "store": True, "include": []},
}
_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
MESSAGES: Json = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, _IMAGE]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "5"}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    **{"model": "fake", "max_tokens": 5, "system": [{"type": "text", "text": "s"}]},
    **{"tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "stream": False},
    **{"metadata": {"user_id": "x"}, "thinking": {"type": "enabled", "budget_tokens": 5}},
}
STREAM: Json = {"stream": True}

APPS: dict[str, list[Json]] = {
    "/v1/chat/completions": [CHAT, CHAT_STREAMED],
    "/v1/completions": [TEXT, TEXT_STREAMED],
    "/v1/responses": [RESPONSES, RESPONSES | STREAM],
    "/v1/messages": [MESSAGES, MESSAGES | STREAM],
    "/v1/messages/count_tokens": [MESSAGES],
    "/tokenize": [{"prompt": "hi", "return_token_strs": True}, {"messages": [USER]}],
    "/detokenize": [{"tokens": [1, 2], "model": "fake"}],
    "/v1/responses/resp_1/cancel": [{}],
    "/ping": [{}],
    "/v1/feedback": [
        {
            **{"id": "chatcmpl-1", "score": 0.5, "thumbs": "up", "edited": "a", "comment": "b"},
            "feedback_id": "c",
        }
    ],
}
ENGINES: dict[str, list[Json]] = {
    path: APPS[path]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
}
_EPISODE: Json = {
    **{"client_uuid": "c", "episode_uuid": "e", "task_id": "t", "declare_client_active": True},
    "workflow_output": {
        **{"reward": 1.0, "is_success": True, "metadata": {"task_id": "t"}},
        "log_metrics": {"a": 1.0, "b": [1.0]},
    },
}
_SAMPLED: Json = {
    **{"prompt_ids": "AQAAAA==", "response_ids": "AgAAAA==", "logprobs": "AAAAvw=="},
    **{"weight_versions": [[0, 0, 1]], "temperature": 1.0, "finish_reason": "stop"},
    **{"untrainable": None, "shaped": False, "replica": None},
}
_CLAIM: Json = {"client_uuid": "c", "episode_type": "train", "discard_episode_timeout": 0.5}
SWARM: dict[str, list[Json]] = {
    "/end_group": [{"group_id": "g", "task_id": "t", "rewards": [1.0, None], "metadata": {"a": 1}}],
    "/abort_group": [{"group_id": "g"}],
    "/add_sample": [{"sample_id": "s", "run_id": "r", "advantage": 0.5, "calls": [_SAMPLED]}],
    "/add_demonstration": [
        {
            **{"sample_id": "e", "run_id": "r"},
            "demonstrations": [
                {"kind": "plain", "prompt_ids": "AQAAAA==", "response_ids": "AgAAAA=="}
            ],
        }
    ],
    "/add_logged_group": [{"group_id": "g", "rewards": [1.0, None], "calls": [[_SAMPLED], []]}],
    "/claim_episode": [_CLAIM | {"throttle_policy": {"a": 1}}],
    "/end_episode": [_EPISODE],
    "/abort_episode": [_EPISODE],
    "/can_continue_episode": [{"client_uuid": "c", "episode_uuid": "e"}],
    "/sync_train_config": [{"yaml_as_string": "job: {lr: 1}"}],
}
TASK: Json = {
    **{"main_query": "q", "init_messages": [USER], "task_id": "t", "env_type": "e"},
    "metadata": {"a": {"b": 1}},
}
TASKS: list[Json] = [{"tasks": [TASK]}]

# --- responses of engines

_SPAN: Json = {"version": "3", "start": 0, "end": 1}
_LOGPROB: Json = {"token": "x", "logprob": -0.5, "bytes": [1], "top_logprobs": []}
CHAT_ANSWER: Json = {
    **{"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "fake"},
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "reasoning": "hm"}
            | {"tool_calls": [_CALL]},
            "logprobs": {"content": [_LOGPROB]},
            "finish_reason": "stop",
            **{"token_ids": [7], "weight_versions": [_SPAN]},
        }
    ],
    "usage": {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1},
    "prompt_token_ids": [1, 2],
}
TEXT_ANSWER: Json = {
    **{"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "fake"},
    "choices": [
        {
            **{"index": 0, "text": "hi", "finish_reason": "stop"},
            "logprobs": {"token_logprobs": [-0.5], "tokens": ["x"], "top_logprobs": [{"x": -0.5}]},
            **{"token_ids": [7], "prompt_token_ids": [1], "weight_versions": [_SPAN]},
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
ERROR: Json = {
    "error": {"message": "m", "type": "BadRequestError", "param": None, "code": 400},
}


def _chunk(choice: Json | None = None, **more: Any) -> Json:
    plain: Json = {"index": 0, "delta": {}}
    choices: list[Json] = [] if choice is None else [plain | choice]
    head: Json = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    return head | {"choices": choices} | more


CHUNKS: list[Json] = [
    _chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2]),
    _chunk(
        {"delta": {"content": "hi", "reasoning": "x"}, "token_ids": [7]}
        | {"logprobs": {"content": [_LOGPROB]}},
        usage={"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1},
    ),
    _chunk({"delta": {"tool_calls": [_CALL | {"index": 0}]}, "finish_reason": None}),
    _chunk({"finish_reason": "tool_calls", "weight_versions": [_SPAN], "stop_reason": None}),
    _chunk(usage={"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}),
]
"""Chunks of one chat stream, in order."""
TEXT_CHUNKS: list[Json] = [
    {"id": "c", "object": "text_completion", "choices": [each], "usage": None}
    for each in (
        {"index": 0, "text": "h", "finish_reason": None, "prompt_token_ids": [1], "token_ids": [7]}
        | {"logprobs": {"token_logprobs": [-0.5]}},
        {"index": 0, "text": "", "finish_reason": "stop", "weight_versions": [_SPAN]},
    )
]
