"""Request the log-probabilities of the known prompt from vLLM. The known prompt is a fixed text.
Its log-probabilities show which weights vLLM serves."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fakevllm_server.backends.vllm.control_client import ControlClient
from fakevllm_server.backends.vllm.response import Json, VllmResponse, as_list, as_object
from fakevllm_server.types.backend import ActionFailed
from fakevllm_server.types.known_prompt import KNOWN_PROMPT, MAX_TOKENS, ProbeReply

TIMEOUT_S = 60.0
"""Timeout of each request. The known prompt waits in vLLM's queue like any other request."""
ASSUMED_DTYPE = "bfloat16"
"""The data type in which vLLM is assumed to compute. `known_prompt_reply` puts this type into each
reply. The accepted difference from the trainer's log-probabilities depends on this type. bfloat16
has the largest rounding errors of all types in which an unquantized vLLM computes. vLLM's own type
does not matter, because the trainer may have larger rounding errors."""


async def known_prompt_ids(client: ControlClient, model: str, max_model_len: int) -> list[int]:
    """Return the token ids of the known prompt, a fixed text with which the served weights are
    checked. The ids are cut so that one sampled token fits into the context.

    Raise ActionFailed if vLLM cannot tokenize the known prompt.
    """
    body = {"model": model, "prompt": KNOWN_PROMPT, "add_special_tokens": True}
    response = await client.post("/tokenize", body, TIMEOUT_S)
    ids = [int(token) for token in as_list(_checked(response).json.get("tokens"))]
    return ids[: min(MAX_TOKENS, max_model_len - 1)]


async def known_prompt_reply(
    client: ControlClient, model: str, ids: Sequence[int], num_layers: int
) -> ProbeReply:
    """Return the log-probabilities that vLLM computes for the known prompt at temperature 1. The
    known prompt is a fixed text whose log-probabilities show which weights vLLM serves. `ids` are
    its token ids.

    Raise ActionFailed if vLLM does not report the log-probabilities.
    """
    body: Json = {
        "model": model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 1,
        # vLLM computes a prompt with `prompt_logprobs` anew. The salt makes sure of it: with a salt
        # that was never used, no cached keys and values fit, and so none of earlier weights.
        "cache_salt": secrets.token_hex(16),
    }
    response = await client.post("/v1/completions", body, TIMEOUT_S)
    choices = as_list(_checked(response).json.get("choices"))
    entries = as_list(as_object(choices[0] if choices else None).get("prompt_logprobs"))
    if len(entries) != len(ids):
        raise ActionFailed(f"vLLM reports {len(entries)} prompt_logprobs for {len(ids)} tokens")
    log_probs = [_log_prob(entry, token) for entry, token in zip(entries[1:], ids[1:], strict=True)]
    return ProbeReply(ids, log_probs, ASSUMED_DTYPE, num_layers)


def _log_prob(entry: Any, token: int) -> float:
    value = as_object(as_object(entry).get(str(token))).get("logprob")
    if not isinstance(value, int | float):
        raise ActionFailed(f"vLLM reports no log-probability of token {token} in a prompt")
    return float(value)


def _checked(response: VllmResponse) -> VllmResponse:
    if not response.is_ok:
        raise ActionFailed(f"vLLM did not answer a known prompt: {response.detail}")
    return response
