"""Reconstruct the conversation before a request from the requests and answers in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from fakevllm.hooks.recorded_group import messages_of
from fakevllm.ledger.records import AnsweredRequest
from fakevllm_adapters.formats.base import Adapter, EngineInfo, History, NotTranslated
from fakevllm_adapters.formats.registry import ADAPTERS

Json = dict[str, Any]
FindRequest = Callable[[str], AnsweredRequest | None]
"""A function that takes a response id, and returns the app's request whose answer has this id. It
returns None if there is no such request."""

MAX_HISTORY = 1000
"""Maximum number of earlier answers in a conversation whose requests are linked by the field
`previous_response_id`."""


def prior_exchanges(adapter: Adapter, body: Json, find_request: FindRequest) -> History | None:
    """Return the conversation that the request `body` continues, as a list of pairs (request,
    answer), oldest first. The field `previous_response_id` of each request names the preceding
    answer.

    Return None in three cases:

    * `body` has no field `previous_response_id`.
    * The `previous_response_id` of a request names an answer that this app never got.
    * The conversation has more than MAX_HISTORY answers.
    """
    response_id = body.get("previous_response_id")
    if not adapter.has_previous_response or not isinstance(response_id, str):
        return None
    exchanges: list[tuple[Json, Json]] = []
    while isinstance(response_id, str):
        record = find_request(response_id)
        if record is None or len(exchanges) == MAX_HISTORY:
            return None
        request: Json = orjson.loads(record.request_json)
        exchanges.insert(0, (request, orjson.loads(record.message_json)))
        response_id = request.get("previous_response_id")
    return exchanges


def recorded_chat(route: str, request_json: str, find_request: FindRequest) -> Json | None:
    """Return the body of a recorded request in the format of chat completions, including the
    earlier conversation. Return None if the request is a text completion or cannot be translated.
    """
    opened = _open(route, request_json, find_request)
    if opened is None or opened[0].upstream_path != ADAPTERS["chat"].path:
        return None
    return opened[1]


def recorded_messages(route: str, request_json: str, find_request: FindRequest) -> list[Json]:
    """Return the messages of a recorded request, including the earlier conversation, in the form in
    which the user's hooks get them."""
    opened = _open(route, request_json, find_request)
    return [] if opened is None else messages_of(opened[1])


def recorded_user_texts(route: str, request_json: str, find_request: FindRequest) -> list[str]:
    """Return the texts of the first and the last user message of a recorded request, including the
    earlier conversation. The list is empty if the request cannot be translated to the engine's
    format."""
    opened = _open(route, request_json, find_request)
    if opened is None:
        return []
    adapter, body = opened
    return [adapter.opening(body), adapter.question(body)]


def _open(route: str, request_json: str, find_request: FindRequest) -> tuple[Adapter, Json] | None:
    """Return the adapter (translator) for the API format of a recorded request, and the request's
    body in the engine's format. Return None if the request cannot be translated."""
    body: Json = orjson.loads(request_json)
    adapter = next((adapter for adapter in ADAPTERS.values() if adapter.path == route), None)
    if adapter is None:
        return None
    try:
        exchange = adapter.open(body, EngineInfo(), prior_exchanges(adapter, body, find_request))
    except NotTranslated:
        return None
    return adapter, exchange.body
