"""Sample one choice of a request on a TokenEngine, and yield its text piece by piece. A TokenEngine
is an engine that samples tokens.

The functions named `requested_…` return an optional field of the response. They return None if the
request does not ask for this field.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.backends.http.detokenizer import Detokenizer, StopScanner
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Sampling, Token
from fakevllm_server.types.token_masks import TokenMasks

Json = dict[str, Any]


@dataclass(slots=True)
class Piece:
    """The text and the tokens that one engine iteration has added to a choice.

    The text may lag behind the tokens, because text that may become a stop string is held back.
    """

    text: str
    tokens: Sequence[Token]


@dataclass(slots=True)
class SampledChoice:
    """The tokens and the text of one choice so far. `sample_choice` adds to this object."""

    index: int
    """Index of the choice in the response."""
    number: int
    """Number of the choice among all choices of its request. The seed of the choice depends on this
    number. If each choice is sent as a response of its own, `index` is always 0, so the number may
    differ from `index`."""
    tokens: list[Token] = field(default_factory=list[Token])
    text: str = ""
    finish_reason: str = "length"
    """"stop" after an end of sequence, a stop string or a stop id; otherwise "length"."""
    stop_reason: str | int | None = None
    """The stop string or stop id that ended the choice."""


async def sample_choice(
    engine: TokenEngine,
    request: ChatRequest,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    choice: SampledChoice,
) -> AsyncGenerator[Piece]:
    """Sample one choice. Yield the text and the tokens of each engine iteration as a Piece, and add
    them to `choice`.

    Sampling ends at an end-of-sequence token, at a stop string or stop id, or at the token limit.
    If the request has `ignore_eos`, sampling does not end at an end-of-sequence token.
    """
    skips = request.skip_special_tokens
    detokenizer = Detokenizer(partial(engine.decode, skip_special_tokens=skips))
    includes_stop = request.include_stop_str_in_output
    stops = StopScanner(request.stops, includes_stop=includes_stop)
    async with aclosing(engine.generate(prompt_ids, sampling)) as batches:
        async for tokens in batches:
            choice.tokens.extend(tokens)
            last_id = tokens[-1].id
            is_stop_id = last_id in sampling.stop_ids
            is_eos = last_id in engine.eos_ids and not sampling.ignore_eos
            is_end = is_eos or is_stop_id
            omits_last = is_eos or (is_stop_id and not includes_stop)
            visible = tokens[:-1] if omits_last else tokens
            if is_end:
                choice.finish_reason = "stop"
                choice.stop_reason = None if is_eos else last_id
            text = detokenizer.push([token.id for token in visible], is_last=is_end)
            is_armed = len(choice.tokens) > sampling.min_tokens
            piece = Piece(stops.push(text, is_armed=is_armed), tokens)
            if stops.hit is not None:
                choice.finish_reason, choice.stop_reason = "stop", stops.hit
            choice.text += piece.text
            yield piece
            if stops.hit is not None:
                return
    rest = stops.push(detokenizer.push([], is_last=True)) + stops.flush()
    if rest:
        choice.text += rest
        yield Piece(rest, ())


def tokens_apart(engine: TokenEngine, request: ChatRequest, choice: SampledChoice) -> Json:
    """Return the data of a complete choice that are sent separately from the answer: token ids,
    logprobs, weight versions, sets of allowed tokens, and the finish reason."""
    return {
        "token_ids": [token.id for token in choice.tokens],
        "logprobs": [token.logprob for token in choice.tokens],
        "weight_versions": _version_spans(choice.tokens),
        "allowed_tokens": requested_allowed_sets(engine, request, choice.tokens),
        "finish_reason": choice.finish_reason,
    }


def requested_token_ids(request: ChatRequest, tokens: Sequence[Token]) -> list[int] | None:
    """Return the token ids of `tokens` if the request has `return_token_ids`, else None."""
    return [token.id for token in tokens] if request.return_token_ids else None


def requested_version_spans(request: ChatRequest, tokens: Sequence[Token]) -> list[Json] | None:
    """If the request has `return_weight_versions`, return the weight versions of `tokens` as a list
    of `{version, start, end}`. Otherwise return None."""
    return _version_spans(tokens) if request.return_weight_versions else None


def requested_allowed_sets(
    engine: TokenEngine, request: ChatRequest, tokens: Sequence[Token]
) -> Json | None:
    """Return the sets of tokens that could be sampled, one set for each of `tokens`, encoded for
    JSON.

    Return None if the request does not ask for these sets, or if the engine cannot report them.
    """
    if not (engine.reports_allowed and request.requests_allowed_tokens):
        return None
    return TokenMasks.from_packed_sets([token.allowed for token in tokens]).to_wire()


def _version_spans(tokens: Sequence[Token]) -> list[Json]:
    """Return ranges of consecutive tokens that were sampled with the same weights. Each range is
    `{version, start, end}`, with the version of the weights and the token positions [start, end).
    """
    spans: list[Json] = []
    for at, token in enumerate(tokens):
        if not spans or spans[-1]["version"] != token.version:
            spans.append({"version": token.version, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans
