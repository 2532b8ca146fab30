"""Train this request or only serve it? Pure."""

from __future__ import annotations

from typing import Any, cast

Json = dict[str, Any]


_NOT_A_SAMPLE = ("echo", "suffix", "use_beam_search", "prompt_logprobs")


def why_only_served(body: Json, num_siblings: int) -> str | None:
    """The reason a request is served once and not trained, as the ledger shows it; None where it
    is fanned out."""
    if num_siblings < 2:
        return "one_sibling"
    if not _asks_one(body):
        return "several_prompts" if body.get("prompt") else "invalid_request"
    if body.get("temperature") == 0:
        return "greedy_request"
    if body.get("n") not in (None, 1):
        return "several_choices_asked"
    if any(body.get(name) for name in _NOT_A_SAMPLE) or body.get("prompt_logprobs") == 0:
        return "not_a_sample"
    if _limit(body) is not None and _limit(body) in (0, 1):
        return "at_most_one_token"
    return None


def _asks_one(body: Json) -> bool:
    """One conversation, or one prompt as text or token ids."""
    messages: object = body.get("messages")
    prompt: object = body.get("prompt")
    if isinstance(messages, list):
        return messages != []
    if isinstance(prompt, list):
        ids = cast(list[object], prompt)
        return ids != [] and all(isinstance(id, int) for id in ids)
    return isinstance(prompt, str) and bool(prompt)


def _limit(body: Json) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens")
