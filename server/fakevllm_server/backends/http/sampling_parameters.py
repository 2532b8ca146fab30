"""The sampling parameters of a request. The value of a parameter is taken from the request. If the
request has no value, the engine's default is used. If the engine has no default either, vLLM's
default is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakevllm_adapters.protocol.errors import bad_request, unknown_model
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Sampling, effective_temperature

Json = dict[str, Any]

MAX_LOGIT_BIAS = 100.0
"""Largest absolute logit_bias. Larger values are clamped, as in vLLM."""


def check_model(engine: TokenEngine, name: str | None) -> None:
    """Check the model name of a request. The name must be that of the engine's model, or must be
    absent.

    Raises WireError (404) for another model name.
    """
    if name not in (None, engine.model_name):
        raise unknown_model(name or "", engine.model_name)


def sampling_for_request(request: ChatRequest, defaults: Json, max_tokens: int) -> Sampling:
    """Return the sampling parameters for one choice of a request.

    `defaults` are the engine's values for parameters that the request does not set. Raises
    WireError (400) if the request's min_tokens exceeds `max_tokens`.
    """

    def setting(name: str, neutral: Any) -> Any:
        value = getattr(request, name)
        return defaults.get(name, neutral) if value is None else value

    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )
    allowed = request.allowed_token_ids
    return Sampling(
        temperature=effective_temperature(setting("temperature", 1.0)),
        top_p=setting("top_p", 1.0),
        top_k=max(setting("top_k", 0), 0),
        min_p=setting("min_p", 0.0),
        max_tokens=max_tokens,
        seed=None if request.seed == -1 else request.seed,
        top_logprobs=request.top_logprobs or 0,
        ignore_eos=request.ignore_eos,
        live=bool(request.stream or request.stops),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=setting("repetition_penalty", 1.0),
        logit_bias={
            int(id): min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
            for id, bias in (request.logit_bias or {}).items()
        },
        min_tokens=min_tokens,
        stop_ids=frozenset(request.stop_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        allowed_ids=None if allowed is None else tuple(allowed),
        grammar=request.grammar,
        reports_allowed=request.requests_allowed_tokens,
    )


def sampling_for_choice(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling parameters for choice number `index` of a prompt. As in vLLM, the seed of
    this choice is the request's seed plus `index`."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
