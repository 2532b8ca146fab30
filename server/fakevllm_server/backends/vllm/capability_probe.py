"""Send probe requests to vLLM after each start, to find out what this vLLM supports.

The requests also warm vLLM up, because the first tokens after a start can take half a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from fakevllm_server.backends.vllm import capability_checks
from fakevllm_server.backends.vllm.capability_checks import UPDATE_ROUTES, CheckResult
from fakevllm_server.backends.vllm.control_client import ControlClient
from fakevllm_server.backends.vllm.response import Json, VllmResponse, as_list, as_object
from fakevllm_server.types.backend import BackendError, BackendRefused

log = logging.getLogger("fakevllm.server")

PROBE_FILE = "engine_probes.json"
"""The file in the run directory with the results of the latest probe."""
COMPLETION_TIMEOUT_S = 300.0
"""Timeout of a completion. It is long because vLLM may compile kernels for the first tokens."""
SERVER_ERROR = 500
"""Lowest HTTP status that counts as a temporary failure. A lower error status shows something about
vLLM's configuration."""
NUM_TOP = 20
"""Number of top logprobs to request, which is vLLM's default limit. The more logprobs are
requested, the larger is the difference between the first and the last of them. A larger difference
makes `check_sampled_distribution` more certain."""
UNTRUNCATED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that sample from the whole distribution, and override generation_config.json."""
TOOL: Json = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that vLLM lists in its response to GET /v1/models."""

    name: str
    max_model_len: int


async def probe(
    client: ControlClient, wanted_name: str, chat_template: str | None
) -> tuple[ServedModel, list[CheckResult]]:
    """Send the probe requests to vLLM. Return the served model and the results of all capability
    checks.

    Raise BackendError if vLLM does not respond, responds with a server error, or lists no model.
    Such a failure may be temporary. Raise BackendRefused if vLLM requires another API key, or if
    the server is not a vLLM.
    """
    model = served_model(await client.get("/v1/models"), wanted_name)
    at_one = await _complete(client, model, max_tokens=8, temperature=1.0)
    at_two = await _complete(client, model, max_tokens=1, temperature=2.0)
    with_tools: Json = {"tools": [TOOL], "tool_choice": "auto"}
    tools = await client.post(
        "/v1/chat/completions", _body(model, max_tokens=1) | with_tools, COMPLETION_TIMEOUT_S
    )
    version = await client.get("/version")
    routes = {route: _settled(await client.get(route), route) for route in UPDATE_ROUTES}
    server_info = await client.get("/server_info?config_format=json")
    return model, [
        capability_checks.check_version(version),
        capability_checks.check_model_name(model.name, wanted_name, model.max_model_len),
        capability_checks.check_token_ids(at_one),
        capability_checks.check_logprobs(at_one),
        capability_checks.check_sampled_distribution(at_one, at_two),
        capability_checks.check_weight_update(routes),
        capability_checks.check_tool_calls(tools, chat_template),
        capability_checks.check_reasoning(server_info, chat_template),
    ]


def served_model(response: VllmResponse, wanted_name: str) -> ServedModel:
    """Return the model named `wanted_name` from vLLM's response to GET /v1/models. Return the first
    model if no model has this name. Raise BackendError if there is no model. Raise BackendRefused
    if vLLM requires another API key, or if the server is not a vLLM."""
    if response.status in (401, 403):
        raise BackendRefused("vLLM wants another key: give it with --rollout-key-file FILE")
    cards = [as_object(card) for card in as_list(response.json.get("data"))]
    if not response.is_ok or not cards:
        raise BackendError(f"vLLM lists no model at /v1/models ({response.detail})")
    card = next((card for card in cards if card.get("id") == wanted_name), cards[0])
    if not card.get("max_model_len"):
        raise BackendRefused(
            f"the server of {card.get('id')} reports no max_model_len, so it is not a vLLM: "
            "correct --rollout-url"
        )
    return ServedModel(str(card.get("id")), int(card["max_model_len"]))


def write_report(results: Sequence[CheckResult], run_dir: Path) -> None:
    """Write the results of all capability checks to the log and to the file `PROBE_FILE` in the run
    directory."""
    for result in results:
        log.log(logging.INFO if result.is_ok else logging.WARNING, "vLLM %s", result)
    entries = [result.to_json() for result in results]
    (run_dir / PROBE_FILE).write_bytes(orjson.dumps(entries, option=orjson.OPT_INDENT_2))


async def _complete(client: ControlClient, model: ServedModel, **sampling: Any) -> VllmResponse:
    """Request a chat completion with token ids and logprobs. Return the response."""
    reports = {
        "logprobs": True,
        "top_logprobs": NUM_TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    body = _body(model, **sampling) | reports
    response = await client.post("/v1/chat/completions", body, COMPLETION_TIMEOUT_S)
    return _settled(response, "the first completion")


def _settled(response: VllmResponse, request: str) -> VllmResponse:
    """Return `response` unchanged. Raise BackendError if there was no response, or if the response
    is a server error (status 500 or above). Such failures may be temporary, so they do not show
    vLLM's capabilities."""
    if response.status == 0:
        raise BackendError(f"vLLM did not respond to {request}: {response.detail}")
    if response.status >= SERVER_ERROR:
        raise BackendError(f"vLLM failed at {request} ({response.detail})")
    return response


def _body(model: ServedModel, **sampling: Any) -> Json:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": model.name, "messages": messages} | UNTRUNCATED | sampling
