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
    """Patterns of the lines that describe the difference. Each pattern must match a line, and each
    line must match a pattern."""
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
        "A limit of new tokens, such as `max_tokens`, that is larger than the free part of the "
        "context. The free part is the context without the prompt.",
        "vLLM 0.27 answers 400. In the Messages format, it answers 500.",
        "fakevllm lowers the limit to the free part of the context, and the request succeeds.",
        "Coding agents request more tokens than the context of a small model holds. They stop at "
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
        "A streamed request with an error that vLLM notices late, such as too many `logprobs`.",
        "Status 200. The error is an event in the stream. In the Responses format, the stream "
        "breaks off without an error event.",
        "Status 400. The stream does not begin.",
        "SDKs retry endlessly after an error inside a stream. They report a 4xx status to the app.",
        (
            "chat: top_logprobs too many, streaming",
            "completions: logprobs too many, streaming",
            "responses: top_logprobs too many, streaming",
        ),
        ("status: 200 -> 400",),
    ),
    KnownDifference(
        "Routes of vLLM that apps do not need. They control the engine, serve other engines or "
        "tools, or document the API (`/docs`).",
        "The routes answer.",
        "Status 404.",
        "Through these routes, any app could change weights. It could also generate tokens "
        "without a key and without a record.",
        ("around: guarded *",),
        ("status: * -> 404",),
    ),
    KnownDifference(
        "A POST or another writing request from a web page of another site (foreign `Origin`).",
        "vLLM answers the request.",
        "Status 403, unless `proxy.allowed_origins` names the page's origin.",
        "Without API keys, the proxy serves every program on its machine. The browser is one of "
        "these programs. A web page that you happen to open must not use the model through it.",
        ("chat: foreign origin",),
        ("status: 200 -> 403",),
    ),
    KnownDifference(
        "CORS preflights: the `OPTIONS` request with which a browser asks for permission.",
        "vLLM 0.27 allows every origin.",
        "Status 400.",
        "fakevllm does not serve pages of other sites. vLLM 0.33 refuses preflights by default, "
        "too, with the same error text.",
        ("around: * preflight", "chat: preflight", "keys: none, preflight"),
        ("status: 200 -> 400",),
    ),
    KnownDifference(
        "The response header `access-control-allow-origin: *`, if the request has an `Origin`.",
        "vLLM sends the header.",
        "fakevllm does not send the header.",
        "fakevllm does not serve pages of other sites.",
        ("around: * with an origin", "around: * with a foreign origin", "chat: origin"),
        ("header access-control-allow-origin: *",),
    ),
    KnownDifference(
        "The right key in the header `x-api-key`.",
        "Status 401: vLLM reads only `Authorization`.",
        "fakevllm accepts the key.",
        "Anthropic's SDK and Claude Code send this header.",
        ("keys: x-api-key, *",),
        ("status: 401 -> 200",),
    ),
    KnownDifference(
        "A missing or wrong key.",
        "Status 401 for paths that begin with /v1 or /v2. Other paths need no key.",
        "Status 401 for every path except /health and /ping.",
        "A newly added route must need a key by default.",
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
        "fakevllm ignores the white space.",
        "A key from a file often ends with white space.",
        ("keys: two blanks", "keys: blank after"),
        ("status: 401 -> 200",),
    ),
    KnownDifference(
        "A request for more than 64 choices (siblings times `n`), or JSON nested deeper than 128 "
        "levels.",
        "vLLM answers, or refuses with its own error text.",
        "Status 400 with fakevllm's error text. vLLM never sees the request.",
        "Siblings multiply the cost of a request, and nested JSON is costly to parse. One app must "
        "not slow down the other apps.",
        ("chat: n too large", "completions: n too large", "chat: body: deep"),
        ("body.error.message: *", "body.error.param: *"),
    ),
    KnownDifference(
        "The field `kv_transfer_params` in a request.",
        "vLLM ignores the request's messages. It answers another prompt: the token ids in "
        "`kv_transfer_params.prompt_token_ids`.",
        "fakevllm removes the field.",
        "The field is internal to vLLM. A client could use it to make vLLM connect to any address.",
        ("chat: kv_transfer_params",),
        ("body.choices*", "body.usage*"),
    ),
    KnownDifference(
        "The header `vary: Origin`, if the request body is valid JSON but not an object. vLLM "
        "crashes on such a body.",
        "vLLM does not send the header.",
        "fakevllm sends the header, as on every response.",
        "No client depends on the header of such a response.",
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
        "Function calls in a stream of the Responses format.",
        "The last event, `response.completed`, repeats each call with a new `id` and `call_id`. If "
        "the request forces a call, the white space in `arguments` changes, too.",
        "`response.completed` repeats each call with the `id` and `call_id` of the stream.",
        "Some apps store the ids from the stream, and others those of `response.completed`. Every "
        "app must find its call again.",
        (
            "*responses: stream, tools auto, *",
            "*responses: stream, tools required",
            "*responses: stream, tools named",
        ),
        ("grammar of stream*.call_id: *", "grammar of stream*.response.output*"),
    ),
    KnownDifference(
        "The error type of a response with status 500 in the Messages format.",
        "In vLLM 0.27, the type is `internal_error`.",
        "The type is `api_error`.",
        "Anthropic's own API uses `api_error`.",
        ("messages: json_schema that is none",),
        ("body.error.type: internal_error -> api_error",),
    ),
    KnownDifference(
        "The URL of an image, audio or video, if no `--media-domain` allows its host.",
        "vLLM fetches the URL. If the model accepts no images, vLLM refuses the request and "
        "fetches nothing. In the Messages format, the status is then 500.",
        "Status 400. Nothing is fetched.",
        "If the engine fetched any URL, apps could reach addresses inside the engine's network.",
        ("messages: image url",),
        ("status: 500 -> 400",),
    ),
    KnownDifference(
        "The field `reasoning: null` in the deltas of a stream. The request has "
        "`include_reasoning: false`.",
        "vLLM sends the field if vLLM runs a parser for tools or reasoning.",
        "fakevllm omits the field if it records the tokens of the answer for training.",
        "To record the tokens, fakevllm asks vLLM for the reasoning. It then removes the reasoning "
        "from each delta. Whether vLLM would leave `null` in its place depends on the parsers with "
        "which vLLM was started. fakevllm does not know these parsers. No client reads the field.",
        ("chat: stream, include_reasoning false",),
        ("grammar of choice 0*.delta.reasoning: null -> (nothing)",),
        ("N=4",),
    ),
    KnownDifference(
        "The count `output_tokens_details.reasoning_tokens` in the Responses format.",
        "vLLM 0.27 counts the tokens between `<think>` and `</think>`.",
        "The count is 0 with vLLM 0.27.",
        "fakevllm turns a Responses request into chat completions. There, vLLM 0.27 does not "
        "report the count. vLLM 0.33 reports it, and fakevllm passes it on.",
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
        "A stream of the Responses format. The request has `enable_thinking: false`, but the model "
        "reasons all the same.",
        "`response.completed` contains `</think>`. The deltas omit it.",
        "Both the deltas and `response.completed` omit `</think>`.",
        "The deltas and the final event should contain the same text.",
        ("reasoning responses: stream, effort none",),
        ("grammar of stream*.data.response.output*.text: *",),
    ),
    KnownDifference(
        "The field `previous_response_id` with the id of an earlier response.",
        "vLLM refuses the request, because it stores no responses by default.",
        "fakevllm answers. It finds the earlier response in the ledger, the proxy's SQLite file.",
        "Apps that use the Responses API rely on `previous_response_id`.",
        ("responses: previous_response_id of an answer",),
        ("status: * -> 200",),
    ),
    KnownDifference(
        "`GET /v1/responses/ID` and `POST /v1/responses/ID/cancel` for an earlier response.",
        "Status 404, because vLLM stores no responses by default. If you let vLLM store responses, "
        "it returns them to every key, and loses them when it stops.",
        "`GET` returns the response. `cancel` answers 400, because the response is complete. vLLM "
        "does the same if it stores responses. fakevllm answers 404 if another key made the "
        "response, or if its request had `store: false`.",
        "Apps that use the Responses API rely on these routes. The proxy stores responses in the "
        "ledger. If apps call the server directly, it keeps the latest responses until it stops.",
        ("responses: get an answer", "responses: cancel an answer"),
        ("status: 404 -> *",),
    ),
    KnownDifference(
        "`DELETE /v1/responses/ID`.",
        "Status 405: vLLM has no such route.",
        "fakevllm deletes the response: `GET` and `previous_response_id` no longer find it. For an "
        "unknown id or a response of another key, the status is 404.",
        "The route is part of OpenAI's Responses API.",
        ("responses: delete",),
        ("status: 405 -> 404",),
    ),
    KnownDifference(
        "`GET /v1/models/ID`.",
        "Status 404: vLLM has no such route.",
        "fakevllm returns the model's entry from `GET /v1/models`. The aliases of the proxy have "
        "entries, too.",
        "The route is part of OpenAI's API. Some apps use it to check their model.",
        ("around: a model's card",),
        ("status: 404 -> 200",),
    ),
    KnownDifference(
        "`GET /v1/models/ID` for a model that is not served.",
        "Status 404 with the error for an unknown path.",
        "Status 404 with vLLM's error for an unknown model.",
        "The error names the served models.",
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
