"""Swarm protocol messages: requests from clients or the proxy to the swarm server (the server that
trains), and the server's replies."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    field_serializer,
)

from fakevllm_adapters.protocol.batch_status import MAX_ID_CHARS, MAX_TASK_CHARS, ThrottlePolicy
from fakevllm_adapters.protocol.packed_numbers import jsonable_numbers

Json = dict[str, Any]

SIBLING_HEADER = "X-Fakevllm-Sibling"
"""Header `<group id>/<index>` that assigns a call to a sibling, one of the answers sampled for a
request. The first call for a sibling opens the sibling's episode. With `<group id>/<first>-<last>`,
the choices of one call (`n` > 1) belong to several siblings."""
ARM_HEADER = "X-Fakevllm-Arm"
"""Header that names the arm of a call: training, released or baseline. The arm decides which
weights answer the call. The proxy sends the header only if it assigns sessions to arms, as in an
A/B test."""
SESSION_HEADER = "X-Fakevllm-Session"
"""Header that names the session of a call, which is the conversation to which the call belongs. The
server sends the calls of a session to the same rollout replica, if it has several. The proxy sends
the header if it knows the session before the call."""
CLIENT_HEADER = "X-Fakevllm-Client"
"""Header that fakevllm's own clients send when they request the status. The reply to such a request
has the engine's real status. Other clients may see an older status. If a job's steps need the
agreement of clients, the server shows each state to other clients for several seconds, because
AgentJet's client reads the status only every five seconds."""
PROXY_HEADERS = {"Via": "1.1 fakevllm"}
"""Headers that a proxy adds to every call that it relays, whether or not the call is trained."""

MAX_JOB_CHARS = 100_000
"""Maximum length of a job's YAML, which is parsed at about one megabyte per second."""
MAX_GROUP_SIZE = 256
"""Maximum number of siblings in a group."""
MAX_SAMPLE_CALLS = 64
"""Maximum number of calls in one AddSampleRequest."""
MAX_REWARD = 1e9
"""Largest absolute reward. A larger reward would overflow the training step. All groups of the step
would then be lost, including those of other clients."""
MAX_METRIC = 1e30
"""Largest absolute value that a client may report as a metric. Sums of larger values would
overflow, and curves store float32."""
MAX_IDLE_S = 86_400.0
"""Longest idle timeout, in seconds, of an episode that a client has claimed. If the client dies,
the episode occupies a slot until the timeout."""


def _no_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("must be a number, not text")
    return value


Reward = Annotated[
    float,
    Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False),
    BeforeValidator(_no_text),
]
"""A finite reward. True counts as 1, as in Python; a text is refused."""


def _not_too_large(metric: float | list[float]) -> float | list[float]:
    values = metric if isinstance(metric, list) else [metric]
    if any(abs(value) > MAX_METRIC for value in values):
        raise ValueError(f"must be at most {MAX_METRIC:g} either way")
    return metric


Metric = Annotated[FiniteFloat | list[FiniteFloat], AfterValidator(_not_too_large)]


class EngineStatus(StrEnum):
    """The state of the swarm server's engine. The states have the same names as in AgentJet, a
    framework for training agents."""

    OFFLINE = "ENGINE.OFFLINE"
    """No engine runs."""
    BOOTING = "ENGINE.BOOTING"
    """The engine is starting."""
    ROLLING = "ENGINE.ROLLING"
    """The engine samples, and the server collects groups for the next training step."""
    ROLLING_POST = "ENGINE.ROLLING_POST"
    """The engine samples, and the server trains on a complete batch."""
    WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"
    """The engine loads the new weights."""


@dataclass(frozen=True, slots=True)
class SiblingRef:
    """Reference to one sibling of a group. The siblings of a group are the answers that are sampled
    for one request.

    A model call that samples a sibling contains the reference in a header.
    """

    group_id: str
    index: int

    @property
    def episode_id(self) -> str:
        """Id of the sibling (one answer of a group), in the form `<group id>/<index>`."""
        return f"{self.group_id}/{self.index}"


def parse_sibling(header: str) -> SiblingRef:
    """Parse the value of the header `X-Fakevllm-Sibling`, which has the form `<group id>/<index>`.

    Raises ValueError if the value has another form.
    """
    group_id, _, index = header.rpartition("/")
    if not group_id or not index.isdecimal():
        raise ValueError(f"{SIBLING_HEADER} must read <group id>/<index>, got {header!r}")
    return SiblingRef(group_id, int(index))


@dataclass(frozen=True, slots=True)
class SiblingRange:
    """Reference to consecutive siblings (answers to the same request) of a group. One model call
    samples all of them.

    >>> SiblingRange("g", 1, 7).header, SiblingRange("g", 0).header
    ('g/1-7', 'g/0')
    """

    group_id: str
    first: int
    num: int = 1
    """Number of siblings. If it is larger than 1, the call's parameter `n` has the same value."""

    @property
    def header(self) -> str:
        """Value of the header `X-Fakevllm-Sibling` of the model call that samples these
        siblings."""
        last = self.first + self.num - 1
        indices = f"{self.first}-{last}" if self.num > 1 else f"{self.first}"
        return f"{self.group_id}/{indices}"

    @property
    def siblings(self) -> list[SiblingRef]:
        """References to these siblings, one by one, in the order of the call's choices."""
        return [SiblingRef(self.group_id, self.first + at) for at in range(self.num)]


def parse_siblings(header: str) -> SiblingRange:
    """Parse the value of the sibling header, which names one sibling or a range of siblings.

    Raises ValueError if the value has another form, or if the range is larger than a group can be.

    >>> parse_siblings("a/b/1-3")
    SiblingRange(group_id='a/b', first=1, num=3)
    """
    group_id, _, indices = header.rpartition("/")
    first, dash, last = indices.partition("-")
    if not dash:
        ref = parse_sibling(header)
        return SiblingRange(ref.group_id, ref.index)
    if not (group_id and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"{SIBLING_HEADER} must read <group id>/<first>-<last>, got {header!r}")
    num = int(last) - int(first) + 1
    if not 1 < num <= MAX_GROUP_SIZE:
        raise ValueError(f"{SIBLING_HEADER} must name 2 to {MAX_GROUP_SIZE} siblings: {header!r}")
    return SiblingRange(group_id, int(first), num)


class Task(BaseModel):
    """The problem that an agent solves in an episode, in the form of AgentJet (a framework for
    training agents).

    A group that a proxy samples for an app's request has a task, too. Such a task is only a label
    with metadata, for example the reference answer.
    """

    main_query: str = ""
    """Text of the task: for a dataset row, the value of its text field."""
    init_messages: list[Json] = Field(default_factory=list[Json])
    """Messages with which the agent's conversation begins."""
    task_id: str = ""
    """Id of the task."""
    env_type: str = ""
    """Name of the environment in which the agent works; empty for requests of apps."""
    metadata: Json = Field(default_factory=dict)  # a plain default would be copied for each request
    """Further facts about the task, such as the reference answer."""


# --- control plane


class SyncTrainConfigRequest(BaseModel):
    """A client's request that sends a training job to the server, as YAML."""

    yaml_as_string: str = Field(max_length=MAX_JOB_CHARS)


class ReplicaStatus(BaseModel):
    """The state of one rollout replica of the server."""

    name: str
    state: str
    """State of the replica: serving, draining, loading, suspect or starting."""
    version: int = 0
    """Version of the weights that the replica serves."""
    running: int = 0
    """Number of calls that the replica answers now."""
    waiting: int | None = None
    """Number of samples in the replica's queue, at most two seconds ago. A call for several
    siblings is several samples. None if the engine does not report it."""
    restarts: int = 0
    """Number of times that the replica was taken out and started again."""
    prefix_hit_share: float | None = None
    """Share of the prompt tokens that the replica found in its prefix cache. None if the engine
    does not report it."""
    cause: str | None = None
    """Reason why the replica was taken out last; None if it never was."""


