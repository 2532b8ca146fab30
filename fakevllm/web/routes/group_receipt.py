"""GET /fakevllm/groups/ID: the receipt of one group. The receipt says how the group's answer was
made.

An app with any valid key may request a receipt. Therefore a receipt contains no texts of users. It
has counts of tokens instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import orjson
from fastapi import Response
from pydantic import BaseModel

from fakevllm.ledger.reads import CallVersions
from fakevllm.ledger.records import GroupRecord, SiblingRecord
from fakevllm.swarm.errors import NETWORK_ERRORS
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm.web.routes.passthrough import error_response
from fakevllm_adapters.protocol.errors import WireError, error_body
from fakevllm_adapters.protocol.weights import WeightsReply

log = logging.getLogger("fakevllm.requests")

FLUSH_S = 2.0
"""Maximum number of seconds to wait for pending writes to the ledger. An app may request the
receipt of an answer that it got a moment ago."""
MAX_VERSIONS = 4
"""Maximum number of weight versions about which the server is asked. More than two versions sample
an answer only if the weights change several times during that answer."""
_MAX_SHOWN_CHARS = 64
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens"),
    *("max_completion_tokens", "max_output_tokens", "min_tokens", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "stream"),
)
"""Fields of a request that a receipt repeats, if their value is a number or a boolean. Fields such
as `stop` are left out, because their values are texts of the app."""


class NextGroup(BaseModel):
    """A later group whose request refers to the answer of the group in the receipt. The later
    request either continues the conversation after that answer, or asks for another answer to the
    same question."""

    group_id: str
    kind: str
    """How the later request refers to the answer, such as `continues` or `regenerates`."""
    is_new_turn: bool
    """Whether the later request contains a new message of the user. False if it only adds a tool's
    result."""


class GroupFeedback(BaseModel):
    """One item of feedback about the answer of a group."""

    kind: str
    state: str
    reason: str | None
    value: float | None
    edit_state: str | None
    """What became of the feedback's edit as a demonstration; None if edits are not trained."""
    edit_reason: str | None


class SiblingReceipt(BaseModel):
    """One sibling (sampled answer) of a group, without its text."""

    index: int
    served: bool
    best: bool
    status: int
    reward: float | None
    finish_reason: str | None
    failure: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    trained: bool
    advantage: float | None
    temperature: float | None = None
    """Temperature at which the answer was sampled. None if the server did not capture the
    answer."""
    weight_versions: list[list[int]] = []
    """Spans [version, start, end): this version of the weights sampled these tokens of the
    answer."""
    replica: str | None = None
    """Name of the rollout replica that sampled the answer. None if the server had one rollout
    engine, or if the replica is not known."""
    untrainable: str | None = None
    """Reason why the answer cannot be trained. None if the answer can be trained, or if the server
    did not capture the answer."""


class WeightsReceipt(BaseModel):
    """One version of the weights that sampled tokens of the group."""

    version: int
    digest: str | None = None
    """SHA-256 of the version's checkpoint. None if the version has no checkpoint, or if the server
    cannot be asked now."""
    checkpoint_step: int | None = None


class GroupReply(BaseModel):
    """Reply with the receipt of a group."""

    group_id: str
    received_at: float
    """Time at which the request arrived, in Unix seconds."""
    route: str
    session_id: str | None
    parent_session_id: str | None
    parent_id: str | None
    turn: int | None
    kind: str | None
    evidence: str | None
    state: str
    reason: str | None
    status: int
    rewards: list[float | None]
    """Rewards, ordered by the index of the sibling."""
    served_index: int | None
    best_index: int | None
    served_by: str | None
    propensity: float | None
    arm: str | None = None
    arm_propensity: float | None = None
    model: str
    engine: str | None = None
    """Name of the engine that samples for the group's run. None if the server has another run now,
    or cannot be asked."""
    weights: list[WeightsReceipt] = []
    """Versions that sampled the siblings, oldest first. Empty if the server captured no sibling,
    for example because the request was answered without training."""
    sampling: dict[str, int | float | bool] = {}
    """Sampling parameters of the app's request whose values are numbers or booleans."""
    siblings: list[SiblingReceipt] = []
    hook_hash: str | None
    run_id: str | None
    job_hash: str | None
    trained_step: int | None
    trained_version: int | None
    followed: list[NextGroup]
    """Later groups whose requests continue the conversation after this group's answer, or request
    another answer to the same question."""
    feedback: list[GroupFeedback] = []


async def group_reply(proxy: ProxyComponents, group_id: str) -> GroupReply | Response:
    """Return the receipt of a group. If the ledger does not have the group, return a response with
    status 404."""
    ledger = proxy.ledger
    await ledger.flush(FLUSH_S)
    group, calls, follow_ups, feedback = await asyncio.to_thread(
        lambda: (
            ledger.group(group_id),
            ledger.calls.versions(group_id),
            ledger.sessions.follow_ups(group_id),
            ledger.feedback.of_group(group_id),
        )
    )
    if group is None:
        message = (
            f"Group {group_id[:_MAX_SHOWN_CHARS]!r} is not in the ledger: the id is wrong, or the "
            "group has not ended yet."
        )
        return error_response(WireError(404, error_body(message, "NotFoundError", 404)))
    versions = sorted({span[0] for call in calls for span in call.weight_versions})
    replies = await _ask_server(proxy, group.run_id, versions[-MAX_VERSIONS:])
    engine = next((reply.engine for reply in replies.values()), None)
    columns = {name: getattr(group, name, None) for name in GroupReply.model_fields}
    return GroupReply.model_validate(
        columns
        | {
            "rewards": [sibling.reward for sibling in group.siblings],
            "engine": engine,
            "weights": [_weights(version, replies) for version in versions],
            "sampling": await asyncio.to_thread(_sampling, group),
            "siblings": [_sibling(sibling, calls) for sibling in group.siblings],
            "followed": [NextGroup.model_validate(row, from_attributes=True) for row in follow_ups],
            "feedback": [
                GroupFeedback.model_validate(row, from_attributes=True) for row in feedback
            ],
        }
    )


async def _ask_server(
    proxy: ProxyComponents, run_id: str | None, versions: Collection[int]
) -> Mapping[int, WeightsReply]:
    """Return the server's data about these versions of a run, by version. The result is empty if
    the server has another run now, is too old, or cannot be reached."""
    status = proxy.link.status
    if status is None or run_id is None or status.run_id != run_id:
        return {}
    try:
        replies = await asyncio.gather(*map(proxy.link.fetch_weights, versions))
    # Isolated: the rest of the receipt comes from the ledger.
    except (*NETWORK_ERRORS, ValueError) as error:
        log.debug("the server does not describe the weights of a group: %r", error)
        return {}
    return {reply.version: reply for reply in replies if reply.run_id == run_id}


def _weights(version: int, replies: Mapping[int, WeightsReply]) -> WeightsReceipt:
    reply = replies.get(version)
    if reply is None:
        return WeightsReceipt(version=version)
    return WeightsReceipt(
        version=version, digest=reply.digest, checkpoint_step=reply.checkpoint_step
    )


def _sibling(sibling: SiblingRecord, calls: Sequence[CallVersions]) -> SiblingReceipt:
    columns = {name: getattr(sibling, name, None) for name in SiblingReceipt.model_fields}
    own = [call for call in calls if call.sibling == sibling.index]
    captured = {
        "temperature": own[-1].temperature if own else None,
        "weight_versions": [span for call in own for span in call.weight_versions],
        "replica": own[-1].replica if own else None,
        "untrainable": own[-1].untrainable if own else None,
    }
    return SiblingReceipt.model_validate(columns | captured)


def _sampling(group: GroupRecord) -> dict[str, Any]:
    """Return those sampling parameters of a group's request that are numbers or booleans. Return {}
    if the request is not a JSON object."""
    try:
        body: object = orjson.loads(group.request_json)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(body, dict):
        return {}
    fields = cast("dict[str, Any]", body)
    return {
        name: fields[name] for name in _SAMPLING if isinstance(fields.get(name), int | float | bool)
    }
