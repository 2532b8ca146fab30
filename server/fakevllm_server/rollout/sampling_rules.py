"""Decide from a call's sampling parameters whether the call may be trained on.

The trainer computes the probability of a token with a softmax at the call's temperature. The
softmax is over the whole vocabulary, or over a set of tokens that the engine reports. A call must
not be trained on if its tokens were sampled from another distribution. This happens in two cases:

* A parameter changed the proportions between tokens (penalties, logit bias, ...).
* A parameter restricted the vocabulary, and the engine does not report the remaining set (top-p,
  grammars, ...).

The module does no I/O.
"""

from __future__ import annotations

import math
from typing import Any, cast

from fakevllm_server.types.sampling import effective_temperature

Json = dict[str, Any]

_NeutralValues = dict[str, tuple[Any, ...]]
"""Names of request fields, each with the values that leave sampling unchanged. None also leaves
sampling unchanged. A missing field counts as None."""
_TRUNCATING: _NeutralValues = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "structured_outputs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "tool_choice": (None, "none", "auto"),
}
"""Fields that exclude tokens from sampling. The other tokens keep their proportions."""
_DISTORTING: _NeutralValues = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logits_processors": (None, []),
    "thinking_token_budget": (None, -1),
    "use_beam_search": (None, False),
    "watermarking": (None, False),
    "n": (None, 1),
}
"""Fields that change the proportions between tokens, or that make the answer something other than
one plain sample."""


def sampling_temperature(sampling: Json) -> float:
    """Return the temperature with which the engine samples. If the requested temperature is not a
    finite number, return 0: the engine refuses such a request and samples nothing."""
    try:
        temperature = float(sampling.get("temperature", 1.0))
    except (TypeError, ValueError):
        return 0.0
    return effective_temperature(temperature) if math.isfinite(temperature) else 0.0


def untrainable_sampling(sampling: Json, *, reports_allowed: bool = False) -> str | None:
    """Return the reason why calls with these sampling parameters must not be trained on. Return
    None if they may be trained on.

    `sampling` contains the engine's defaults, overridden by the request's parameters that are not
    null. For each sampled token, some engines report the set of tokens that could have been
    sampled. `reports_allowed` is True for such an engine.
    """
    if sampling_temperature(sampling) == 0:
        return "sampling_not_trainable: temperature 0"
    fields = [] if reports_allowed else truncations(sampling)
    fields += _active_fields(sampling, _DISTORTING)
    return f"sampling_not_trainable: {', '.join(fields)}" if fields else None


def truncations(sampling: Json) -> list[str]:
    """Return the names of the parameters in `sampling` that exclude tokens from sampling, such as
    `top_p`."""
    fields = _active_fields(sampling, _TRUNCATING)
    if _object(sampling.get("response_format")).get("type", "text") != "text":
        fields.append("response_format")
    if sampling.get("tool_choice") != "none" and any(map(_is_strict, _list(sampling.get("tools")))):
        fields.append("tools.strict")  # vLLM then constrains the arguments to their schema
    return fields


def _active_fields(sampling: Json, neutral: _NeutralValues) -> list[str]:
    if neutral.keys().isdisjoint(sampling):
        return []
    return [name for name, values in neutral.items() if sampling.get(name) not in values]


def _is_strict(tool: object) -> bool:
    return _object(_object(tool).get("function")).get("strict") is True


def _object(value: object) -> Json:
    """Return `value` if it is a JSON object, else {}. The value comes from a client's request, so
    it may be any JSON value."""
    return cast(Json, value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []
