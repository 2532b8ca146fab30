"""Differences between vLLM's versions in their responses at /v1/responses and /v1/messages."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """Properties of vLLM's responses that differ between vLLM's versions. OLD has the properties of
    the older versions, and NEW those of the newer versions.

    A field describes the Responses format unless the field's docstring begins with "Messages".
    """

    has_prompt_cache_fields: bool
    """Whether the `response` object repeats `prompt_cache_*` and `safety_identifier` of the
    request, and `usage` counts cache writes."""
    marks_incomplete: bool
    """Whether an answer cut off by its token limit ends with `response.incomplete`, and its last
    item has the status incomplete."""
    prefixes_streamed_ids: bool
    """Whether items in a stream have ids with the same prefixes as items in a whole response."""
    reasoning_part: str
    """Prefix of the names of the events before and after the text of a reasoning item."""
    honours_parallel: bool
    """Whether `parallel_tool_calls: false` keeps only the first call. If not, the response merely
    repeats the field."""
    offers_custom_tools: bool
    """Whether a custom tool is offered to the model, in a form of vLLM's own. If not, the response
    merely repeats the tool."""
    resource_has_all_logprobs: bool
    """Whether the text in the `response` object at the end of a stream has the logprobs of all
    tokens. These include tokens of reasoning and calls, and tokens that a parser removed."""
    sends_stop_sequence: bool
    """Messages: whether `message_delta` has `stop_sequence: null`."""
    anthropic_errors: bool
    """Messages: whether an error within a stream has one of Anthropic's types instead of
    `internal_error`."""


OLD = Dialect(
    has_prompt_cache_fields=False,
    marks_incomplete=False,
    prefixes_streamed_ids=False,
    reasoning_part="response.reasoning_part",
    honours_parallel=False,
    offers_custom_tools=False,
    resource_has_all_logprobs=True,
    sends_stop_sequence=False,
    anthropic_errors=False,
)
NEW = Dialect(
    has_prompt_cache_fields=True,
    marks_incomplete=True,
    prefixes_streamed_ids=True,
    reasoning_part="response.content_part",
    honours_parallel=True,
    offers_custom_tools=True,
    resource_has_all_logprobs=False,
    sends_stop_sequence=True,
    anthropic_errors=True,
)
LAST_OLD = (0, 27)
"""Last version whose responses have the old form. Observed: 0.27.1 has the old form, 0.33.0 the new
one. Versions between them are assumed to have the new form."""


def dialect_of(version: str | None) -> Dialect:
    """Return the properties of the responses of an engine with this vLLM version. An unknown
    version is assumed to have the properties NEW.

    >>> dialect_of("0.27.1") is OLD, dialect_of("0.33.0+cpu") is NEW, dialect_of(None) is NEW
    (True, True, True)
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", version or "")
    is_old = numbers is not None and (int(numbers[1]), int(numbers[2])) <= LAST_OLD
    return OLD if is_old else NEW
