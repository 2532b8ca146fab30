"""The known differences from a bare vLLM, each with its reason.

A test checks that each of them occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

STATUS = "status: "


@dataclass(frozen=True, slots=True)
class KnownDifference:
    """A difference that is intended."""

    subject: str
    """The request, or the part of a response, that differs."""
    at_vllm: str
    """vLLM's behaviour."""
    here: str
    """The behaviour of proxy and server in front of vLLM."""
    why: str
    """The reason for the difference."""
    requests: tuple[str, ...]
    """Names of requests, or patterns of names."""
    differs: tuple[str, ...]
    """Patterns of the lines that describe the difference. Each must occur, and no other line
    may."""
    setups: tuple[str, ...] = ("N=1", "N=4")
    """Setups in which the difference occurs."""
    exceptions: tuple[str, ...] = ()
    """Patterns of those requests in `requests` in which nothing differs."""

    def covers(self, name: str, setup: str) -> bool:
        """Return whether the difference must occur for this request in this setup."""
        is_covered = any(fnmatchcase(name, pattern) for pattern in self.requests)
        is_exception = any(fnmatchcase(name, pattern) for pattern in self.exceptions)
        return setup in self.setups and is_covered and not is_exception


KNOWN: tuple[KnownDifference, ...] = (
    KnownDifference(
        "A limit of new tokens, such as `max_tokens`, that is larger than the context, or larger "
        "than the part of the context that the prompt leaves free.",
        "vLLM 0.27 refuses the request with status 400, in Messages with 500.",
        "The limit is lowered to the free part of the context.",
        "Coding agents request more tokens than the context of a small model holds, and stop at "
        "the error.",
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
    KnownDifference(
        "A streamed request that vLLM refuses only after its checks of the request body.",
        "Status 200, and the error is an event in the stream. In Responses, the stream breaks off "
        "instead.",
        "Status 400, before the stream begins.",
        "SDKs retry endlessly after an error inside a stream. An error with a 4xx status is "
        "reported to the app.",
        (
            "chat: top_logprobs too many, streaming",
            "completions: logprobs too many, streaming",
            "responses: top_logprobs too many, streaming",
        ),
        ("status: 200 -> 400",),
    ),
    KnownDifference(
        "Routes that change the engine, routes that only other engines and tools call, and the "
        "pages that describe these routes.",
        "The routes answer.",
        "Status 404.",
        "Only the routes that apps need can be reached through the server. The engine's other "
        "routes would let any app change weights, or generate tokens without keys and without "
        "the ledger.",
        ("around: guarded *",),
        ("status: * -> 404",),
    ),
    KnownDifference(
        "A write, such as a POST request, from a web page of another site (foreign `Origin`).",
        "The request is answered.",
        "Status 403.",
        "Without keys, every program on this machine is served. A browser is such a program, but "
        "a foreign page in it must not be served unless `proxy.allowed_origins` names the page's "
        "origin.",
        ("chat: foreign origin",),
        ("status: 200 -> 403",),
    ),
    KnownDifference(
        "CORS preflights of browsers.",
        "vLLM 0.27 allows every origin.",
        "Status 400.",
        "Pages of other sites are not served. By default, vLLM 0.33 allows no foreign origin "
        "either, with the same error text.",
        ("around: * preflight", "chat: preflight", "keys: none, preflight"),
        ("status: 200 -> 400",),
    ),
    KnownDifference(
        "`access-control-allow-origin: *` on requests with an `Origin`.",
        "Sent.",
        "Not sent.",
        "Pages of other sites are not served.",
        ("around: * with an origin", "around: * with a foreign origin", "chat: origin"),
        ("header access-control-allow-origin: *",),
    ),
    KnownDifference(
        "`x-api-key` with the right key.",
        "Status 401: vLLM reads only `Authorization`.",
        "Accepted.",
        "Anthropic's SDK and Claude Code send this header.",
        ("keys: x-api-key, *",),
        ("status: 401 -> 200",),
    ),
    KnownDifference(
        "No key, or a wrong one.",
        "Status 401 for paths that begin with /v1 or /v2; other paths are open.",
        "Status 401 for every path except /health and /ping.",
        "A newly added route must not be open by mistake.",
        tuple(
            f"keys: {key}, {path}"
            for key in ("none", "wrong")
            for path in ("/tokenize", "/detokenize", "/version", "/load", "/bogus")
        ),
        ("status: * -> 401",),
    ),
    KnownDifference(
        "White space around the key.",
        "Status 401.",
        "The white space is ignored.",
        "A key that is read from a file often ends with white space.",
        ("keys: two blanks", "keys: blank after"),
        ("status: 401 -> 200",),
    ),
    KnownDifference(
        "More than 64 choices in all (siblings times `n`), or JSON nested deeper than 128 levels.",
        "vLLM answers, or refuses with its own text.",
        "Status 400 with fakevllm's own text, before vLLM sees the request.",
        "Siblings multiply the cost of a request, and nested JSON is costly to parse. One app must "
        "not slow down the other apps.",
        ("chat: n too large", "completions: n too large", "chat: body: deep"),
        ("body.error.message: *", "body.error.param: *"),
    ),
    KnownDifference(
        "`kv_transfer_params` from a client.",
        "vLLM samples from `prompt_token_ids` in the field instead of the messages.",
        "The field is removed.",
        "The field is internal to vLLM. With it, a client could make vLLM connect to addresses of "
        "the client's choice.",
        ("chat: kv_transfer_params",),
        ("body.choices*", "body.usage*"),
    ),
    KnownDifference(
        "`vary: Origin` when vLLM crashes on a body that is valid JSON but not an object.",
        "Not sent.",
        "Sent, as on every response.",
        "No client depends on this header in this case.",
        (
            "chat: body: a list",
            "chat: body: a string",
            "chat: body: a number",
            "completions: body: a list",
            "responses: body: a list",
        ),
        ("header vary: (nothing) -> Origin",),
    ),
    KnownDifference(
        "Function calls in a streamed response of Responses.",
        "`response.completed` repeats each call with another `id` and `call_id` than the stream. "
        "For forced calls, the white space in `arguments` differs as well.",
        "`response.completed` repeats each call with the `id` and `call_id` of the stream.",
        "An app may store the ids of the stream or those of `response.completed`, and must find "
        "the call again in both cases.",
        (
            "*responses: stream, tools auto, *",
            "*responses: stream, tools required",
            "*responses: stream, tools named",
        ),
        ("grammar of stream*.call_id: *", "grammar of stream*.response.output*"),
    ),
    KnownDifference(
        "The error type of status 500 in Messages.",
        "vLLM 0.27 says `internal_error`.",
        "`api_error`.",
        "`api_error` is the type in Anthropic's own API.",
        ("messages: json_schema that is none",),
        ("body.error.type: internal_error -> api_error",),
    ),
    KnownDifference(
        "The URL of an image, audio or video on a host that no `--media-domain` allows.",
        "vLLM fetches the URL. If the model sees no images, vLLM refuses the request without "
        "fetching, in Messages with status 500.",
        "Status 400, and nothing is fetched.",
        "An engine that fetches any URL lets an app reach addresses that only the engine's machine "
        "can reach.",
        ("messages: image url",),
        ("status: 500 -> 400",),
    ),
    KnownDifference(
        "`reasoning: null` in the deltas of a stream with `include_reasoning: false`.",
        "Present whenever vLLM runs any parser.",
        "Absent if the call is captured for training.",
        "To record the tokens for training, fakevllm asks vLLM for the reasoning and removes it "
        "again. Whether vLLM would have sent the empty field depends on its parsers, which "
        "fakevllm does not know. No client reads the field.",
        ("chat: stream, include_reasoning false",),
        ("grammar of choice 0*.delta.reasoning: null -> (nothing)",),
        ("N=4",),
    ),
    KnownDifference(
        "`output_tokens_details.reasoning_tokens` in Responses.",
        "vLLM 0.27 counts the tokens between the marks that open and close the reasoning.",
        "0 with vLLM 0.27.",
        "fakevllm uses chat completions to answer Responses. In chat completions, vLLM 0.27 does "
        "not report this count. vLLM 0.33 reports it, and fakevllm passes it on.",
        ("reasoning responses: *",),
        ("*.usage.output_tokens_details.reasoning_tokens: 1 -> 0",),
        exceptions=(
            "*never opened",
            "*one token",
            "*: encrypted reasoning*",
            "*: stream, logprobs*",
        ),
    ),
    KnownDifference(
        "A streamed response of Responses in which the model reasons although the request has "
        "`enable_thinking: false`.",
        "The deltas omit the closing mark of the reasoning, and `response.completed` contains it.",
        "Neither the deltas nor `response.completed` contains the mark.",
        "The deltas and the final event then contain the same text.",
        ("reasoning responses: stream, effort none",),
        ("grammar of stream*.data.response.output*.text: *",),
    ),
    KnownDifference(
        "`previous_response_id` of an earlier response.",
        "Refused: by default, vLLM stores no responses.",
        "Accepted: fakevllm finds the earlier response in the ledger, the proxy's SQLite file.",
        "Apps that use the Responses API rely on `previous_response_id`.",
        ("responses: previous_response_id of an answer",),
        ("status: * -> 200",),
    ),
    KnownDifference(
        "`GET /v1/responses/ID`, and `POST /v1/responses/ID/cancel`, for the id of an earlier "
        "response.",
        "Status 404: by default, vLLM stores no responses. A vLLM that stores responses sends them "
        "to every key, and forgets them when it stops.",
        "GET returns the response. `cancel` answers 400, as a vLLM that stores responses does for "
        "a complete response. Both answer 404 for a response that another key made, and for a "
        "request with `store: false`.",
        "Apps that use the Responses API rely on these routes. The proxy stores responses in the "
        "ledger. The server, if apps call it directly, stores the latest ones until it stops.",
        ("responses: get an answer", "responses: cancel an answer"),
        ("status: 404 -> *",),
    ),
    KnownDifference(
        "`DELETE /v1/responses/ID`.",
        "Status 405: vLLM has no such route.",
        "Afterwards, neither GET nor `previous_response_id` finds the response. Status 404 for an "
        "unknown id, and for a response that another key made.",
        "The route is part of OpenAI's Responses API.",
        ("responses: delete",),
        ("status: 405 -> 404",),
    ),
    KnownDifference(
        "`GET /v1/models/ID`.",
        "Status 404: vLLM has no such route.",
        "The model's card from `GET /v1/models`. The aliases of the proxy have cards, too.",
        "The route is part of OpenAI's API. Some apps check their model with it.",
        ("around: a model's card",),
        ("status: 404 -> 200",),
    ),
    KnownDifference(
        "`GET /v1/models/ID` for a model that is not served.",
        "Status 404 with the body of an unknown path.",
        "Status 404 with vLLM's error for an unknown model.",
        "The error names the models that are served.",
        ("around: an unknown model's card",),
        ("body*",),
    ),
)


def known(name: str, setup: str) -> list[KnownDifference]:
    """Return the known differences of a request in a setup."""
    return [entry for entry in KNOWN if entry.covers(name, setup)]


def unexplained(lines: Sequence[str], entries: Sequence[KnownDifference]) -> list[str]:
    """Return the lines that no entry explains.

    An entry with another status also explains differences of body and headers.
    """
    patterns = tuple(pattern for entry in entries for pattern in entry.differs)
    if any(pattern.startswith(STATUS) for pattern in patterns):
        patterns = (*patterns, "body*", "header *")
    return [line for line in lines if not any(fnmatchcase(line, each) for each in patterns)]


def missing(lines: Sequence[str], entries: Sequence[KnownDifference]) -> list[str]:
    """Return the patterns of the entries that no line matches."""
    return [
        pattern
        for entry in entries
        for pattern in entry.differs
        if not any(fnmatchcase(line, pattern) for line in lines)
    ]
