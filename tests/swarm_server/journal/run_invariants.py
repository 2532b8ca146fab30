"""Invariants that hold at any moment of a run, also after kills and crashes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.journal import reads
from fakevllm_server.journal.rows import PRUNED
from tests.swarm_server.journal.client_records import ClientRecords
from tests.swarm_server.journal.server_process import ServerProcess


class RunInvariants:
    """Compares the journal, the memory and the trainer's weights with the clients' records."""

    def __init__(self, process: ServerProcess, records: ClientRecords) -> None:
        self._process = process
        self._records = records

    def check(self) -> None:
        pending = self._process.waiting()
        self._memory_and_file_agree(pending)
        self._episodes_are_conserved(pending)
        self._open_groups_have_all_their_calls(pending)
        self._acknowledged_requests_have_an_effect(pending)
        self._tasks_are_complete(pending)
        self._waiting_groups_have_all_their_calls(pending)
        self._no_unneeded_call_is_kept(pending)
        self._each_group_was_trained_once()
        self._every_call_of_a_trained_group_was_trained()

    def _memory_and_file_agree(self, pending: reads.PendingWork) -> None:
        intake = self._process.intake
        assert intake.pool.num_finished == len(pending.groups)
        assert intake.pool.num_open == len(pending.open_groups)
        assert intake.episodes.num_claimed == len(pending.claimed)
        assert pending.corrupt == []

    def _episodes_are_conserved(self, pending: reads.PendingWork) -> None:
        states = self._states("SELECT episode_id, state FROM episodes")
        records = self._records
        claimed = {claim.episode_id for claim in records.claims.values()}
        ended = {one.claim.episode_id for one in records.ended.values()}
        expected = {
            **dict.fromkeys(claimed, "claimed"),
            **dict.fromkeys(records.open_episodes, "open"),
            **dict.fromkeys(ended, "ended"),
        }
        assert states == expected
        assert len(claimed) + len(records.open_episodes) + len(ended) == records.num_created
        found = {one.uuid: (one.key, one.kind, one.calls) for one in pending.claimed}
        assert found == {
            one.uuid: (one.key, one.kind, one.calls) for one in records.claims.values()
        }

    def _open_groups_have_all_their_calls(self, pending: reads.PendingWork) -> None:
        assert pending.open_groups == {
            name: {index: calls for index, calls in group.items() if calls}
            for name, group in self._records.open_groups.items()
        }

    def _acknowledged_requests_have_an_effect(self, pending: reads.PendingWork) -> None:
        states = self._states("SELECT group_id, state || COALESCE(':' || reason, '') FROM groups")
        trainable_states = {"pooled", "planned", "consumed", "dropped:lost_with_checkpoint"}
        for name in self._records.ended_groups:
            assert states.get(name) in trainable_states
        for name in self._records.aborted_groups:
            assert states.get(name) == "dropped:aborted"
        samples = self._states("SELECT owner, group_id FROM samples")
        waiting = {sample.owner: calls for sample, calls in pending.samples}
        for uuid, one in self._records.ended.items():
            group_id = samples[uuid]
            if one.claim.kind == "eval":
                assert states[group_id] == "eval"
            elif group_id is None:
                assert waiting.pop(uuid) == one.claim.calls
            else:
                assert states[group_id] in trainable_states or states[group_id].startswith(
                    "dropped:"
                )
        assert waiting == {}

    def _tasks_are_complete(self, pending: reads.PendingWork) -> None:
        num_repeat = self._process.job.num_repeat
        waiting = Counter(sample.task_id for sample, _ in pending.samples)
        assert all(num < num_repeat for num in waiting.values())
        for name, owners in self._process.journal.read(_owners).items():
            ended = [self._records.ended[owner] for owner in owners if owner in self._records.ended]
            is_left = frozenset(owners) in self._records.partial_tasks
            assert is_left or not name.startswith("task:") or len(ended) == num_repeat
            assert len({one.task_id for one in ended}) <= 1

    def _waiting_groups_have_all_their_calls(self, pending: reads.PendingWork) -> None:
        batches = self._process.journal.read(reads.planned_batches, [])
        for group in [*pending.groups, *(one for batch in batches for one in batch.groups)]:
            assert group.episodes
            for episode in group.episodes:
                assert list(episode.calls) == self._records.calls_of(episode.owner)

    def _no_unneeded_call_is_kept(self, pending: reads.PendingWork) -> None:
        needed = {claim.uuid for claim in pending.claimed}
        needed |= {sample.owner for sample, _ in pending.samples}
        for name, group in pending.open_groups.items():
            needed |= {SiblingRef(name, index).episode_id for index in group}
        needed |= set(self._states(_NEEDED, self._process.journal.read(reads.meta, PRUNED) or 0))
        assert set(self._states("SELECT owner, COUNT(*) FROM calls GROUP BY owner")) <= needed

    def _each_group_was_trained_once(self) -> None:
        """Check that each group was trained once, and in the planned order."""
        weights = self._process.trainer.weights
        done = self._process.journal.read(_done)
        trained = [list(dict.fromkeys(name for name, _ in calls)) for calls in weights]
        assert trained == done
        names = [name for step in trained for name in step]
        assert len(names) == len(set(names))
        consumed = self._states("SELECT group_id, state FROM groups WHERE state = 'consumed'")
        assert set(consumed) == set(names)
        assert self._process.log.last_step == len(done)

    def _every_call_of_a_trained_group_was_trained(self) -> None:
        owners = self._process.journal.read(_owners)
        for calls in self._process.trainer.weights:
            expected = Counter(
                (name, tuple(one.response_ids))
                for name in {name for name, _ in calls}
                for owner in owners[name]
                for one in self._records.calls_of(owner)
            )
            assert Counter((name, tuple(ids)) for name, ids in calls) == expected

    def _states(self, query: str, *values: Any) -> dict[str, Any]:
        assert self._process.journal.drain()
        rows = self._process.journal.read(lambda db: db.exec_driver_sql(query, values).all())
        return {name: state for name, state in rows}


_NEEDED = (
    "SELECT s.owner, g.state FROM samples s JOIN groups g ON g.group_id = s.group_id "
    "WHERE g.state IN ('pooled', 'planned') OR (g.state = 'consumed' AND g.step > ?)"
)


def _done(db: Any) -> list[list[str]]:
    query = (
        "SELECT b.step, g.group_id FROM batches b JOIN groups g ON g.step = b.step "
        "WHERE b.state = 'done' AND g.state = 'consumed' ORDER BY b.step, g.position"
    )
    steps: dict[int, list[str]] = {}
    for step, name in db.exec_driver_sql(query).all():
        steps.setdefault(step, []).append(name)
    assert list(steps) == list(range(1, len(steps) + 1))
    return list(steps.values())


def _owners(db: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    query = "SELECT group_id, owner FROM samples WHERE group_id IS NOT NULL"
    for name, owner in db.exec_driver_sql(query).all():
        found.setdefault(name, []).append(owner)
    return found
