"""Check the capabilities of a vLLM server from its responses. The module `capability_probe` sends
the requests.

vLLM can serve requests even if all checks fail. Training is possible only if all required checks
succeed. The required checks concern the token ids, their logprobs, and the routes that replace the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from fakevllm_server.backends.vllm.command import Install, tool_parser
from fakevllm_server.backends.vllm.response import Json, VllmResponse, as_list, as_object

UPDATE_ROUTES = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache")
NO_SUCH_METHOD = 405
"""HTTP status of a GET request to an existing POST route. For a route that does not exist, the
status is 404."""
MINUS_INFINITY = -9999.0
"""The value that vLLM sends as the logprob minus infinity."""
PROCESSED_RATIO = (0.4, 0.62)
"""Range of a ratio. A ratio within the range shows that logprobs include the temperature. The ratio
is the difference between the logprobs of two tokens at temperature 2, divided by the difference
between the logprobs of the same tokens at temperature 1. The exact ratio is 0.5. The range allows
for the rounding of logits in bfloat16."""
RAW_RATIO = (0.8, 1.25)
"""Range of the ratio that PROCESSED_RATIO describes. A ratio within this range shows that logprobs
ignore the temperature. The exact ratio is 1."""
MIN_GAP = 1e-4
"""Smallest difference between two logprobs at temperature 1 with which the ratio can be
measured."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    is_ok: bool
    finding: str
    fix: str = ""
    """The flag or environment variable to start vLLM with."""
    is_required: bool = field(default=False, kw_only=True)
    """Whether training requires that the check succeeds."""

    def to_json(self) -> dict[str, Any]:
        """Return the result of this check of vLLM as a JSON object for the file engine_probes.json
        in the run directory."""
        return {
            "name": self.name,
            "ok": self.is_ok,
            "found": self.finding,
            "mend": self.fix,
            "is_needed": self.is_required,
        }

    def __str__(self) -> str:
        text = f"{'ok' if self.is_ok else 'NOT OK'}: {self.name}: {self.finding}"
        return text if self.is_ok or not self.fix else f"{text}; start vLLM with {self.fix}"


def training_refusal(results: Sequence[CheckResult]) -> str | None:
    """Return the reason, in one sentence, why the samples of this vLLM cannot be used for training.
    Return None if the samples can be used."""
    failed = [result for result in results if result.is_required and not result.is_ok]
    if not failed:
        return None
    return "vLLM cannot be trained with: " + "; ".join(
        f"{result.finding} (start it with {result.fix})" if result.fix else result.finding
        for result in failed
    )


def check_version(response: VllmResponse) -> CheckResult:
    """Check that vLLM's version is a tested version. `response` is the response to GET /version."""
    version = response.json.get("version")
    if version is None:
        return CheckResult("version", False, f"not reported ({response.detail})")
    if not Install(str(version)).is_known:
        return CheckResult("version", False, f"{version} is untested")
    return CheckResult("version", True, str(version))


def check_model_name(served: str, wanted: str, max_model_len: int) -> CheckResult:
    """Check that vLLM serves the model under the configured name `wanted`."""
    if served == wanted:
        return CheckResult("model", True, f"{served}, {max_model_len} tokens")
    finding = f"it serves no {wanted!r}; apps must use {served!r} ({max_model_len} tokens)"
    return CheckResult("model", False, finding, f"--served-model-name {wanted}")


def check_token_ids(response: VllmResponse) -> CheckResult:
    """Check that a chat completion contains the token ids of the prompt and of the answer.
    `response` is the response to a request with `return_token_ids`."""

    def failed(finding: str) -> CheckResult:
        return CheckResult("token ids", False, finding, "version >=0.24", is_required=True)

    if not response.is_ok:
        return failed(f"a completion with token ids fails ({response.detail})")
    prompt = as_list(response.json.get("prompt_token_ids"))
    usage = as_object(response.json.get("usage"))
    ids = as_list(_choice(response).get("token_ids"))
    if not prompt or not ids:
        return failed("it returns no token ids")
    if len(prompt) != usage.get("prompt_tokens") or len(ids) != usage.get("completion_tokens"):
        return failed(f"its numbers of token ids ({len(prompt)} + {len(ids)}) differ from {usage}")
    finding = f"{len(prompt)} + {len(ids)}, as counted"
    return CheckResult("token ids", True, finding, is_required=True)


def check_logprobs(response: VllmResponse) -> CheckResult:
    """Check that a chat completion has one finite logprob for each sampled token."""

    def failed(finding: str, fix: str = "") -> CheckResult:
        return CheckResult("logprobs", False, finding, fix, is_required=True)

    if not response.is_ok:
        return failed(f"a completion with logprobs fails ({response.detail})", "--max-logprobs 20")
    logprobs = [entry.get("logprob") for entry in _logprobs(response)]
    ids = _choice(response).get("token_ids") or logprobs
    if not logprobs or len(logprobs) != len(ids):
        return failed(f"it returns {len(logprobs)} logprobs for {len(ids)} tokens")
    invalid = [value for value in logprobs if not _is_logprob(value)]
    if invalid:
        return failed(f"it returns {invalid[0]} as the logprob of a sampled token")
    return CheckResult("logprobs", True, f"{len(logprobs)}, one a token", is_required=True)


