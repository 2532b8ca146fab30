"""Whether a request samples from what training compares with: the whole softmax at its
temperature. Pure.

A token drawn from a cut or bent distribution has another probability than the trainer computes.
"""

from __future__ import annotations

import math
from typing import Any, cast

from fakevllm_server.backends.sampling import used_temperature

Json = dict[str, Any]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "structured_outputs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "min_tokens": (None, 0),
    "thinking_token_budget": (None, -1),
    "use_beam_search": (None, False),
    "watermarking": (None, False),
    "n": (None, 1),
    "tool_choice": (None, "none", "auto"),
}
"""Values under which every token comes from the whole softmax."""


def temperature_of(sampling: Json) -> float:
    """What the engine samples with; 0 for what it will refuse anyway."""
    try:
        asked = float(sampling.get("temperature", 1.0))
    except (TypeError, ValueError):
        return 0.0
    return used_temperature(asked) if math.isfinite(asked) else 0.0


def why_not_trainable(sampling: Json) -> str | None:
    """`sampling` is the request over the engine's defaults, without nulls."""
    if temperature_of(sampling) == 0:
        return "sampling_not_trainable: temperature 0"
    odd = [name for name, neutral in _NEUTRAL.items() if sampling.get(name) not in neutral]
    if _object(sampling.get("response_format")).get("type", "text") != "text":
        odd.append("response_format")
    if sampling.get("tool_choice") != "none" and any(map(_is_strict, _list(sampling.get("tools")))):
        odd.append("tools.strict")  # vLLM then holds the arguments to their schema
    return f"sampling_not_trainable: {', '.join(odd)}" if odd else None


def _is_strict(tool: object) -> bool:
    return _object(_object(tool).get("function")).get("strict") is True


def _object(value: object) -> Json:
    """Requests come as apps send them: where an object should be, anything may stand."""
    return cast(Json, value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []
