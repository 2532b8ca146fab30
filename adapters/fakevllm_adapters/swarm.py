"""The swarm protocol: what clients and the proxy say to the swarm server, and what it says back."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, field_serializer

Json = dict[str, Any]

SIBLING_HEADER = "X-Fakevllm-Sibling"
"""`<group id>/<index>`: this call belongs to that sibling; the first such call opens the
episode."""


MAX_JOB_CHARS = 100_000
"""Of a job's YAML, which is read at a megabyte a second."""
MAX_GROUP_SIZE = 256
"""Siblings of one group."""
MAX_SAMPLE_CALLS = 64


class EngineStatus(StrEnum):
    OFFLINE = "ENGINE.OFFLINE"
    BOOTING = "ENGINE.BOOTING"
    ROLLING = "ENGINE.ROLLING"
    ROLLING_POST = "ENGINE.ROLLING_POST"
    WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"


@dataclass(frozen=True, slots=True)
class SiblingRef:
    group_id: str
    index: int

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}/{self.index}"


def parse_sibling(header: str) -> SiblingRef:
    """Raises ValueError for anything but `<group id>/<index>`."""
    group_id, _, index = header.rpartition("/")
    if not group_id or not index.isdecimal():
        raise ValueError(f"{SIBLING_HEADER} must read <group id>/<index>, got {header!r}")
    return SiblingRef(group_id, int(index))


class Task(BaseModel):
    """What is being solved. For passive traffic a label with metadata, such as the reference
    answer."""

    main_query: str = ""
    init_messages: list[Json] = Field(default_factory=list[Json])
    task_id: str = ""
    env_type: str = ""
    metadata: Json = Field(default_factory=dict)  # a default would be copied for each request


# --- control plane


class SyncTrainConfigRequest(BaseModel):
    yaml_as_string: str = Field(max_length=MAX_JOB_CHARS)


class EngineStatusReply(BaseModel):
    engine_status: EngineStatus
    engine_status_detail: str | None = None
    global_step: int | None = None
    """The step being collected; the first is 1."""
    server_id: str = ""
    """Changes with every start of the server process."""
    run_id: str = ""
    """Stays with the run directory, and with the numbers of its log."""
    weight_version: int = 0
    backlog: float = 0.0
    """Finished groups that wait to be trained, in batches; 1 or more where a step is due."""
    lockstep: bool = False
    """Whether two runs are the same to the bit, as far as it is the server's doing."""
    totals: dict[str, float] = {}
    """Of all steps of the run: groups with and without signal, tokens sampled, eligible, trained,
    untrainable by reason, branches by cause, and the shares they make."""
    dropped: dict[str, int] = {}
    """Groups of the run that were dropped, by the first word of the reason."""
    waiting: dict[str, int] = {}
    """What is held and not trained yet: open and finished groups, partial tasks, their tokens."""
    model: str | None = None
    """The name the engine serves."""
    max_model_len: int | None = None
    engine_version: str | None = None
    """As the engine's /version tells."""


class SuccessReply(BaseModel):
    success: bool
    failure_reason: str = ""


# --- groups (passive traffic)


class EndGroupRequest(BaseModel):
    group_id: str = Field(min_length=1, max_length=200)
    task_id: str = ""
    rewards: list[FiniteFloat | None] = Field(max_length=MAX_GROUP_SIZE)
    """By sibling index; None means: do not train this sibling."""
    served: int | None = None
    """The sibling whose answer the app got."""
    parent_id: str | None = None
    """The group whose served answer this one's conversation goes on from."""
    metadata: Json = {}


class CapturedCall(BaseModel):
    """One LLM call as the engine saw it. Arrays travel as base64 of little-endian int32 or
    float32."""

    prompt_ids: str
    response_ids: str
    logprobs: str | None
    weight_versions: list[list[int]] = []
    """Spans [version, start, end) over the response."""
    temperature: float
    finish_reason: str | None
    untrainable: str | None = None
    """Why this call is masked from the loss; None where it trains."""
    shaped: bool = False
    """Whether its tokens were chosen from less than the vocabulary, which only the server knows."""


