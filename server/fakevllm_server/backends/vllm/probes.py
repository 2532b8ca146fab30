"""Questions to a vLLM that has just come up. They warm it up as well: the first tokens after a cold
start can take half a minute."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from fakevllm_server.backends.vllm import verdicts
from fakevllm_server.backends.vllm.answer import Answer, Json, as_list, as_object
from fakevllm_server.backends.vllm.control import Control
from fakevllm_server.backends.vllm.verdicts import UPDATE_ROUTES, Verdict
from fakevllm_server.types.backend import BackendError, BackendRefused

log = logging.getLogger("fakevllm.server")

PROBE_FILE = "engine_probes.json"
"""In the run directory: what the last start found."""
FIRST_TIMEOUT_S = 300.0
"""Kernels may be compiled for the first tokens."""
SERVER_FAILED = 500
"""From here on an answer tells of the moment, not of how vLLM was started."""
NUM_TOP = 20
"""vLLM's own limit by default; the farther apart two logprobs, the surer the verdict."""
UNCUT = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""The whole distribution, whatever generation_config.json says."""
TOOL: Json = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Served:
    """One entry of /v1/models."""

    name: str
    max_model_len: int


async def probe(
    control: Control, wanted_name: str, chat_template: str | None
) -> tuple[Served, list[Verdict]]:
    """Raises BackendError where vLLM does not answer or fails: another try may go well.
    BackendRefused where it wants a key."""
    model = served(await control.get("/v1/models"), wanted_name)
    at_one = await _complete(control, model, max_tokens=8, temperature=1.0)
    at_two = await _complete(control, model, max_tokens=1, temperature=2.0)
    with_tools: Json = {"tools": [TOOL], "tool_choice": "auto"}
    tools = await control.post(
        "/v1/chat/completions", _body(model, max_tokens=1) | with_tools, FIRST_TIMEOUT_S
    )
    return model, [
        verdicts.version(await control.get("/version")),
        verdicts.model_name(model.name, wanted_name, model.max_model_len),
        verdicts.token_ids(at_one),
        verdicts.logprobs(at_one),
        verdicts.sampled_distribution(at_one, at_two),
        verdicts.weight_update(
            {route: _told(await control.get(route), route) for route in UPDATE_ROUTES}
        ),
        verdicts.tool_calls(tools, chat_template),
        verdicts.reasoning(await control.get("/server_info?config_format=json"), chat_template),
    ]


def served(answer: Answer, wanted_name: str) -> Served:
    """The model of that name, or the first."""
    if answer.status in (401, 403):
        raise BackendRefused("vLLM wants another key: give it with --rollout-key-file FILE")
    cards = [as_object(card) for card in as_list(answer.json.get("data"))]
    if not answer.is_ok or not cards:
        raise BackendError(f"vLLM names no model at /v1/models ({answer.detail})")
    card = next((card for card in cards if card.get("id") == wanted_name), cards[0])
    if not card.get("max_model_len"):
        raise BackendRefused(f"what serves {card.get('id')} names no max_model_len: it is no vLLM")
    return Served(str(card.get("id")), int(card["max_model_len"]))


def report(found: Sequence[Verdict], run_dir: Path) -> None:
    for verdict in found:
        log.log(logging.INFO if verdict.ok else logging.WARNING, "vLLM %s", verdict)
    listed = [asdict(verdict) for verdict in found]
    (run_dir / PROBE_FILE).write_bytes(orjson.dumps(listed, option=orjson.OPT_INDENT_2))


async def _complete(control: Control, model: Served, **sampling: Any) -> Answer:
    asked = {
        "logprobs": True,
        "top_logprobs": NUM_TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    body = _body(model, **sampling) | asked
    answer = await control.post("/v1/chat/completions", body, FIRST_TIMEOUT_S)
    return _told(answer, "the first completion")


def _told(answer: Answer, asked: str) -> Answer:
    """An answer that holds for every start of this vLLM. Raises BackendError for any other."""
    if answer.status == 0:
        raise BackendError(f"vLLM did not answer {asked}: {answer.detail}")
    if answer.status >= SERVER_FAILED:
        raise BackendError(f"vLLM failed at {asked} ({answer.detail})")
    return answer


def _body(model: Served, **sampling: Any) -> Json:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": model.name, "messages": messages} | UNCUT | sampling