class EngineStatusReply(BaseModel):
    """The state of the server, its run and its engine."""

    engine_status: EngineStatus
    engine_status_detail: str | None = None
    global_step: int | None = None
    """Number of the step for which groups are being collected. The first step has number 1."""
    server_id: str = ""
    """Id of the server process. Every start of the server makes a new one."""
    started_at: float | None = None
    """Unix time at which the server process started; None if the server does not report it."""
    rollout: str = ""
    """Name of the engine that samples, such as `vllm`; empty if the server does not report it."""
    trainer: str = ""
    """Name of the trainer, such as `verl`; empty if the server does not report it."""
    run_id: str = ""
    """Id of the run. The sequence numbers of the run log count the entries of this run."""
    weight_version: int = 0
    """Version of the weights that the engine serves."""
    backlog: float = 0.0
    """Number of batches that the finished groups would fill. A step is due at 1 or more."""
    closed: str | None = None
    """Reason why the run takes no more steps, such as `training_finished`; None while it takes
    steps. Groups that end after the run was closed are refused with this reason."""
    claims_paused: bool = False
    """Whether clients cannot claim new episodes now. Episodes that are already claimed continue."""
    lockstep: bool = False
    """Whether the job asks the server to make two runs with the same seed bit-identical."""
    async_steps: int = 0
    """Number of batches that the job collects ahead of the running training step. If it is at
    least 1, the status stays `ENGINE.ROLLING` during a step."""
    async_step_runs: bool = False
    """Whether a training step runs while the status is `ENGINE.ROLLING`."""
    totals: dict[str, float] = {}
    """Sums over all steps of the run, and ratios of these sums. The sums are over groups (with and
    without a difference between rewards), over tokens (sampled, eligible, trained, and untrainable
    by reason), and over branching calls by cause. A call branches if it does not continue an
    earlier call of its session."""
    dropped: dict[str, int] = {}
    """Number of the run's dropped groups by reason. A reason is shortened to the part before its
    first colon."""
    waiting: dict[str, int] = {}
    """Counts of data that is held and not trained yet: open groups, finished groups, partial tasks,
    and the tokens of all of them together."""
    model: str | None = None
    """Name of the model that the engine serves."""
    max_model_len: int | None = None
    """Context length of the engine, in tokens."""
    engine_version: str | None = None
    """Version that the engine's /version returns."""
    replicas: list[ReplicaStatus] = []
    """The rollout replicas; empty if the server has one rollout engine."""
    shares_calls: bool = False
    """Whether one call may sample several siblings, which the sibling header names as a range."""
    released: int = 0
    """Version of the weights that is released to apps; 0 before the first release."""
    num_releases: int = 0
    """Number of entries in the history of releases."""
    training_limit: int | None = None
    """Newest version that training may make; None without a limit. While `weight_version` is at
    least this number, training waits. A step that is already running when the limit is set is
    completed."""
    privacy: dict[str, Any] = {}
    """The settings for redaction of the server and its job together; {} if nothing is redacted."""

    @property
    def is_between_steps(self) -> bool:
        """Whether the engine collects groups, and no training step runs or is due."""
        is_rolling = self.engine_status is EngineStatus.ROLLING
        return is_rolling and not self.async_step_runs and self.backlog < 1

    @property
    def max_backlog(self) -> int:
        """Number of complete batches after which clients should wait with further work. With one
        complete batch, the trainer does not have to wait."""
        return max(1, self.async_steps)


class SuccessReply(BaseModel):
    """A reply that says whether the request succeeded, with the reason of a failure."""

    success: bool
    failure_reason: str = ""


