"""Whether a request samples from what training compares with: the softmax at its temperature, over
the whole vocabulary, or over a part of it that the engine tells. Pure.

A token drawn from a bent distribution has another probability than the trainer computes; so has one
drawn from a part that nobody knows.
"""

from __future__ import annotations

import math
from typing import Any, cast

from fakevllm_server.types.sampling import effective_temperature

Json = dict[str, Any]

_Neutral = dict[str, tuple[Any, ...]]
"""Names of fields, with the values under which they do nothing."""
_CUTS: _Neutral = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "structured_outputs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "tool_choice": (None, "none", "auto"),
}
"""They leave out tokens; what remains keeps its proportions."""
_BENDS: _Neutral = {
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
"""They change proportions, or are no plain sampling at all."""


def temperature_of(sampling: Json) -> float:
    """What the engine samples with; 0 for what it will refuse anyway."""
    try:
        asked = float(sampling.get("temperature", 1.0))
    except (TypeError, ValueError):
        return 0.0
    return effective_temperature(asked) if math.isfinite(asked) else 0.0


def untrainable_sampling(sampling: Json, *, reports_allowed: bool = False) -> str | None:
    """`sampling` is the request over the engine's defaults, without nulls; `reports_allowed`: the
    engine says of each token what it was chosen from."""
    if temperature_of(sampling) == 0:
        return "sampling_not_trainable: temperature 0"
    odd = [] if reports_allowed else truncations(sampling)
    odd += _set(sampling, _BENDS)
    return f"sampling_not_trainable: {', '.join(odd)}" if odd else None


def truncations(sampling: Json) -> list[str]:
    """What leaves tokens out, by the names of the fields."""
    found = _set(sampling, _CUTS)
    if _object(sampling.get("response_format")).get("type", "text") != "text":
        found.append("response_format")
    if sampling.get("tool_choice") != "none" and any(map(_is_strict, _list(sampling.get("tools")))):
        found.append("tools.strict")  # vLLM then holds the arguments to their schema
    return found


def _set(sampling: Json, neutral: _Neutral) -> list[str]:
    return [name for name, values in neutral.items() if sampling.get(name) not in values]


def _is_strict(tool: object) -> bool:
    return _object(_object(tool).get("function")).get("strict") is True


def _object(value: object) -> Json:
    """Requests come as apps send them: where an object should be, anything may stand."""
    return cast(Json, value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []
