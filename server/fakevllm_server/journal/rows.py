"""The values that the journal stores, and the conversion of captured calls to rows and back.

The conversion is exact: the call that is read equals the call that was written, bit by bit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from fakevllm_adapters.protocol.releases import ReleaseRecord
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.types.calls import RecordedCall, VersionSpan
from fakevllm_server.types.number_arrays import float_array, id_array
from fakevllm_server.types.token_masks import TokenMasks

CallRow = tuple[bytes, bytes, bytes | None, str, bytes]
"""A captured call: the prompt's ids, the response's ids, the log-probabilities, the facts, and the
digest. See the table `calls`, in which the first four are compressed."""
_DIGEST_BYTES = 8


NUM_HASHED = 8
"""Number of prompts whose hashes are kept in memory. The calls of a group have the same prompt, and
several groups are sampled at the same time."""


class CorruptCall(Exception):
    """Error for a stored call that does not match its stored digest."""


class CallRows:
    """The conversion of captured calls to rows. The hashes of the latest prompts are kept, because
    the calls of a group usually share one prompt. Hashing a long prompt costs more than all other
    work of the conversion."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[Sequence[int], bytes, hashlib.blake2b]] = deque(
            maxlen=NUM_HASHED
        )
        """Latest prompts: the ids, the same ids as bytes, and the hash of these bytes."""

    def row(self, call: RecordedCall) -> CallRow:
        """Return a captured call as the values that are stored."""
        prompt, hashed_prompt = self._hashed(call.prompt_ids)
        response_ids, logprobs, facts = _response_columns(call)
        hashed = hashed_prompt.copy()
        for part in (response_ids, None if logprobs is None else logprobs.tobytes(), facts):
            _hash_part(hashed, part)
        stored = None if logprobs is None else _shortest(logprobs)
        return prompt, response_ids, stored, facts, hashed.digest()

    def _hashed(self, prompt_ids: Sequence[int]) -> tuple[bytes, hashlib.blake2b]:
        """Return the bytes of a prompt, and their hash. The result is cached for the array object
        `prompt_ids`. An equal array that is another object is hashed again, because comparing two
        arrays takes as long as hashing one."""
        for known, prompt, hashed in self._prompts:
            if known is prompt_ids:
                return prompt, hashed
        prompt = id_array(prompt_ids).tobytes()
        hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        _hash_part(hashed, prompt)
        self._prompts.append((prompt_ids, prompt, hashed))
        return prompt, hashed


def call_row(call: RecordedCall) -> CallRow:
    """Return one captured call as the values that are stored.

    To convert many calls, use one `CallRows` object, which is faster.
    """
    return CallRows().row(call)


def _response_columns(call: RecordedCall) -> tuple[bytes, array[float] | None, str]:
    """Return the token ids of the response, the log-probabilities and the other facts."""
    logprobs = None if call.logprobs is None else array("d", call.logprobs)
    values = {
        "versions": [[span.version, span.start, span.end] for span in call.versions],
        "temperature": call.temperature,
        "finish_reason": call.finish_reason,
        "untrainable": call.untrainable,
        "allowed": None if call.allowed is None else call.allowed.to_wire(),
        "replica": call.replica,
    }
    known = {name: value for name, value in values.items() if value is not None}
    return id_array(call.response_ids).tobytes(), logprobs, orjson.dumps(known).decode()


def parse_call_row(row: CallRow) -> RecordedCall:
    """Return the captured call that `call_row` converted to this row. Raises CorruptCall if the
    row's values do not match its digest."""
    prompt_ids, response_ids, stored_logprobs, facts_json, digest = row
    logprobs = stored_logprobs
    if stored_logprobs is not None and len(stored_logprobs) == len(response_ids):
        logprobs = array("d", array("f", stored_logprobs)).tobytes()
    if _digest(prompt_ids, response_ids, logprobs, facts_json) != digest:
        raise CorruptCall
    facts: dict[str, Any] = orjson.loads(facts_json)
    allowed = facts.get("allowed")
    return RecordedCall(
        prompt_ids=id_array(array("i", prompt_ids)),
        response_ids=id_array(array("i", response_ids)),
        logprobs=None if logprobs is None else float_array(array("d", logprobs)),
        versions=[VersionSpan(*span) for span in facts["versions"]],
        temperature=facts["temperature"],
        finish_reason=facts.get("finish_reason"),
        untrainable=facts.get("untrainable"),
        allowed=None if allowed is None else TokenMasks.from_wire(allowed),
        replica=facts.get("replica"),
    )


