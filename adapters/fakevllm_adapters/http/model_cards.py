"""The route GET /v1/models/ID. Its answer is taken from the engine's list of models, because vLLM
has only the route for the list."""

from __future__ import annotations

from typing import Any

import orjson

from fakevllm_adapters.protocol.errors import unknown_model

MODELS_PATH = "/v1/models"
MODEL_CARD_PATHS = (f"{MODELS_PATH}/{{name}}", f"{MODELS_PATH}/{{first}}/{{rest:path}}")
"""Path patterns of the route for one model. An id may contain slashes. There are two patterns,
because one pattern for all ids would also match the path without an id."""


def model_id_of(path: str) -> str:
    """Return the model id in a request's path. The path is already percent-decoded.

    >>> model_id_of("/v1/models/Qwen/Qwen3-0.6B")
    'Qwen/Qwen3-0.6B'
    """
    return path.partition(f"{MODELS_PATH}/")[2]


def card_in(listing: bytes, model_id: str) -> bytes:
    """Return the entry of one model from the body of a response to GET /v1/models.

    Raises WireError (404) if the model is not in the list.
    """
    cards: list[dict[str, Any]] = orjson.loads(listing)["data"]
    for card in cards:
        if card["id"] == model_id:
            return orjson.dumps(card)
    raise unknown_model(model_id, ", ".join(str(card["id"]) for card in cards))