class EndGroupReply(BaseModel):
    success: bool
    failure_reason: str = ""
    pooled: bool = False
    """Whether the group waits to be trained."""
    step: int | None = None
    """The step that was being collected when the group ended."""
    calls: list[list[CapturedCall]] = []
    """By sibling index."""
    run_id: str = ""
    """The run whose weight versions those calls tell."""


class AbortGroupRequest(BaseModel):
    group_id: str = Field(min_length=1, max_length=200)


class AddSampleRequest(BaseModel):
    """An answer of an ended group, to be trained once more by itself: what somebody said of it
    later. Answered as the end of a group is, and taken once."""

    sample_id: str = Field(min_length=1, max_length=300)
    """Unlike any group's."""
    run_id: str
    """Of the reply its calls came in."""
    advantage: FiniteFloat
    """Of every token, centred by the sender."""
    calls: list[CapturedCall] = Field(min_length=1, max_length=MAX_SAMPLE_CALLS)


class TrainedGroup(BaseModel):
    group_id: str
    siblings: list[int]
    """Indices that went into the loss."""
    advantages: list[float] = []
    """Of each of those, the mean over its trained tokens."""


class LogEntry(BaseModel):
    """One line of the run's log; numbers grow."""

    seq: int
    kind: str
    """acked, step, dropped, restored or stopped. A newer server may tell of others, and a reader
    that does not know one goes on behind it."""
    step: int = 0
    version: int = 0
    groups: list[TrainedGroup] = []
    """kind acked, step: what was promised, what was trained."""
    lost: list[str] = []
    """kind restored: groups whose training died with the process."""
    reasons: dict[str, str] = {}
    """kind dropped: group id to reason."""
    reason: str = ""
    """kind stopped: why no more steps are taken; kind restored: why groups are lost."""
    metrics: dict[str, float] = {}
    """kind step: what was measured; what was not is absent."""

    @field_serializer("metrics", when_used="json")
    def _told_metrics(self, metrics: dict[str, float]) -> dict[str, float | str]:
        return told_numbers(metrics)


class LogReply(BaseModel):
    entries: list[LogEntry]


# --- episodes (active clients)


class ClaimEpisodeRequest(BaseModel):
    client_uuid: str
    episode_type: str
    discard_episode_timeout: float = Field(default=240.0, gt=0)
    throttle_policy: Json | None = None


class ClaimEpisodeReply(BaseModel):
    success: bool
    client_uuid: str
    episode_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""


class WorkflowOutput(BaseModel):
    reward: FiniteFloat | list[FiniteFloat] | None = None
    is_success: bool | None = None
    metadata: Json = {}
    log_metrics: dict[str, float | list[float]] = {}


class EndEpisodeRequest(BaseModel):
    client_uuid: str
    episode_uuid: str
    task_id: str = ""
    workflow_output: WorkflowOutput = WorkflowOutput()
    declare_client_active: bool = True


class CanContinueRequest(BaseModel):
    client_uuid: str
    episode_uuid: str


# --- numbers and arrays


def told_numbers(numbers: Mapping[str, float]) -> dict[str, float | str]:
    """For JSON, which has no number that is not finite: those are told by name. `float` reads both.

    >>> told_numbers({"loss": math.nan, "grad_norm": -math.inf, "lr": 0.5})
    {'loss': 'NaN', 'grad_norm': '-Infinity', 'lr': 0.5}
    """
    return {
        name: value if math.isfinite(value) else _not_finite(value)
        for name, value in numbers.items()
    }


def _not_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def pack_ids(ids: Sequence[int]) -> str:
    """
    >>> unpack_ids(pack_ids([1, 2, 300]))
    [1, 2, 300]
    """
    return base64.b64encode(array("i", ids).tobytes()).decode()


def unpack_ids(text: str) -> list[int]:
    values = array("i")
    values.frombytes(base64.b64decode(text))
    return values.tolist()


def pack_floats(values: Sequence[float]) -> str:
    return base64.b64encode(array("f", values).tobytes()).decode()


def unpack_floats(text: str) -> list[float]:
    values = array("f")
    values.frombytes(base64.b64decode(text))
    return values.tolist()
