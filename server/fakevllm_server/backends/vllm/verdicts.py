"""What a vLLM's answers say of it: one verdict a question. Decides only; `probes.py` asks.

Serving needs none of them to be good. Training needs the ones marked so, for what they tell is
what it reckons with: token ids, their logprobs, and weights that can be changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from fakevllm_server.backends.vllm.answer import Answer, Json, as_list, as_object
from fakevllm_server.backends.vllm.command import Install, tool_parser

UPDATE_ROUTES = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache")
NO_SUCH_METHOD = 405
"""Told to a GET where the route exists; 404 where it does not."""
FLOOR = -9999.0
"""vLLM's word for minus infinity."""
HALF = (0.4, 0.62)
"""Gaps at temperature 2 in those at 1, of processed logprobs; room for logits in bfloat16."""
SAME = (0.8, 1.25)
"""Of raw ones."""
LEAST_GAP = 1e-4
"""Below it the two temperatures cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    ok: bool
    found: str
    mend: str = ""
    """The flag or variable that puts it right."""
    is_needed: bool = field(default=False, kw_only=True)
    """To train."""

    def __str__(self) -> str:
        told = f"{'ok' if self.ok else 'NOT OK'}: {self.name}: {self.found}"
        return told if self.ok or not self.mend else f"{told}; start vLLM with {self.mend}"


def refusal_of(verdicts: Sequence[Verdict]) -> str | None:
    """Why nothing may train on what this vLLM samples, in one sentence, or None."""
    bad = [verdict for verdict in verdicts if verdict.is_needed and not verdict.ok]
    if not bad:
        return None
    return "vLLM cannot be trained with: " + "; ".join(
        f"{verdict.found} (start it with {verdict.mend})" if verdict.mend else verdict.found
        for verdict in bad
    )


def version(answer: Answer) -> Verdict:
    told = answer.json.get("version")
    if told is None:
        return Verdict("version", False, f"not told ({answer.detail})")
    if not Install(str(told)).is_known:
        return Verdict("version", False, f"{told} is untried")
    return Verdict("version", True, str(told))


def model_name(served: str, wanted: str, max_model_len: int) -> Verdict:
    if served == wanted:
        return Verdict("model", True, f"{served}, {max_model_len} tokens")
    found = f"it serves no {wanted!r}; apps must use {served!r} ({max_model_len} tokens)"
    return Verdict("model", False, found, f"--served-model-name {wanted}")


def token_ids(answer: Answer) -> Verdict:
    """Of a chat completion asked with `return_token_ids`."""

    def bad(found: str) -> Verdict:
        return Verdict("token ids", False, found, "a vLLM >=0.24", is_needed=True)

    if not answer.is_ok:
        return bad(f"a completion with token ids fails ({answer.detail})")
    prompt, usage = (
        as_list(answer.json.get("prompt_token_ids")),
        as_object(answer.json.get("usage")),
    )
    ids = as_list(_choice(answer).get("token_ids"))
    if not prompt or not ids:
        return bad("it returns no token ids")
    if len(prompt) != usage.get("prompt_tokens") or len(ids) != usage.get("completion_tokens"):
        return bad(f"its token ids ({len(prompt)} + {len(ids)}) are not those it counts in {usage}")
    return Verdict("token ids", True, f"{len(prompt)} + {len(ids)}, as counted", is_needed=True)


def logprobs(answer: Answer) -> Verdict:
    """Of the same completion: one a token, each a number."""

    def bad(found: str, mend: str = "") -> Verdict:
        return Verdict("logprobs", False, found, mend, is_needed=True)

    if not answer.is_ok:
        return bad(f"a completion with logprobs fails ({answer.detail})", "--max-logprobs 20")
    found = [entry.get("logprob") for entry in _logprobs(answer)]
    ids = _choice(answer).get("token_ids") or found
    if not found or len(found) != len(ids):
        return bad(f"it returns {len(found)} logprobs for {len(ids)} tokens")
    wrong = [value for value in found if not _is_logprob(value)]
    if wrong:
        return bad(f"it returns {wrong[0]} as the logprob of a sampled token")
    return Verdict("logprobs", True, f"{len(found)}, one a token", is_needed=True)


def sampled_distribution(at_one: Answer, at_two: Answer) -> Verdict:
    """Of two completions of the same prompt at temperatures 1 and 2, with their first tokens' top
    logprobs."""
    name, mend = "logprobs of the sampled distribution", "--logprobs-mode processed_logprobs"
    first, second = _top(at_one), _top(at_two)
    shared = sorted(first.keys() & second.keys(), key=lambda token: first[token])
    if len(shared) < 2:
        return Verdict(
            name, False, "it returns no top logprobs", "--max-logprobs 20", is_needed=True
        )
    low, high = shared[0], shared[-1]
    gap = first[high] - first[low]
    if gap < LEAST_GAP:
        return Verdict(name, False, "its tokens are too equally likely to tell", is_needed=True)
    ratio = (second[high] - second[low]) / gap
    if HALF[0] < ratio < HALF[1]:
        found = f"gaps at temperature 2 are {ratio:.2f} of those at 1"
        return Verdict(name, True, found, is_needed=True)
    if SAME[0] < ratio < SAME[1]:
        found = "its logprobs leave the temperature out"
        return Verdict(name, False, found, mend, is_needed=True)
    found = f"its logprobs at temperature 2 have {ratio:.2f} of the gaps at 1, not half"
    return Verdict(name, False, found, mend, is_needed=True)


def weight_update(answers: Mapping[str, Answer]) -> Verdict:
    """Of a GET on each of UPDATE_ROUTES."""
    name, mend = "weight update", "VLLM_SERVER_DEV_MODE=1 in its environment"
    missing = [route for route, answer in answers.items() if answer.status != NO_SUCH_METHOD]
    if missing:
        found = f"its weights cannot be changed, without {', '.join(missing)}"
        return Verdict(name, False, found, mend, is_needed=True)
    return Verdict(name, True, "its routes are there", is_needed=True)


def tool_calls(answer: Answer, chat_template: str | None) -> Verdict:
    """Of a completion with tools and `tool_choice: auto`."""
    if answer.is_ok:
        return Verdict("tool calls", True, "accepted")
    parser = tool_parser(chat_template) or "NAME"
    mend = f"--enable-auto-tool-choice --tool-call-parser {parser}"
    return Verdict("tool calls", False, f"refused ({answer.detail})", mend)


def reasoning(server_info: Answer, chat_template: str | None) -> Verdict:
    """Of /server_info, which only a vLLM in development mode tells."""
    thinks = "<think>" in (chat_template or "")
    config = as_object(server_info.json.get("vllm_config")).get("structured_outputs_config")
    if config is None:
        return Verdict("reasoning parser", True, "not told")
    parser = as_object(config).get("reasoning_parser")
    if parser:
        return Verdict("reasoning parser", True, str(parser))
    if thinks:
        found = "none, though the chat template has <think>: thoughts are part of the answer"
        return Verdict("reasoning parser", False, found, "--reasoning-parser NAME")
    return Verdict("reasoning parser", True, "none, and the chat template has no <think>")


def _choice(answer: Answer) -> Json:
    choices = as_list(answer.json.get("choices"))
    return as_object(choices[0]) if choices else {}


def _logprobs(answer: Answer) -> list[Json]:
    content = as_object(_choice(answer).get("logprobs")).get("content")
    return [as_object(entry) for entry in as_list(content)]


def _is_logprob(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and math.isfinite(value) and FLOOR < value <= 0


def _top(answer: Answer) -> dict[str, float]:
    """The first token's alternatives, named by their ids; what cannot be sampled is left out."""
    entries = _logprobs(answer)
    alternatives = as_list(entries[0].get("top_logprobs")) if entries else []
    told = {entry.get("token"): entry.get("logprob") for entry in map(as_object, alternatives)}
    return {str(token): logprob for token, logprob in told.items() if _is_logprob(logprob)}