class LoadPolicyRequest(BaseModel):
    """A request to load a version of the weights for sampling, or to unload it."""

    version: int = Field(ge=0)
    pinned: bool = False
    """Whether the version answers apps, and not only an evaluation. Such a version is kept for some
    minutes, even if evaluations load and unload versions meanwhile. The client repeats the request
    to keep the version for longer. In a request to unload the version, True means that the version
    no longer answers apps."""


class LoadPolicyReply(SuccessReply):
    """The server's reply to a LoadPolicyRequest."""

    model: str = ""
    """Model name with which calls are sampled by this version. Empty if the request failed."""
    is_temporary: bool = False
    """Whether the refusal is temporary: the server holds the maximum number of versions for other
    evaluations, and can load this version when one of these evaluations ends."""


# --- groups (passive traffic)


class EndGroupRequest(BaseModel):
    """The proxy's request that ends a group. The request contains the rewards of the group's
    siblings. The siblings are the answers that were sampled for one request of an app."""

    group_id: str = Field(min_length=1, max_length=200)
    task_id: str = ""
    rewards: list[Reward | None] = Field(max_length=MAX_GROUP_SIZE)
    """Rewards by sibling index. The server does not train a sibling whose reward is None."""
    served: int | None = Field(default=None, ge=0)
    """Index of the sibling whose answer the app received."""
    parent_id: str | None = None
    """Id of the group whose served answer is the previous turn of this group's conversation."""
    hook_hash: str = Field(default="", max_length=MAX_ID_CHARS)
    """Digest of the hook files (the user's code that scores answers); empty if it is unknown."""
    metadata: Json = {}


class CapturedCall(BaseModel):
    """One LLM call, with tokens and logprobs as the engine reported them.

    Token ids are sent as base64 of little-endian int32. Logprobs are sent as base64 of
    little-endian float32.
    """

    prompt_ids: str
    response_ids: str
    logprobs: str | None
    weight_versions: list[list[int]] = []
    """Spans [version, start, end). The weights of `version` sampled the tokens of the response with
    the indices `start` to `end` − 1."""
    temperature: float
    finish_reason: str | None
    untrainable: str | None = None
    """Reason why the loss leaves this call out; None if the call is trained."""
    shaped: bool = False
    """Whether tokens were sampled from less than the whole vocabulary. Only the server knows the
    allowed tokens."""
    prompt: int | None = None
    """Index of the prompt in the reply's list `prompts`, if the reply has such a list. In this
    case, `prompt_ids` is empty. None means that `prompt_ids` contains the prompt."""
    replica: str | None = None
    """Name of the rollout replica that sampled the call. None if the server has one rollout
    engine, or if the server is too old to send the name."""


class EndGroupReply(BaseModel):
    """The server's reply to EndGroupRequest, AddSampleRequest and AddDemonstrationRequest. It
    contains the captured LLM calls."""

    success: bool
    failure_reason: str = ""
    pooled: bool = False
    """Whether the group now waits to be trained."""
    step: int | None = None
    """Number of the step that was being collected when the group ended."""
    calls: list[list[CapturedCall]] = []
    """Captured calls by sibling index."""
    prompts: list[bytes] = Field(default=[], exclude=True)
    """The different prompts of the calls, each as int32 token ids. They are not in the JSON: see
    `separate_prompts`."""
    run_id: str = ""
    """Run to which the weight versions of the calls belong; empty if the group was refused."""
    job_hash: str = ""
    """Digest of the job for which the group was collected. Empty if the group was refused, or if
    the server is too old to send the digest."""

    def with_prompts_per_call(self) -> EndGroupReply:
        """Return the reply with each call's prompt inside the call. This form is for a client that
        does not ask for separate prompts."""
        packed = [b64encode(prompt).decode() for prompt in self.prompts]
        calls = [
            [
                call
                if call.prompt is None
                else call.model_copy(update={"prompt_ids": packed[call.prompt], "prompt": None})
                for call in own
            ]
            for own in self.calls
        ]
        return self.model_copy(update={"calls": calls, "prompts": []})

    @staticmethod
    def from_response(raw: bytes, sizes: Sequence[int]) -> EndGroupReply:
        """Parse a response whose body consists of separate prompts, followed by the reply as JSON.
        `sizes` has the size of each prompt in bytes. Raises ValueError if a call refers to a prompt
        that the response lacks."""
        ends = list(accumulate(sizes, initial=0))
        reply = EndGroupReply.model_validate_json(raw[ends[-1] :])
        prompts = [raw[begin:end] for begin, end in pairwise(ends)]
        indices = {call.prompt for own in reply.calls for call in own} - {None}
        if not indices <= set(range(len(prompts))):
            raise ValueError("a call refers to a prompt that is missing")
        return reply.model_copy(update={"prompts": prompts})


