"""Logged groups, in the form in which hooks can score them again. A group is a request with the
answers (siblings) that were sampled for it. The groups are read from the ledger, the proxy's
database."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from fakevllm.groups.sibling_selection import with_floor
from fakevllm.hooks.recorded_group import RecordedGroup
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.redacted_records import has_marker
from fakevllm.rescoring.comparison import RescoredGroup
from fakevllm_adapters.protocol.swarm import Task

MIN_ANSWERS = 2
"""Minimum number of answers of a group that can be scored. A single answer cannot be compared with
any other."""


class GroupSource(Protocol):
    """An open ledger (a proxy's database) from which groups are read."""

    def group(self, group_id: str) -> GroupRecord | None: ...

    def recorded(self, group: GroupRecord, task: Task | None = None) -> RecordedGroup: ...


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """A group (a request with its answers) from the ledger, with its recorded rewards. All lists
    are in the order in which hooks get the answers."""

    recorded: RecordedGroup
    rewards: Sequence[float | None]
    failures: Sequence[str | None]
    """For each sibling, the reason why its answer is not usable; None for a usable answer."""
    served: int | None
    """Position of the sibling that the app got because its reward was the highest. None if the app
    got another answer."""
    greedy: int | None
    """Position of the sibling that was sampled at temperature 0; None if there is none."""
    lacks_task: bool
    """Whether the group belongs to a dataset task that is unknown."""
    is_redacted: bool
    """Whether a text of the request or of an answer was redacted. Hooks had the whole text when the
    group was live."""

    @property
    def answers(self) -> list[Hashable]:
        """The group's answers as JSON in a canonical form, so that equal answers have equal
        bytes."""
        return [orjson.dumps(one, option=orjson.OPT_SORT_KEYS) for one in self.recorded.answers]

    @staticmethod
    def of(group: GroupRecord, recorded: RecordedGroup, task: Task | None) -> LoggedGroup:
        """Create a LoggedGroup. `group` is the group's record in the ledger (the proxy's database).
        `recorded` is the same group in the form in which hooks get it. `task` is the group's
        dataset task. `task` is None if the group has no task, or if the task is unknown."""
        by_index = {sibling.index: sibling for sibling in group.siblings}
        siblings = [by_index[index] for index in recorded.indices]
        served = (i for i, sibling in enumerate(siblings) if sibling.served)
        has_greedy_lead = group.served_by == "greedy" and 0 in recorded.indices
        return LoggedGroup(
            recorded,
            [sibling.reward for sibling in siblings],
            [sibling.failure for sibling in siblings],
            next(served, None) if group.served_by == "best" else None,
            recorded.indices.index(0) if has_greedy_lead else None,
            bool(group.task_id) and task is None,
            has_marker([group.request_json, group.question])
            or any(has_marker([one.text, one.message_json]) for one in group.siblings),
        )

    @staticmethod
    def read(
        ledger: GroupSource, group_id: str, find_task: Callable[[str], Task | None]
    ) -> LoggedGroup:
        """Read a logged group from the ledger (the proxy's database). `find_task(task_id)` returns
        the dataset task with this id, or None if there is no such task. Raises one of READ_ERRORS
        if the group cannot be read."""
        record = ledger.group(group_id)
        if record is None:
            raise KeyError("the group is not in the ledger any more")
        task = find_task(record.task_id) if record.task_id else None
        return LoggedGroup.of(record, ledger.recorded(record, task), task)

    def rescored(
        self,
        rewards: Sequence[float | None] | None,
        reason: str | None,
        failure_floor: float | None,
        *,
        is_known: bool = False,
    ) -> RescoredGroup:
        """Combine the group with the rewards that other hooks gave to the group's answers, and
        return the result. If these hooks failed, `rewards` is None and `reason` says why.
        `failure_floor` is the setting `reward.failure_floor`."""
        if rewards is not None:
            rewards = with_floor(rewards, self.failures, failure_floor)
        return RescoredGroup(
            self.recorded.request_id,
            self.rewards,
            rewards,
            reason,
            self.served,
            self.greedy,
            is_known,
            self.lacks_task,
            self.answers,
        )
