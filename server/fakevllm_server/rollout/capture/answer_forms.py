"""The form of an engine's answers: the names and the order of the fields, and constant values.

If a call has several choices, the engine sends events, and an answer is put together from the
events of each choice. Such an answer must have the form of an engine's answer to a call with one
choice. The form differs between vLLM's versions. Therefore the form is learned from a real answer
to a call with one choice. The forms of the bundled engines are known from the start.

The module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fakevllm_adapters.vllm_compat.chat_response import (
    FINGERPRINT,
    ChatWriter,
    Choice,
    assistant_message,
    usage_counts,
)
from fakevllm_adapters.vllm_compat.completions import CompletionWriter, TextChoice

Json = dict[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CONSTANTS = ("object", "service_tier", "system_fingerprint")
"""Fields whose texts are the same in all answers of an engine."""
REASONING_FIELDS = ("reasoning", "reasoning_content")
"""Names of the field with the reasoning: vLLM's current name, and the name before vLLM 0.16."""
BUNDLED = "+fakevllm"
"""Suffix of the version number of a bundled engine. The modules in `vllm_compat` write the answers
of the bundled engines."""


@dataclass(frozen=True, slots=True)
class WholeForm:
    """The form of an answer that is not a stream: the names and the order of its fields, and the
    values that are the same in all answers of the engine."""

    top: Json
    """The fields of an answer. A field with the same value in all answers of the engine has this
    value. All other fields are None."""
    choice: tuple[str, ...]
    """Names of the fields of a choice."""
    message: Json
    """The message of a chat answer, in which each list is empty and each other field is None. For
    completions, the value is {}."""
    usage: tuple[str, ...]
    """Names of the token counts in the field `usage`."""

    @staticmethod
    def of(answer: Json) -> WholeForm | None:
        """Return the form of `answer`: the names and the order of its fields, and its values that
        are the same in all answers of the engine. `answer` is a parsed answer with one choice.
        Return None if the form cannot be read from this answer, because the answer has tool calls
        or is not from vLLM."""
        match answer:
            case {"choices": [{**choice}], "usage": {**usage}}:
                message: Json = choice.get("message") or {}
            case _:
                return None
        if message.get("tool_calls"):
            return None
        # Nothing else is kept: the next answer may go to another app, and the text of a prompt
        # (`prompt_text`), token ids and timings belong to one answer.
        top = {name: value if name in _CONSTANTS else None for name, value in answer.items()}
        empty: Json = {
            name: [] if isinstance(value, list) else None for name, value in message.items()
        }
        return WholeForm(top, tuple(choice), empty, tuple(usage))


class AnswerForms:
    """The forms of one engine's answers: one form for each API path, such as /v1/chat/completions.
    A form has the names and the order of an answer's fields."""

    def __init__(self, version: str | None = None) -> None:
        """Start with the known forms: those of a bundled engine, or none for any other engine. A
        form has the names and the order of an answer's fields. `version` is the version that the
        engine reports. It shows whether the engine is bundled."""
        self._whole: dict[str, WholeForm] = {}
        self._usage_chunks: dict[str, Json] = {}
        self.parses_reasoning = False
        """Whether any answer of the engine has contained reasoning. vLLM's reasoning parsers read a
        stream differently than a whole answer. If the prompt already ends the reasoning, or if the
        answer is cut off, the same text is reasoning in one of these two forms and content in the
        other form."""
        if version is not None and version.endswith(BUNDLED):
            self._learn_bundled()

    def whole(self, path: str) -> WholeForm | None:
        """Return the form of a whole answer, which is an answer that is not streamed. The form has
        the names and the order of the fields. Return None if the form is not known yet."""
        return self._whole.get(path)

    def usage_chunk(self, path: str) -> Json | None:
        """Return a chunk that shows the form of usage chunks. A usage chunk is the last chunk of a
        stream, and has the token counts. Return None if the form is not known yet."""
        return self._usage_chunks.get(path)

    def learn_whole(self, path: str, answer: Json) -> None:
        """Learn the form of whole (not streamed) answers from `answer`, the engine's answer to a
        call with one choice. The form has the names and the order of an answer's fields."""
        self.parses_reasoning = self.parses_reasoning or _has_reasoning(answer)
        if path not in self._whole and (form := WholeForm.of(answer)) is not None:
            self._whole[path] = form

    def learn_usage_chunk(self, path: str, chunk: Json) -> None:
        """Learn the form of usage chunks (the names and the order of their fields) from `chunk`,
        unless the form is known already. A usage chunk is the last chunk of a stream, and has the
        token counts. `chunk` is from a stream with one choice."""
        # Other objects, such as the timings, belong to one answer.
        form = {
            name: value
            for name, value in chunk.items()
            if name == "usage" or not isinstance(value, dict)
        }
        self._usage_chunks.setdefault(path, form)

    def _learn_bundled(self) -> None:
        usage = usage_counts(0, 0)
        chat = ChatWriter("", 0, "", FINGERPRINT)
        choice = Choice(0, assistant_message(None), "stop")
        self.learn_whole(CHAT, chat.completion([choice], usage, None))
        self.learn_usage_chunk(CHAT, chat.usage_chunk(usage))
        text = CompletionWriter("", 0, "", FINGERPRINT)
        part = TextChoice(0, "", None, "stop", None, None, None, None)
        self.learn_whole(COMPLETIONS, text.completion([part], usage))
        self.learn_usage_chunk(COMPLETIONS, text.usage_chunk(usage))


def _has_reasoning(answer: Json) -> bool:
    choices: list[Json] = answer.get("choices") or []
    return any(has_reasoning(choice.get("message") or {}) for choice in choices)


def has_reasoning(message: Json) -> bool:
    """Return True if a chat message, or the delta of a stream, has the model's reasoning. An empty
    reasoning text counts too, because only a parser for reasoning writes it."""
    return any(message.get(name) is not None for name in REASONING_FIELDS)
