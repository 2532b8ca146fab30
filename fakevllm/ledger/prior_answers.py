"""What an app has asked, read again: with what its request stands on, and in the form in which it
went upstream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from fakevllm.hooks.recorded import messages_of
from fakevllm.ledger.records import AnsweredRequest
from fakevllm_adapters.formats.base import Adapter, Earlier, Engine, Untranslated
from fakevllm_adapters.formats.registry import ADAPTERS

Json = dict[str, Any]
Answered = Callable[[str], AnsweredRequest | None]
"""The app's request whose answer is called so."""

LONGEST_HISTORY = 1000
"""Answers a chain of `previous_response_id` may name."""


def earlier_of(adapter: Adapter, body: Json, answered: Answered) -> Earlier | None:
    """The requests and answers a body only names; None where it names none, or one that this app
    never got."""
    name = body.get("previous_response_id")
    if not adapter.names_answers or not isinstance(name, str):
        return None
    earlier: list[tuple[Json, Json]] = []
    while isinstance(name, str):
        found = answered(name)
        if found is None or len(earlier) == LONGEST_HISTORY:
            return None
        asked: Json = orjson.loads(found.request_json)
        earlier.insert(0, (asked, orjson.loads(found.message_json)))
        name = asked.get("previous_response_id")
    return earlier


def messages_asked(route: str, request_json: str, answered: Answered) -> list[Json]:
    """The conversation of a recorded request, as a hook was shown it."""
    body: Json = orjson.loads(request_json)
    adapter = next((adapter for adapter in ADAPTERS.values() if adapter.path == route), None)
    if adapter is None:
        return []
    try:
        exchange = adapter.open(body, Engine(), earlier_of(adapter, body, answered))
    except Untranslated:
        return []
    return messages_of(exchange.body)
