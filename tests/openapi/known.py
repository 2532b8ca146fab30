"""Where our verdict is meant to differ from vLLM's, each with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fakevllm.transport.app_response import GRACE_S
from fakevllm_adapters.http.limits import NOT_FOR_CLIENTS
from tests.openapi.cases import Case
from tests.openapi.verdict import Verdict

_ID = re.compile(r"/v1/responses/(?P<id>[^/?]*)(/cancel)?(\?.*)?")
_TOOL = re.compile(r"'loc': \('body', 'tools', (\d+), ")
"""Places of the tools that vLLM names in a refusal."""
CALLED = ("function", "custom", "namespace")
"""Types of tools that the app calls itself."""
STREAM = "text/event-stream"
_PLAIN = re.compile(r"[\w-]+", re.ASCII)
_LIMIT = re.compile(
    r'"message": "(n must be at most \d+, got|`\w+` must have (strings of )?at most)'
)


@dataclass(frozen=True, slots=True)
class Known:
    what: str
    """What vLLM does, and what we do."""
    why: str
    covers: Callable[[Case, Verdict, Verdict], bool]
    """Of a request, vLLM's verdict and ours."""


def _has_an_odd_id(case: Case, direct: Verdict, ours: Verdict) -> bool:
    found = _ID.fullmatch(case.target)
    is_odd = found is not None and _PLAIN.fullmatch(found["id"]) is None
    return is_odd and direct.status in (400, 404) and ours.status == 404


def _is_beyond_our_limits(case: Case, direct: Verdict, ours: Verdict) -> bool:
    return ours.status == 400 and _LIMIT.search(ours.error) is not None


def _asks_beyond_the_context(case: Case, direct: Verdict, ours: Verdict) -> bool:
    is_refused = (
        direct.status in (400, 500) and "cannot be greater than max_model_len" in direct.error
    )
    return is_refused and ours.status == 200 and ours.error == ""


def _has_an_odd_hosted_tool(case: Case, direct: Verdict, ours: Verdict) -> bool:
    wrong = {place: case.fields["tools"][int(place)] for place in _TOOL.findall(direct.error)}
    is_all = len(_TOOL.findall(direct.error)) == direct.error.count("'loc':") > 0
    is_hosted = all(tool.get("type") not in CALLED for tool in wrong.values())
    return is_all and is_hosted and direct.status == 400 and ours.status == 200


def _came_late(case: Case, direct: Verdict, ours: Verdict) -> bool:
    is_opened = ours.status == 200 and ours.media == STREAM and ours.error != ""
    return is_opened and direct.status >= 400 and ours.took_s >= GRACE_S


KNOWN: tuple[Known, ...] = (
    Known(
        "The id of a response with other characters than letters, digits, `_` and `-`: vLLM says "
        "in its words that there is none, or what of the query is wrong; here it is no path.",
        "It becomes part of a path once more, behind us, and must not lead to another route.",
        _has_an_odd_id,
    ),
    Known(
        "More than 64 choices in all (siblings times `n` times prompts), or lists and words beyond "
        "our limits: 400 in our words, before vLLM would refuse or answer it.",
        "Fan-out multiplies what one request costs; one app must not stop the others.",
        _is_beyond_our_limits,
    ),
    Known(
        "A limit of new tokens beyond the context: vLLM 0.27 says 400 (of Messages 500), here the "
        "answer has what there is room for.",
        "Coding agents ask for more than a small model's context holds, and stop at the error.",
        _asks_beyond_the_context,
    ),
    Known(
        "Tools that a hosted service would run (`image_generation`, `mcp`, …) with fields of wrong "
        "types, in Responses: vLLM says 400, here they are ignored as well-formed ones are.",
        "They change no answer, and their fields change with each release of the SDKs.",
        _has_an_odd_hosted_tool,
    ),
    Known(
        "A refusal of a streamed request that takes longer than 1.5 s, as on a busy machine: vLLM "
        "tells it as a status, here the stream is open by then and the error stands in it.",
        "Silence is filled: apps and what stands before them give up on a silent stream.",
        _came_late,
    ),
)


def known(case: Case, direct: Verdict, ours: Verdict) -> Known | None:
    return next((entry for entry in KNOWN if entry.covers(case, direct, ours)), None)


def for_engines(case: Case) -> Case:
    """The request as it is with fields taken out that no engine is shown: what vLLM says to it is
    what it must say behind us."""
    kept = {name: value for name, value in case.fields.items() if name not in NOT_FOR_CLIENTS}
    if len(kept) == len(case.fields):
        return case
    return replace(case, body=json.dumps(kept).encode())
