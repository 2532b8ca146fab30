"""The swarm protocol: what clients and the proxy say to the swarm server, and what it says back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    field_serializer,
)

from fakevllm_adapters.protocol.packed_numbers import told_numbers
from fakevllm_adapters.protocol.pool import MAX_ID_CHARS, MAX_TASK_CHARS, ThrottlePolicy

Json = dict[str, Any]

SIBLING_HEADER = "X-Fakevllm-Sibling"
"""`<group id>/<index>`: this call belongs to that sibling; the first such call opens the
episode."""
PROXY_HEADERS = {"Via": "1.1 fakevllm"}
"""On every call that a proxy passes on, also those that are only served."""


MAX_JOB_CHARS = 100_000
"""Of a job's YAML, which is read at a megabyte a second."""
MAX_GROUP_SIZE = 256
"""Siblings of one group."""
MAX_SAMPLE_CALLS = 64
MAX_REWARD = 1e9
"""A larger one leaves what a step can compute, and with its own it takes everybody's groups."""
MAX_METRIC = 1e30
"""Of what a client measures. Sums of larger ones leave a float, and curves hold float32."""
MAX_IDLE_S = 86_400.0
"""Of a claim: one whose client died holds its slot so long."""


def _no_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("must be a number, not text")
    return value


Reward = Annotated[
    float,
    Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False),
    BeforeValidator(_no_text),
]
"""True is 1, as in Python."""


def _not_too_large(measured: float | list[float]) -> float | list[float]:
    values = measured if isinstance(measured, list) else [measured]
    if any(abs(value) > MAX_METRIC for value in values):
        raise ValueError(f"must be at most {MAX_METRIC:g} either way")
    return measured


Metric = Annotated[FiniteFloat | list[FiniteFloat], AfterValidator(_not_too_large)]


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
    closed: str | None = None
    """Why no more steps are taken, as groups are told that come too late, such as
    `training_finished`; None while they are."""
    claims_paused: bool = False
    """No new episode begins; those that are claimed go on."""
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
    rewards: list[Reward | None] = Field(max_length=MAX_GROUP_SIZE)
    """By sibling index; None means: do not train this sibling."""
    served: int | None = Field(default=None, ge=0)
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
    advantage: Reward
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
    """acked, step, evaluated, dropped, restored or stopped. A newer server may tell of others, and
    a reader that does not know one goes on behind it."""
    step: int = 0
    version: int = 0
    groups: list[TrainedGroup] = []
    """kind acked, step: what was promised, what was trained."""
    lost: list[str] = []
    """kind restored: groups whose training died with the process."""
    reasons: dict[str, str] = {}
    """kind dropped: group id to reason."""
    reason: str = ""
    """kind stopped: why no more steps are taken; kind restored: why groups are lost, where what was
    undone is not trained again."""
    metrics: dict[str, float] = {}
    """kind step: what was measured; what was not is absent. kind evaluated: `reward`, of one
    evaluation by the weights of step and version."""
    at: float | None = None
    """kind evaluated: when it ended, in Unix seconds."""

    @field_serializer("metrics", when_used="json")
    def _told_metrics(self, metrics: dict[str, float]) -> dict[str, float | str]:
        return told_numbers(metrics)


class LogReply(BaseModel):
    entries: list[LogEntry]


# --- episodes (active clients)


class ClaimEpisodeRequest(BaseModel):
    client_uuid: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    episode_type: str = Field(max_length=MAX_ID_CHARS)
    discard_episode_timeout: float = Field(default=240.0, gt=0, le=MAX_IDLE_S)
    throttle_policy: ThrottlePolicy | None = None
    idempotency_key: str = Field(default="", max_length=MAX_ID_CHARS)
    """A claim that is asked for again with the same one is the same, as long as it stands."""


class ClaimEpisodeReply(BaseModel):
    success: bool
    client_uuid: str
    episode_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""


class WorkflowOutput(BaseModel):
    reward: Reward | list[Reward] | None = None
    is_success: bool | None = None
    metadata: Json = {}
    log_metrics: dict[str, Metric] = {}


class EndEpisodeRequest(BaseModel):
    client_uuid: str
    episode_uuid: str
    task_id: str = Field(default="", max_length=MAX_TASK_CHARS)
    workflow_output: WorkflowOutput = WorkflowOutput()
    declare_client_active: bool = True


class EndEpisodeReply(BaseModel):
    success: bool
    warning: str = ""
    """What its client has surely not meant; absent where there is nothing."""


class CanContinueRequest(BaseModel):
    client_uuid: str
    episode_uuid: str
