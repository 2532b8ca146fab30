"""Find the end of the text that an answer continues. A secret may begin in this text and end in the
answer."""

from __future__ import annotations

from typing import Any, cast

MAX_CHARS = 2**14
"""Number of characters at the end of a prompt that are searched together with the answer."""


def continued_texts(body: Any) -> list[str]:
    """Return the ends of the texts that the answers to a request continue. These texts are the
    prompts of a completion request. In a chat, the text is the last message if its role is
    `assistant`. This function never raises.

    >>> continued_texts({"prompt": "My name is"})
    ['My name is']
    >>> continued_texts({"messages": [{"role": "user", "content": "hi"}]})
    []
    """
    if not isinstance(body, dict):
        return []
    request = cast("dict[str, Any]", body)
    prompt = request.get("prompt")
    prompts = cast("list[Any]", prompt) if isinstance(prompt, list) else [prompt]
    ends = [text[-MAX_CHARS:] for text in prompts if isinstance(text, str)]
    for name in ("messages", "input"):
        messages = request.get(name)
        last: Any = (
            cast("list[Any]", messages)[-1]
            if isinstance(messages, list | tuple) and messages
            else None
        )
        if isinstance(last, dict) and cast("dict[str, Any]", last).get("role") == "assistant":
            text = _content_text(cast("dict[str, Any]", last).get("content"))
            ends += [text[-MAX_CHARS:]] if text else []
    return ends


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = cast("list[Any]", content)
    texts = [cast("dict[str, Any]", part).get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))