def check_sampled_distribution(at_one: VllmResponse, at_two: VllmResponse) -> CheckResult:
    """Check that vLLM reports the logprobs of the distribution from which it samples. The logits of
    this distribution are divided by the temperature.

    The arguments are two chat completions for the same prompt, at temperatures 1 and 2. Both
    contain the top logprobs at the first position. The check measures the difference between the
    logprobs of two tokens in each completion. If the logprobs include the temperature, the
    difference at temperature 2 is half of the difference at temperature 1.
    """

    def result(is_ok: bool, finding: str, fix: str = "") -> CheckResult:
        name = "logprobs of the sampled distribution"
        return CheckResult(name, is_ok, finding, fix, is_required=True)

    fix = "--logprobs-mode processed_logprobs"
    first, second = _top_logprobs(at_one), _top_logprobs(at_two)
    shared = sorted(first.keys() & second.keys(), key=lambda token: first[token])
    if len(shared) < 2:
        return result(False, "it returns no top logprobs", "--max-logprobs 20")
    low, high = shared[0], shared[-1]
    gap = first[high] - first[low]
    if gap < MIN_GAP:
        return result(False, "its tokens are so equally likely that the check is not conclusive")
    ratio = (second[high] - second[low]) / gap
    if PROCESSED_RATIO[0] < ratio < PROCESSED_RATIO[1]:
        return result(True, f"gaps at temperature 2 are {ratio:.2f} of those at 1")
    if RAW_RATIO[0] < ratio < RAW_RATIO[1]:
        return result(False, "its logprobs ignore the temperature", fix)
    finding = f"its logprobs at temperature 2 have {ratio:.2f} of the gaps at 1, not half"
    return result(False, finding, fix)


def check_weight_update(responses: Mapping[str, VllmResponse]) -> CheckResult:
    """Check that vLLM has all UPDATE_ROUTES. These are the POST routes that replace the weights.
    `responses` contains the response to a GET request on each route. The status of the response is
    405 if the route exists."""
    name, fix = "weight update", "VLLM_SERVER_DEV_MODE=1 in its environment"
    missing = [route for route, response in responses.items() if response.status != NO_SUCH_METHOD]
    if missing:
        finding = f"its weights cannot be replaced, because it has no {', '.join(missing)}"
        return CheckResult(name, False, finding, fix, is_required=True)
    return CheckResult(name, True, "all routes exist", is_required=True)


def check_tool_calls(response: VllmResponse, chat_template: str | None) -> CheckResult:
    """Check that vLLM supports tool calls. `response` is the response to a chat completion request
    with tools and `tool_choice: auto`."""
    if response.is_ok:
        return CheckResult("tool calls", True, "accepted")
    parser = tool_parser(chat_template) or "NAME"
    fix = f"--enable-auto-tool-choice --tool-call-parser {parser}"
    return CheckResult("tool calls", False, f"refused ({response.detail})", fix)


def check_reasoning(server_info: VllmResponse, chat_template: str | None) -> CheckResult:
    """Check that vLLM uses a reasoning parser if the model's chat template contains `<think>`.
    Without a parser, the reasoning is part of the answer.

    `server_info` is the response to GET /server_info, which names the parser. Only a vLLM in
    development mode has this route. If the response does not contain the configuration, the check
    succeeds.
    """
    name = "reasoning parser"
    config = as_object(server_info.json.get("vllm_config")).get("structured_outputs_config")
    if config is None:
        return CheckResult(name, True, "not reported")
    parser = as_object(config).get("reasoning_parser")
    if parser:
        return CheckResult(name, True, str(parser))
    if "<think>" in (chat_template or ""):
        finding = "none, though the chat template has <think>: reasoning is part of the answer"
        return CheckResult(name, False, finding, "--reasoning-parser NAME")
    return CheckResult(name, True, "none, and the chat template has no <think>")


def _choice(response: VllmResponse) -> Json:
    choices = as_list(response.json.get("choices"))
    return as_object(choices[0]) if choices else {}


def _logprobs(response: VllmResponse) -> list[Json]:
    content = as_object(_choice(response).get("logprobs")).get("content")
    return [as_object(entry) for entry in as_list(content)]


def _is_logprob(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and math.isfinite(value) and MINUS_INFINITY < value <= 0


def _top_logprobs(response: VllmResponse) -> dict[str, float]:
    """Return the top logprobs at the first position of a completion, by token. Tokens with logprob
    -inf are left out."""
    entries = _logprobs(response)
    alternatives = as_list(entries[0].get("top_logprobs")) if entries else []
    by_token = {entry.get("token"): entry.get("logprob") for entry in map(as_object, alternatives)}
    return {str(token): logprob for token, logprob in by_token.items() if _is_logprob(logprob)}
