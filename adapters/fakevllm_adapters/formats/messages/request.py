"""Requests of /v1/messages, translated to chat completions by the same rules as in vLLM.

Oddities of vLLM's translation are kept, because the model must read the same tokens as with vLLM's
own translation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from fakevllm_adapters.formats.base import Json, NotTranslated
from fakevllm_adapters.formats.messages.schema import (
    AnthropicContentBlock,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CountBody,
    MessagesBody,
)

_BILLING_HEADER = "x-anthropic-billing-header"
"""Start of a text block that Claude Code adds to each request, with a new hash each time. Such a
block is left out of the prompt."""


def chat_body(request: MessagesBody) -> Json:
    """Translate a Messages request to a chat completions request.

    Raises NotTranslated if no exact translation exists.

    `metadata`, `kv_transfer_params` and `ec_transfer_params` are left out. vLLM ignores `metadata`.
    The two transfer parameters are left out for safety. With these parameters, an app could make
    the engine exchange data with any server that the app chooses.
    """
    body: Json = {
        "model": request.model,
        "messages": _messages(request),
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "cache_salt": request.cache_salt,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    body = {name: value for name, value in body.items() if value is not None}
    if request.stream:
        body["stream"] = True
        # The first chunk must have the prompt's length, because message_start carries it.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body | _output(request) | _tools(request.tools, request.tool_choice)


def tokenize_body(request: CountBody) -> Json:
    """Translate a count_tokens request to a request for the engine's route /tokenize.

    Raises NotTranslated if no exact translation exists.
    """
    body: Json = {"model": request.model, "messages": _messages(request)}
    if request.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = request.chat_template_kwargs
    if request.tools:
        body["tools"] = [_function(tool) for tool in request.tools]
    return body


def _output(request: MessagesBody) -> Json:
    config = request.output_config
    output: Json = {}
    if config and config.format and config.format.json_schema:
        schema = {"name": config.format.type, "schema": config.format.json_schema}
        output["response_format"] = {"type": config.format.type, "json_schema": schema}
    if config and config.effort is not None:
        output["reasoning_effort"] = config.effort
    return output


def _tools(tools: Sequence[AnthropicTool] | None, choice: AnthropicToolChoice | None) -> Json:
    """Return the chat request's fields `tools` and `tool_choice`, or {} if there are no tools.

    vLLM's chat route refuses an empty list of tools, and a tool choice without tools. vLLM's
    Messages route accepts both. Raises NotTranslated if the request requires a tool call but offers
    no tools.
    """
    if not tools:
        if choice and choice.type in ("any", "tool"):
            raise NotTranslated("a tool is required, and none is offered")
        return {}
    return {"tool_choice": _choice(choice), "tools": [_function(tool) for tool in tools]}


def _choice(choice: AnthropicToolChoice | None) -> str | Json:
    if choice is None:
        return "auto"
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _function(tool: AnthropicTool) -> Json:
    """Translate a tool to a function of the chat format.

    A missing description becomes null, which vLLM passes to the chat template.
    """
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


def _messages(request: MessagesBody | CountBody) -> list[Json]:
    """Translate the system prompt and the messages of a request to chat messages.

    All system text goes into one system message at the start, because most chat templates require
    this.
    """
    system = "".join(_system_texts(request))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    try:
        for message in request.messages:
            if message.role != "system":
                messages += _chat_messages(message)
    except RecursionError:
        raise NotTranslated("a content block is nested too deep") from None
    return messages


def _system_texts(request: MessagesBody | CountBody) -> Iterator[str]:
    if isinstance(request.system, str):
        yield request.system
    else:
        yield from _texts(request.system or [])
    for message in request.messages:
        if message.role != "system":
            continue
        if isinstance(message.content, list):
            yield from _texts(message.content)
        elif not message.content.startswith(_BILLING_HEADER):
            yield message.content


def _texts(blocks: Sequence[AnthropicContentBlock]) -> Iterator[str]:
    for block in blocks:
        if block.type == "text" and block.text and not block.text.startswith(_BILLING_HEADER):
            yield block.text


def _chat_messages(source: AnthropicMessage) -> list[Json]:
    """Translate one message of a Messages request to a list of chat messages.

    Each tool result in a user message becomes a separate chat message. These messages come first in
    the list.
    """
    if isinstance(source.content, str):
        return [{"role": source.role, "content": source.content}]
    message: Json = {"role": source.role}
    answers: list[Json] = []
    parts: list[Json] = []
    for block in source.content:
        if block.type == "tool_result" and source.role == "user":
            answers += _tool_answer(block)
        else:
            parts += _parts(block)
    thoughts = [
        block.thinking
        for block in source.content
        if block.type == "thinking" and block.thinking is not None
    ]
    calls = [block for block in source.content if block.type == "tool_use"]
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(block, index) for index, block in enumerate(calls)]
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if is_text else parts
    is_empty = source.role == "user" and not parts
    return answers if is_empty else [*answers, message]


def _parts(block: AnthropicContentBlock) -> list[Json]:
    if block.type == "text" and block.text:
        return [{"type": "text", "text": block.text}]
    if block.type == "image" and block.source:
        return [_image(_url(block.source))]
    if block.type == "tool_result":
        result = str(block.content) if block.content else ""
        return [{"type": "text", "text": f"Tool result: {result}"}]
    return []


def _call(block: AnthropicContentBlock, index: int) -> Json:
    arguments = json.dumps(block.input or {})
    function = {"name": block.name or "", "arguments": arguments}
    return {"id": block.id or f"call_{index}", "type": "function", "function": function}


def _tool_answer(block: AnthropicContentBlock) -> list[Json]:
    """Translate a tool result to chat messages. The first message is a tool message with the text
    of the result.

    Images of the result follow in a user message, because a tool message cannot hold images. Tool
    references of the result follow in a second tool message.
    """
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
        raise NotTranslated("a text of a tool's result is no string")
    return "\n".join(texts)


def _references(items: Sequence[Json]) -> Iterator[Json]:
    for item in items:
        name = item.get("tool_name") or item.get("name")
        if item.get("type") == "tool_reference" and name:
            yield {"type": "tool_reference", "name": name}


def _url(source: Any) -> Any:
    if not isinstance(source, dict):
        raise NotTranslated("the source of an image is no object")
    image = cast(Json, source)
    if image.get("type") == "url":
        return image.get("url", "")
    return f"data:{image.get('media_type', 'image/jpeg')};base64,{image.get('data', '')}"


def _image(url: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}
