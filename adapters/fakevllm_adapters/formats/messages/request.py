"""/v1/messages asked as chat completions, by the rules of vLLM's own translation.

Its oddities are kept, for they decide which tokens the model reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from fakevllm_adapters.formats.base import Json, Untranslated
from fakevllm_adapters.formats.messages.schema import (
    AnthropicContentBlock,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CountBody,
    MessagesBody,
)

_BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a block of Claude Code's that holds another hash in each request: no prompt text."""


def chat_body(asked: MessagesBody) -> Json:
    """`metadata`, `kv_transfer_params` and `ec_transfer_params` stay behind: vLLM ignores the
    first, and the others would let an app steer what the engine reads and to whom it sends.
    Raises Untranslated."""
    body: Json = {
        "model": asked.model,
        "messages": _messages(asked),
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "cache_salt": asked.cache_salt,
        "chat_template_kwargs": asked.chat_template_kwargs,
    }
    body = {name: value for name, value in body.items() if value is not None}
    if asked.stream:
        body["stream"] = True
        # The first chunk must tell the prompt's length: message_start carries it.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body | _output(asked) | _tools(asked.tools, asked.tool_choice)


def tokenize_body(asked: CountBody) -> Json:
    """Raises Untranslated."""
    body: Json = {"model": asked.model, "messages": _messages(asked)}
    if asked.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = asked.chat_template_kwargs
    if asked.tools:
        body["tools"] = [_function(tool) for tool in asked.tools]
    return body


def _output(asked: MessagesBody) -> Json:
    config = asked.output_config
    output: Json = {}
    if config and config.format and config.format.json_schema:
        schema = {"name": config.format.type, "schema": config.format.json_schema}
        output["response_format"] = {"type": config.format.type, "json_schema": schema}
    if config and config.effort is not None:
        output["reasoning_effort"] = config.effort
    return output


def _tools(tools: Sequence[AnthropicTool] | None, choice: AnthropicToolChoice | None) -> Json:
    """vLLM's translation does not pass through the checks of its chat route, which refuses an
    empty list and a choice without tools."""
    if not tools:
        if choice and choice.type in ("any", "tool"):
            raise Untranslated("a tool is required, and none is offered")
        return {}
    return {"tool_choice": _choice(choice), "tools": [_function(tool) for tool in tools]}


def _choice(choice: AnthropicToolChoice | None) -> str | Json:
    if choice is None:
        return "auto"
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _function(tool: AnthropicTool) -> Json:
    """A missing description is told as null, as templates that print the tool get it from vLLM."""
    schema = tool.input_schema
    function: Json = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema if "type" in schema else schema | {"type": "object"},
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    if tool.defer_loading is not None:
        function["defer_loading"] = tool.defer_loading
    return {"type": "function", "function": function}


def _messages(asked: MessagesBody | CountBody) -> list[Json]:
    """All system text comes first, wherever it stood: most templates take no other place."""
    system = "".join(_system_texts(asked))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    try:
        for turn in asked.messages:
            if turn.role != "system":
                messages += _turn(turn)
    except RecursionError:
        raise Untranslated("a content block is nested too deep") from None
    return messages


def _system_texts(asked: MessagesBody | CountBody) -> Iterator[str]:
    if isinstance(asked.system, str):
        yield asked.system
    else:
        yield from _texts(asked.system or [])
    for turn in asked.messages:
        if turn.role != "system":
            continue
        if isinstance(turn.content, list):
            yield from _texts(turn.content)
        elif not turn.content.startswith(_BILLING_HEADER):
            yield turn.content


def _texts(blocks: Sequence[AnthropicContentBlock]) -> Iterator[str]:
    for block in blocks:
        if block.type == "text" and block.text and not block.text.startswith(_BILLING_HEADER):
            yield block.text


def _turn(turn: AnthropicMessage) -> list[Json]:
    """The tools' answers in it come before it, each a message of its own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    message: Json = {"role": turn.role}
    answers: list[Json] = []
    parts: list[Json] = []
    for block in turn.content:
        if block.type == "tool_result" and turn.role == "user":
            answers += _tool_answer(block)
        else:
            parts += _parts(block)
    thoughts = [
        block.thinking
        for block in turn.content
        if block.type == "thinking" and block.thinking is not None
    ]
    calls = [block for block in turn.content if block.type == "tool_use"]
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(block, index) for index, block in enumerate(calls)]
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if is_text else parts
    is_empty = turn.role == "user" and not parts
    return answers if is_empty else [*answers, message]


def _parts(block: AnthropicContentBlock) -> list[Json]:
    if block.type == "text" and block.text:
        return [{"type": "text", "text": block.text}]
    if block.type == "image" and block.source:
        return [_image(_url(block.source))]
    if block.type == "tool_result":
        shown = str(block.content) if block.content else ""
        return [{"type": "text", "text": f"Tool result: {shown}"}]
    return []


def _call(block: AnthropicContentBlock, index: int) -> Json:
    arguments = json.dumps(block.input or {})
    function = {"name": block.name or "", "arguments": arguments}
    return {"id": block.id or f"call_{index}", "type": "function", "function": function}


def _tool_answer(block: AnthropicContentBlock) -> list[Json]:
    """Pictures follow as a user's message: a tool's holds text only."""
    items: list[Json] = block.content if isinstance(block.content, list) else []
    text = block.content if isinstance(block.content, str) else _joined(items)
    answer: Json = {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text or ""}
    messages = [answer]
    urls = [_url(item.get("source", {})) for item in items if item.get("type") == "image"]
    if any(urls):
        messages.append({"role": "user", "content": [_image(url) for url in urls if url]})
    references = list(_references(items))
    if references:
        messages.append(answer | {"content": references})
    return messages


def _joined(items: Sequence[Json]) -> str:
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise Untranslated("a text of a tool's result is no string")
    return "\n".join(texts)


def _references(items: Sequence[Json]) -> Iterator[Json]:
    for item in items:
        name = item.get("tool_name") or item.get("name")
        if item.get("type") == "tool_reference" and name:
            yield {"type": "tool_reference", "name": name}


def _url(source: Any) -> Any:
    if not isinstance(source, dict):
        raise Untranslated("the source of an image is no object")
    told = cast(Json, source)
    if told.get("type") == "url":
        return told.get("url", "")
    return f"data:{told.get('media_type', 'image/jpeg')};base64,{told.get('data', '')}"


def _image(url: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}
