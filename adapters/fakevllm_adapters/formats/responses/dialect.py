"""How vLLM's versions differ in what they answer at /v1/responses and /v1/messages."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of writing the same answers. Of Responses, where a line does not say Messages."""

    has_prompt_cache_fields: bool
    """The resource repeats `prompt_cache_*` and `safety_identifier`, usage counts cache writes."""
    tells_cut: bool
    """An answer cut by its limit ends in `response.incomplete`, its last item incomplete too."""
    names_streamed_ids: bool
    """Streamed items have the ids' prefixes as others have."""
    reasoning_part: str
    """The events around the text of a reasoning item."""
    honours_parallel: bool
    """`parallel_tool_calls: false` keeps the first call only; else it is merely repeated."""
    calls_custom_tools: bool
    """A custom tool is offered to the model, in a way of vLLM's own; else it is merely repeated."""
    tells_all_logprobs: bool
    """The resource that closes a stream has, with its text, the logprobs of all tokens: of
    reasoning and calls too, and of those a parser took out."""
    tells_stop_sequence: bool
    """Messages: `message_delta` carries `stop_sequence: null`."""
    anthropic_errors: bool
    """Messages: an error within a stream has one of Anthropic's types, not `internal_error`."""


OLD = Dialect(
    has_prompt_cache_fields=False,
    tells_cut=False,
    names_streamed_ids=False,
    reasoning_part="response.reasoning_part",
    honours_parallel=False,
    calls_custom_tools=False,
    tells_all_logprobs=True,
    tells_stop_sequence=False,
    anthropic_errors=False,
)
NEW = Dialect(
    has_prompt_cache_fields=True,
    tells_cut=True,
    names_streamed_ids=True,
    reasoning_part="response.content_part",
    honours_parallel=True,
    calls_custom_tools=True,
    tells_all_logprobs=False,
    tells_stop_sequence=True,
    anthropic_errors=True,
)
LAST_OLD = (0, 27)
"""Observed: 0.27.1 is old, 0.33.0 new. What lies between is taken as new."""


def dialect_of(version: str | None) -> Dialect:
    """
    >>> dialect_of("0.27.1") is OLD, dialect_of("0.33.0+cpu") is NEW, dialect_of(None) is NEW
    (True, True, True)
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", version or "")
    is_old = numbers is not None and (int(numbers[1]), int(numbers[2])) <= LAST_OLD
    return OLD if is_old else NEW
