"""The adapter of /v1/completions. The adapter builds the requests for siblings (several answers to
one request), and parses answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from fakevllm_adapters.formats.base import Answer, Json
from fakevllm_adapters.formats.chat import ChatAdapter, build_answer, default_finish_reason
from fakevllm_adapters.formats.sse import parse_event

PATH = "/v1/completions"


class CompletionsAdapter(ChatAdapter):
    """The translator between an app's request to /v1/completions and requests to the engine. The
    sampling fields are the same as in chat completions."""

    name = "completions"
    path = PATH
    upstream_path = PATH

    def question(self, body: Json) -> str:
        return _prompt_text(body)

    def opening(self, body: Json) -> str:
        return _prompt_text(body)

    def parse_answer(self, body: Json) -> Answer:
        choice = next(_firsts(body), None)
        if choice is None:
            raise ValueError("the answer has no choices")
        message = {"role": "assistant", "content": _text(choice)}
        return build_answer(message, choice.get("finish_reason"), body.get("usage"), body)

    def parse_stream(self, events: Sequence[bytes]) -> Answer:
        text = ""
        finish_reason: str | None = None
        usage: Json = {}
        has_choice = False
        first: Json = {}
        for chunk in filter(None, map(parse_event, events)):
            if "error" in chunk:
                raise ValueError(f"the stream ended in an error: {chunk['error']}")
            first = first if first.get("id") else chunk
            usage = chunk.get("usage") or usage
            for choice in _firsts(chunk):
                has_choice = True
                text += _text(choice)
                finish_reason = choice.get("finish_reason") or finish_reason
        finish_reason = finish_reason or default_finish_reason(events, has_choice)
        return build_answer({"role": "assistant", "content": text}, finish_reason, usage, first)


def _firsts(body: Json) -> Iterator[Json]:
    """Yield the choices whose index is 0 in a response or in a chunk."""
    choices = body.get("choices")
    if not isinstance(choices, list):
        return
    for choice in cast(list[Any], choices):
        if isinstance(choice, dict) and cast(Json, choice).get("index", 0) == 0:
            yield cast(Json, choice)


def _text(choice: Json) -> str:
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _prompt_text(body: Json) -> str:
    """Return the text of the first prompt, or "" if the prompt consists of token ids."""
    prompt: object = body.get("prompt")
    if isinstance(prompt, list) and prompt:
        prompt = cast(list[object], prompt)[0]
    return prompt if isinstance(prompt, str) else ""
