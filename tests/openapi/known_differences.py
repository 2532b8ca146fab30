"""The known differences between our verdict and vLLM's, each with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fakevllm.transport.app_response import GRACE_S
from fakevllm_adapters.http.client_body import FORBIDDEN_FIELDS
from tests.openapi.cases import Case
from tests.openapi.verdict import Verdict

_ID = re.compile(r"/v1/responses/(?P<id>[^/?]*)(/cancel)?(\?.*)?")
_TOOL = re.compile(r"'loc': \('body', 'tools', (\d+), ")
"""Pattern for the indices of the tools that vLLM names in a refusal."""
APP_TOOL_TYPES = ("function", "custom", "namespace")
"""Types of tools that the app calls itself."""
STREAM = "text/event-stream"
_PLAIN = re.compile(r"[\w-]+", re.ASCII)
_LIMIT = re.compile(
    r'"message": "(n must be at most \d+, got|`\w+` must have (strings of )?at most)'
)
_MEDIA = re.compile(r'"message": "(The media URL |Media URLs of the host )')


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
    covers: Callable[[Case, Verdict, Verdict], bool]
    """Function of a case, vLLM's verdict and ours: whether this entry explains their difference."""


def _has_an_odd_id(case: Case, direct: Verdict, ours: Verdict) -> bool:
    match = _ID.fullmatch(case.target)
    is_odd = match is not None and _PLAIN.fullmatch(match["id"]) is None
    return is_odd and direct.status in (400, 404) and ours.status == 404


def _is_beyond_our_limits(case: Case, direct: Verdict, ours: Verdict) -> bool:
    return ours.status == 400 and _LIMIT.search(ours.error) is not None


def _has_an_unknown_previous_response(case: Case, direct: Verdict, ours: Verdict) -> bool:
    is_unknown = ours.status == 404 and "Response with id" in ours.error
    return is_unknown and isinstance(case.fields.get("previous_response_id"), str)


def _exceeds_the_context(case: Case, direct: Verdict, ours: Verdict) -> bool:
    is_refused = (
        direct.status in (400, 500) and "cannot be greater than max_model_len" in direct.error
    )
    return is_refused and ours.status == 200 and ours.error == ""


def _has_a_media_url(case: Case, direct: Verdict, ours: Verdict) -> bool:
    is_refused = ours.status == 400 and _MEDIA.search(ours.error) is not None
    return is_refused and direct.status >= 400


def _has_an_odd_hosted_tool(case: Case, direct: Verdict, ours: Verdict) -> bool:
    wrong = {index: case.fields["tools"][int(index)] for index in _TOOL.findall(direct.error)}
    is_all = len(_TOOL.findall(direct.error)) == direct.error.count("'loc':") > 0
    is_hosted = all(tool.get("type") not in APP_TOOL_TYPES for tool in wrong.values())
    return is_all and is_hosted and direct.status == 400 and ours.status == 200


def _was_refused_late(case: Case, direct: Verdict, ours: Verdict) -> bool:
    is_opened = ours.status == 200 and ours.media == STREAM and ours.error != ""
    return is_opened and direct.status >= 400 and ours.took_s >= GRACE_S


KNOWN: tuple[KnownDifference, ...] = (
    KnownDifference(
        "A response id with characters other than letters, digits, `_` and `-`.",
        "vLLM's error says that there is no such response. If the id contains `?`, vLLM takes the "
        "rest as query parameters, and may report an error in them.",
        "Status 404: no such path.",
        "The proxy puts the id into the path of the request that it sends to the server. With "
        "other characters, such as `/`, the path could be that of another route.",
        _has_an_odd_id,
    ),
    KnownDifference(
        "A request for more than 64 choices (siblings times `n` times prompts), or with a list or "
        "string that is longer than fakevllm allows.",
        "vLLM answers, or refuses with its own error text.",
        "Status 400 with fakevllm's error text. vLLM never sees the request.",
        "Siblings multiply the cost of a request. One app must not slow down the other apps.",
        _is_beyond_our_limits,
    ),
    KnownDifference(
        "A Responses request with two mistakes. First, `previous_response_id` is not the id of a "
        "response to the same API key. Second, another field is invalid.",
        "vLLM reports the invalid field.",
        "Status 404: no such response.",
        "vLLM does not check which key made a response, so fakevllm checks this itself, before it "
        "passes the request on. vLLM checks the other fields only afterwards.",
        _has_an_unknown_previous_response,
    ),
    KnownDifference(
        "A limit of new tokens that is larger than the context.",
        "vLLM 0.27 answers 400. In the Messages format, it answers 500.",
        "fakevllm lowers the limit to the part of the context that the prompt leaves free.",
        "Coding agents request more tokens than the context of a small model holds. They stop at "
        "the error.",
        _exceeds_the_context,
    ),
    KnownDifference(
        "A request with two mistakes: no `--media-domain` allows the URL of its image, audio or "
        "video, and something else is invalid, too.",
        "vLLM reports the other mistake, for example that the model accepts no images.",
        "Status 400 with fakevllm's error text. vLLM never sees the request.",
        "If the engine fetched any URL, apps could reach addresses inside the engine's network.",
        _has_a_media_url,
    ),
    KnownDifference(
        "A Responses request with tools that a hosted service would run, such as "
        "`image_generation`. The fields of the tools have wrong types.",
        "Status 400.",
        "fakevllm ignores the tools, as it ignores hosted tools with correct fields.",
        "These tools change no answer, and their fields change with each release of the SDKs.",
        _has_an_odd_hosted_tool,
    ),
    KnownDifference(
        "A streamed request that the engine refuses later than 1.5 s after it arrived, for example "
        "on a busy machine.",
        "The response has the error's status.",
        "Status 200. The error is an event in the stream.",
        "fakevllm opens the stream after 1.5 s. Apps and network proxies give up on a connection "
        "that stays silent.",
        _was_refused_late,
    ),
)


def known(case: Case, direct: Verdict, ours: Verdict) -> KnownDifference | None:
    """Return the entry that explains the difference of two verdicts, or None."""
    return next((entry for entry in KNOWN if entry.covers(case, direct, ours)), None)


def without_removed_fields(case: Case) -> Case:
    """Return the request as the engine gets it: without the fields that the proxy removes.

    vLLM's verdict on this request is the expected one.
    """
    kept = {name: value for name, value in case.fields.items() if name not in FORBIDDEN_FIELDS}
    if len(kept) == len(case.fields):
        return case
    return replace(case, body=json.dumps(kept).encode())