def _shortest(logprobs: array[float]) -> bytes:
    """Return log-probabilities as float32 if no precision is lost, else as float64."""
    short = array("f", logprobs)
    return short.tobytes() if array("d", short) == logprobs else logprobs.tobytes()


def _digest(*parts: bytes | str | None) -> bytes:
    hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        _hash_part(hashed, part)
    return hashed.digest()


def _hash_part(hashed: hashlib.blake2b, part: bytes | str | None) -> None:
    raw = part.encode() if isinstance(part, str) else part or b""
    size = -1 if part is None else len(raw)
    hashed.update(size.to_bytes(8, "little", signed=True))
    hashed.update(raw)


PRUNED = "pruned_to_step"
"""Key in the table `meta`. The value is the number of the last step whose calls were deleted."""
ANSWERING = "answering_versions"
"""Key in the table `meta`. The value is a list of the versions that answer apps as policies
(versions that the engine holds beside the served weights)."""
TRAINING_LIMIT = "training_limit"
"""Key in the table `meta`. The value is the newest version that training may make. Without the key,
there is no limit."""


@dataclass(frozen=True, slots=True)
class Submission:
    """An acknowledged request and its reply. If the client repeats the request, it gets this reply
    again."""

    key: str
    body_hash: bytes
    reply_json: str


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sibling (one answer of a group) or an episode with its reward. The captured calls of the
    sample are stored under the same `owner`."""

    owner: str
    index: int
    reward: float | None
    task_id: str | None = None


@dataclass(frozen=True, slots=True)
class PooledGroup:
    """A group that has ended, with its state. In the state `pooled`, the group waits for training.
    In the state `dropped`, it is not trained, and `reason` says why."""

    group_id: str
    state: GroupState
    reason: str | None = None
    advantage: float | None = None
    hook_hash: str = ""
    """Digest of the hook files that gave the rewards; empty if it is unknown."""
    demonstrates: str | None = None
    """Demonstration loss of a group that was made from a user's edit; None for other groups."""
    is_logged: bool = False
    """Whether this is a logged group, which is a group of an earlier run."""


def pooled_or_dropped(
    group_id: str,
    reason: str | None,
    advantage: float | None = None,
    hook_hash: str = "",
    demonstrates: str | None = None,
    *,
    is_logged: bool = False,
) -> PooledGroup:
    """Return the row of a group that has ended. The state of the group is `dropped` if `reason` is
    not empty, and otherwise `pooled`."""
    state = GroupState.DROPPED if reason else GroupState.POOLED
    return PooledGroup(
        group_id, state, reason or None, advantage, hook_hash, demonstrates, is_logged
    )


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint as it is recorded in the journal."""

    step: int
    folder: str
    version: int
    digest: str
    reward_mean: float | None


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """An entry of the history of releases, as it is recorded in the journal."""

    record: ReleaseRecord
    request_hash: bytes
    """Hash of the request's kind and body."""
    newest: int
    """Highest version at the time of the decision."""
    restored: int | None = None
    """Version to which training went back; None if training did not go back."""
    is_rollback: bool = False
    """Whether the request was a rollback."""
    pinned: Sequence[int] | None = None
    """Further versions whose checkpoints are kept; None if the decision does not change these
    versions."""


@dataclass(frozen=True, slots=True)
class TrainingReturn:
    """A return of training to the earlier version `version`."""

    step: int
    """Step of the version to which training goes back."""
    common_step: int
    """Last step that `version` (to which training goes back) and the newest version have in common.
    It is `step` if the newest version was trained from `version`. It is an earlier step if an
    earlier return of training has removed `version` from the run."""
    version: int
    kept: Collection[int]
    """Versions whose checkpoints are kept, even if the versions are not part of the run after the
    return. Such checkpoints become side checkpoints."""


@dataclass(frozen=True, slots=True)
class VersionChange:
    """An entry of the run log that made a version of the weights."""

    seq: int
    version: int
    step: int
    """Step that trained the weights, or whose weights were restored."""
    is_step: bool
    """Whether a training step made the version. If not, earlier weights were restored under this
    version."""
    is_discarding: bool = False
    """For a restored version: whether the steps after the restored step were discarded. If not,
    these steps are trained again with the same batches."""
    restored: int | None = None
    """Version to which training went back because of a decision. None for a training step, and for
    a restart after a crash."""


def groups_hash(group_ids: Sequence[str]) -> str:
    """Return a hash of the ids of the groups in a batch. The hash also depends on the order of the
    groups."""
    return hashlib.sha256("\n".join(group_ids).encode()).hexdigest()
