"""The differences that are meant, each with its reason. What stands here must really differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

STATUS = "status: "


@dataclass(frozen=True, slots=True)
class Known:
    what: str
    """What vLLM does, and what we do."""
    why: str
    requests: tuple[str, ...]
    """Names, or patterns of them."""
    differs: tuple[str, ...]
    """Patterns of the lines that tell it. All of these must be there, and none beside them."""
    ways: tuple[str, ...] = ("N=1", "N=4")
    but: tuple[str, ...] = ()
    """Of `requests`, in which nothing differs."""

    def covers(self, name: str, way: str) -> bool:
        is_meant = any(fnmatchcase(name, pattern) for pattern in self.requests)
        is_left_out = any(fnmatchcase(name, pattern) for pattern in self.but)
        return way in self.ways and is_meant and not is_left_out


KNOWN: tuple[Known, ...] = (
    Known(
        "A limit of new tokens beyond the context, or beyond what the prompt leaves of it: vLLM "
        "0.27 says 400 (of Messages 500), here the answer has what there is room for.",
        "Coding agents ask for more than a small model's context holds, and stop at the error.",
        (
            "chat: max_tokens beyond the context*",
            "chat: max_completion_tokens beyond the context",
            "chat: max_tokens that fills the context",
            "chat: prompt that all but fills the context",
            "responses: max_output_tokens beyond the context",
            "messages: max_tokens beyond the context*",
        ),
        ("status: * -> 200",),
    ),
    Known(
        "A request that the engine refuses late, streamed: vLLM 200 and the error as an event (of "
        "Responses it breaks off), here 400 at once.",
        "SDKs retry an error inside a stream without end; one with a status of 4xx they tell.",
        (
            "chat: top_logprobs too many, streaming",
            "completions: logprobs too many, streaming",
            "responses: top_logprobs too many, streaming",
        ),
        ("status: 200 -> 400",),
    ),
    Known(
        "Routes that change the engine, or that only other engines and tools call, and the pages "
        "that describe them: 404.",
        "Behind the server only what apps need can be reached; the engine's own routes would let "
        "any app change weights, or spend tokens past keys and ledger.",
        ("around: guarded *",),
        ("status: * -> 404",),
    ),
    Known(
        "A write from the page of another site (`Origin`): vLLM answers anybody's page, here 403.",
        "Without a key everybody on this machine is served, and a page in the browser is not "
        "everybody.",
        ("chat: foreign origin",),
        ("status: 200 -> 403",),
    ),
    Known(
        "Preflights of browsers: vLLM 0.27 allows every origin, here 400.",
        "As before. Newer vLLMs (0.33) allow no origin either, in the same words.",
        ("around: * preflight", "chat: preflight", "keys: none, preflight"),
        ("status: 200 -> 400",),
    ),
    Known(
        "`access-control-allow-origin: *` to a request with an `Origin`: not sent.",
        "As before.",
        ("around: * with an origin", "around: * with a foreign origin", "chat: origin"),
        ("header access-control-allow-origin: *",),
    ),
    Known(
        "`x-api-key` with the right key: vLLM reads `Authorization` only and says 401, here it is "
        "as good.",
        "Anthropic's SDK and Claude Code send it.",
        ("keys: x-api-key, *",),
        ("status: 401 -> 200",),
    ),
    Known(
        "Without a key, or with a wrong one: vLLM guards what begins with /v1 or /v2, here all but "
        "/health and /ping is 401.",
        "A route that nobody thought of must not be open.",
        tuple(
            f"keys: {key}, {path}"
            for key in ("none", "wrong")
            for path in ("/tokenize", "/detokenize", "/version", "/load", "/bogus")
        ),
        ("status: * -> 401",),
    ),
    Known(
        "Blanks around the key: vLLM 401, here they count for nothing.",
        "A key from a file often ends in one.",
        ("keys: two blanks", "keys: blank after"),
        ("status: 401 -> 200",),
    ),
    Known(
        "`n` above 64 choices in all (siblings times `n`), or JSON nested deeper than 128 levels: "
        "400 in our words, before vLLM would refuse or answer it.",
        "Fan-out multiplies what one request costs; one app must not stop the others.",
        ("chat: n too large", "completions: n too large", "chat: body: deep"),
        ("body.error.message: *", "body.error.param: *"),
    ),
    Known(
        "`kv_transfer_params` of a client's: vLLM samples from the prompt in it, here it is left "
        "away.",
        "It is the engine's own business; its addresses would be reached from the server.",
        ("chat: kv_transfer_params",),
        ("body.choices*", "body.usage*"),
    ),
    Known(
        "`vary: Origin` at a crash of vLLM's own (a body that is JSON, but no object): not sent by "
        "vLLM, here on every answer.",
        "Nothing reads it there.",
        (
            "chat: body: a list",
            "chat: body: a string",
            "chat: body: a number",
            "completions: body: a list",
            "responses: body: a list",
        ),
        ("header vary: (nothing) -> Origin",),
    ),
    Known(
        "Function calls in a streamed response: vLLM's `response.completed` names each call anew "
        "(another `id` and `call_id`, for forced calls other blanks in `arguments`), here it is "
        "the call that was streamed, with the id the engine gave it.",
        "An app that keeps either must find it again; two calls never share an id.",
        (
            "*responses: stream, tools auto, *",
            "*responses: stream, tools required",
            "*responses: stream, tools named",
        ),
        ("grammar of stream*.call_id: *", "grammar of stream*.response.output*"),
    ),
    Known(
        "The type of a 500 in Messages: `internal_error` at vLLM 0.27, here `api_error`.",
        "It is Anthropic's own word.",
        ("messages: json_schema that is none",),
        ("body.error.type: internal_error -> api_error",),
    ),
    Known(
        "`reasoning: null` in the deltas of a stream with `include_reasoning: false`: not there "
        "where the call is captured.",
        "vLLM prints it where it has any parser, which an answer does not tell; no client reads "
        "it.",
        ("chat: stream, include_reasoning false",),
        ("grammar of choice 0*.delta.reasoning: null -> (nothing)",),
        ("N=4",),
    ),
    Known(
        "`output_tokens_details.reasoning_tokens` of Responses: vLLM 0.27 counts what stands "
        "between a mark that opens reasoning and one that closes it, here it is 0.",
        "That vLLM's chat completions do not tell it; those of 0.33 do, and it is told.",
        ("reasoning responses: *",),
        ("*.usage.output_tokens_details.reasoning_tokens: 1 -> 0",),
        but=("*never opened", "*one token", "*: encrypted reasoning*", "*: stream, logprobs*"),
    ),
    Known(
        "A model that reasons though it was told not to (`enable_thinking: false`), as a streamed "
        "response: vLLM leaves the closing mark out of its deltas and tells it in "
        "`response.completed`, here neither has it.",
        "What was streamed and what is told at the end are the same.",
        ("reasoning responses: stream, effort none",),
        ("grammar of stream*.data.response.output*.text: *",),
    ),
    Known(
        "`previous_response_id` of a response that was given before: vLLM keeps none unless its "
        "environment tells it to, here the ledger knows it.",
        "Apps of the Responses API rely on it.",
        ("responses: previous_response_id of an answer",),
        ("status: * -> 200",),
    ),
)


def known(name: str, way: str) -> list[Known]:
    return [entry for entry in KNOWN if entry.covers(name, way)]


def unexplained(lines: Sequence[str], entries: Sequence[Known]) -> list[str]:
    """What of the differences is not meant. Another status has another body, and headers."""
    patterns = tuple(pattern for entry in entries for pattern in entry.differs)
    if any(pattern.startswith(STATUS) for pattern in patterns):
        patterns = (*patterns, "body*", "header *")
    return [line for line in lines if not any(fnmatchcase(line, each) for each in patterns)]


def missing(lines: Sequence[str], entries: Sequence[Known]) -> list[str]:
    """What the table tells and no answer shows."""
    return [
        pattern
        for entry in entries
        for pattern in entry.differs
        if not any(fnmatchcase(line, pattern) for line in lines)
    ]
