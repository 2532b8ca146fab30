"""Read logged groups with their tokens and with new rewards. The new rewards are from other hooks
than at sampling time. A group is a request with the answers (siblings) that were sampled for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.groups.sibling_selection import with_floor
from fakevllm.hooks.results import hook_reason
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.redacted_records import REDACTED
from fakevllm.ledger.store import Ledger
from fakevllm.rescoring.logged_groups import LoggedGroup
from fakevllm.settlement.held_out_groups import HELD_OUT
from fakevllm_adapters.protocol.swarm import MAX_SAMPLE_CALLS, CapturedCall, Task

Calls = Mapping[int, Sequence[CapturedCall]]
UNKNOWN_TOKEN_SETS = (
    "unknown_token_sets: the ledger does not say whether the call's tokens were restricted"
)
"""Reason why a call of an early version of fakevllm is not trained. If its tokens were restricted,
its importance weights would be wrong."""


class NotTrained(Exception):
    """Raised for a group that cannot be trained again. The message is a slug (short name) of the
    reason."""


@dataclass(frozen=True, slots=True)
class TrainableGroup:
    """A logged group with everything that a training step needs."""

    record: GroupRecord
    rewards: list[float | None]
    """Rewards of the new hooks, by the index of the sibling."""
    calls: list[list[CapturedCall]]
    """Model calls by the index of the sibling."""

    @property
    def versions(self) -> list[int]:
        """The weight versions that sampled the group's tokens."""
        spans = (span for own in self.calls for call in own for span in call.weight_versions)
        return sorted({span[0] for span in spans})


@dataclass(frozen=True, slots=True)
class GroupReader:
    """Reads groups (requests with their sampled answers) from one ledger, the proxy's database. All
    rewards are from the hooks whose content hash is `hook_hash`."""

    ledger: Ledger
    hook_hash: str
    """Content hash of the hooks. The ledger has their rewards in the table `rescored`."""
    failure_floor: float | None
    """Reward of unusable answers: the setting `reward.failure_floor`."""
    held_out: HeldOutRows
    tasks: Mapping[str, Task]
    """Rows of the dataset file by the ids of their tasks."""

    def read(self, group_id: str) -> TrainableGroup:
        """Read a group (a request with its sampled answers) from the ledger, the proxy's database.
        Raises NotTrained if the group must not or cannot be trained. Raises one of READ_ERRORS
        if the group's rows in the ledger are damaged."""
        record = self.ledger.group(group_id)
        if record is None:
            raise KeyError("the group is not in the ledger any more")
        if (record.reason or "").partition(":")[0] == HELD_OUT or self._quotes_row(record):
            raise NotTrained(HELD_OUT)
        find_task = partial(self.ledger.task, rows=self.tasks)
        group = LoggedGroup.read(self.ledger, group_id, find_task)
        known, reason = self.ledger.rescored.find(group_id, self.hook_hash)
        if reason is not None:
            raise NotTrained(hook_reason(reason) or "hook_failed")
        indices = group.recorded.indices
        rewards = with_floor([known.get(i) for i in indices], group.failures, self.failure_floor)
        by_index = dict(zip(indices, rewards, strict=True))
        calls = self._calls(record)
        _check_calls(calls)
        num = 1 + max([*by_index, *calls])
        return TrainableGroup(
            record,
            [by_index.get(index) for index in range(num)],
            [calls.get(index, []) for index in range(num)],
        )

    def _calls(self, record: GroupRecord) -> dict[int, list[CapturedCall]]:
        """Return the calls that have tokens, by the index of the sibling (sampled answer). Siblings
        without such calls are absent. A call has no tokens if its request or its answer was
        redacted.

        Some texts may have been stored before redaction was turned on. Therefore all stored texts
        are searched for matches again. Raises NotTrained if the request has a text that must be
        redacted.
        """
        hidden = self.ledger.parts_to_redact(record)
        if hidden.has_request:
            raise NotTrained(REDACTED)
        by_sibling = self.ledger.calls.by_sibling(record.group_id, unknown_sets=UNKNOWN_TOKEN_SETS)
        return {
            index: with_tokens
            for index, own in by_sibling.items()
            if index not in hidden.siblings
            and (with_tokens := [call for call in own if call.prompt_ids])
        }

    def _quotes_row(self, record: GroupRecord) -> bool:
        """Return True if the group quotes a held-out dataset row. The row may have been held out
        after the ledger recorded the group, so the texts are compared again."""
        if not self.held_out:
            return False
        task = self.ledger.task(record.task_id or "", self.tasks)
        texts = self.ledger.user_texts(record.group_id)
        return self.held_out.are_quoted(*texts, *([] if task is None else [task.main_query]))


def _check_calls(calls: Calls) -> None:
    if not calls:
        raise NotTrained("no_calls")
    if max(map(len, calls.values())) > MAX_SAMPLE_CALLS:
        raise NotTrained("too_many_calls")