class AbortGroupRequest(BaseModel):
    """A request to discard a group that has not ended."""

    group_id: str = Field(min_length=1, max_length=200)


class AddSampleRequest(BaseModel):
    """A request to train a feedback sample (an answer that got feedback after its group had ended).

    The sample is trained alone, without the other answers of its group. The reply is an
    EndGroupReply. The server accepts each sample id only once.
    """

    sample_id: str = Field(min_length=1, max_length=300)
    """Id of the sample. It must differ from the id of every group."""
    run_id: str
    """Value of `run_id` in the EndGroupReply that contained the calls."""
    advantage: Reward
    """Advantage of every token. The sender has already subtracted the baseline."""
    calls: list[CapturedCall] = Field(min_length=1, max_length=MAX_SAMPLE_CALLS)


class DemonstrationIds(BaseModel):
    """A text to imitate or to avoid, as token ids. The ids are sent as in `CapturedCall`."""

    kind: Literal["plain", "chosen", "rejected"]
    prompt_ids: str
    response_ids: str


class AddDemonstrationRequest(BaseModel):
    """A request to train a user's edit of an answer. The request has one demonstration of the kind
    `plain` (the edit), or two demonstrations. The two are first the edit (`chosen`), then the
    answer before the edit (`rejected`).

    The reply is an EndGroupReply. The server accepts each sample id only once.
    """

    sample_id: str = Field(min_length=1, max_length=300)
    """Id of the demonstrations. It must differ from the ids of all groups and feedback samples."""
    run_id: str
    """Value of `run_id` in the EndGroupReply that contained the answer's calls."""
    demonstrations: list[DemonstrationIds] = Field(min_length=1, max_length=2)


class AddLoggedGroupRequest(BaseModel):
    """A request to train a logged group again, with new rewards. The group has the answers to one
    request that an app made in an earlier run. The server accepts each group id only once."""

    group_id: str = Field(min_length=1, max_length=200)
    rewards: list[Reward | None] = Field(min_length=1, max_length=MAX_GROUP_SIZE)
    """Rewards by sibling index. The server does not train a sibling whose reward is None."""
    calls: list[Annotated[list[CapturedCall], Field(max_length=MAX_SAMPLE_CALLS)]] = Field(
        max_length=MAX_GROUP_SIZE
    )
    """Captured calls by sibling index, as the ledger has them. Siblings without calls at the end of
    the list may be left out. The weight versions are those of the earlier run."""
    hook_hash: str = Field(default="", max_length=MAX_ID_CHARS)
    """Digest of the hook files that gave the rewards; empty if it is unknown."""


class AddLoggedGroupReply(BaseModel):
    """The server's reply to an AddLoggedGroupRequest."""

    success: bool
    failure_reason: str = ""
    pooled: bool = False
    """Whether the group now waits to be trained."""
    step: int = 0
    """Number of the step that was being collected when the group arrived."""
    is_due: bool = False
    """Whether this step had enough groups with this group. The sender waits for the end of the step
    before it sends the next group, so that the steps of two runs have equal groups."""


class TrainedGroup(BaseModel):
    """A group that was trained, with the indices of the siblings (answers) that were in the
    loss."""

    group_id: str
    siblings: list[int]
    """Indices of the siblings that went into the loss."""
    advantages: list[float] = []
    """Mean advantage over the trained tokens of each of these siblings, in the order of
    `siblings`."""


class LogEntry(BaseModel):
    """One entry of a training run's log."""

    seq: int
    """Sequence number, which grows from entry to entry."""
    kind: str
    """Kind of the entry: acked, step, evaluated, dropped, restored or stopped. A newer server may
    send other kinds; a reader skips a kind that it does not know."""
    step: int = 0
    version: int = 0
    groups: list[TrainedGroup] = []
    """Kind acked: groups accepted for training. Kind step: groups that the step trained."""
    lost: list[str] = []
    """Kind restored: ids of groups whose training was lost with the server process."""
    reasons: dict[str, str] = {}
    """Kind dropped: reasons by group id."""
    reason: str = ""
    """Kind stopped: reason why the run takes no more steps. Kind restored: reason why the lost
    groups are not trained again; empty if they are trained again."""
    metrics: dict[str, float] = {}
    """Kind step: the measured values; a value that was not measured is absent. Kind evaluated:
    `reward`, the result of one evaluation with the weights of `step` and `version`."""
    hooks: list[str] = []
    """Kind step: digests of the hook files that gave the rewards. The list is empty if all rewards
    came from active clients or from older proxies."""
    job: str = ""
    """Kind step: digest of those settings of the job that change the meaning of a reward."""
    changed: str = ""
    """Kind step: what changed since the step before, such as `the hooks changed`. If it is not
    empty, the rewards of this step cannot be compared with earlier rewards."""
    at: float | None = None
    """Kind evaluated: the end of the evaluation, in Unix seconds."""

    @field_serializer("metrics", when_used="json")
    def _metrics_as_json(self, metrics: dict[str, float]) -> dict[str, float | str]:
        return jsonable_numbers(metrics)


class LogReply(BaseModel):
    """The server's reply with some entries of a training run's log."""

    entries: list[LogEntry]


# --- episodes (active clients)


class ClaimEpisodeRequest(BaseModel):
    """A client's request to claim an episode. A claim reserves the episode for this client."""

    client_uuid: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    episode_type: str = Field(max_length=MAX_ID_CHARS)
    discard_episode_timeout: float = Field(default=240.0, gt=0, le=MAX_IDLE_S)
    """Seconds without activity after which the server ends the claim."""
    throttle_policy: ThrottlePolicy | None = None
    idempotency_key: str = Field(default="", max_length=MAX_ID_CHARS)
    """Idempotency key. Requests with the same key get the same claim as long as the claim
    exists."""


class ClaimEpisodeReply(BaseModel):
    """The server's reply to a claim of an episode. It contains the episode's URL and API key, or
    the cause of the failure."""

    success: bool
    client_uuid: str
    episode_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""


class WorkflowOutput(BaseModel):
    """The result of an episode, in the form in which AgentJet's workflows return it."""

    reward: Reward | list[Reward] | None = None
    is_success: bool | None = None
    metadata: Json = {}
    log_metrics: dict[str, Metric] = {}


class EndEpisodeRequest(BaseModel):
    """A client's request that ends an episode. It contains the episode's reward."""

    client_uuid: str
    episode_uuid: str
    task_id: str = Field(default="", max_length=MAX_TASK_CHARS)
    workflow_output: WorkflowOutput = WorkflowOutput()
    declare_client_active: bool = True


class EndEpisodeReply(BaseModel):
    """The server's reply to a request that ends an episode."""

    success: bool
    warning: str = ""
    """Text about a likely mistake of the client. Without a warning, the text is empty, and the JSON
    does not have this field."""


class CanContinueRequest(BaseModel):
    """A client's request to check whether its claim of an episode is still valid."""

    client_uuid: str
    episode_uuid: str
