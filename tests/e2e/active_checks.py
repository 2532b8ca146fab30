"""What a server's journal must say of ends that were sent to it, whoever died meanwhile."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fakevllm_adapters.protocol.swarm import LogEntry
from tests.e2e.active_client import NUM_REPEAT, Notes


def check(run_dir: Path, notes: Sequence[Notes]) -> None:
    """No acknowledged end is lost, none counts twice, and none appears that nobody sent."""
    sent = {uuid: body for one in notes for uuid, body in one.sent.items()}
    ended = {uuid for one in notes for uuid in one.ended}
    refused = {uuid for one in notes for uuid in one.refused}
    samples = {
        owner: (reward, task_id, group_id)
        for owner, reward, task_id, group_id in rows(
            run_dir, "SELECT owner, reward, task_id, group_id FROM samples"
        )
    }
    assert ended <= set(samples), "acknowledged, and lost"
    assert set(samples) <= set(sent), "nobody sent it"
    assert not refused & set(samples), "refused, and taken"
    for uuid, (reward, task_id, _) in samples.items():
        told = sent[uuid]["workflow_output"]["reward"], sent[uuid]["task_id"]
        assert told == (reward, task_id), uuid
    _check_episodes(run_dir, ended, samples)
    _check_groups(run_dir, samples)


def _check_episodes(run_dir: Path, ended: set[str], samples: dict[str, Any]) -> None:
    query = "SELECT episode_id, epoch, state FROM episodes"
    states = {f"{name}{epoch:04x}": state for name, epoch, state in rows(run_dir, query)}
    assert {uuid for uuid, state in states.items() if state == "ended"} == set(samples)
    keys = [key for (key,) in rows(run_dir, "SELECT key FROM submissions")]
    assert Counter(keys) == Counter(f"episode:{uuid}" for uuid in samples)


def _check_groups(run_dir: Path, samples: dict[str, Any]) -> None:
    """Each is of one task, whole, and trained in one step at most; each step is told once more only
    where it was taken back."""
    members: dict[str, list[str]] = {}
    for _, task_id, group_id in samples.values():
        if group_id is not None:
            members.setdefault(group_id, []).append(task_id)
    query = "SELECT group_id, state, reason, step FROM groups"
    groups = {name: (state, reason, step) for name, state, reason, step in rows(run_dir, query)}
    assert set(groups) == set(members)
    assert all(len(tasks) == NUM_REPEAT for tasks in members.values())
    assert all(len(set(tasks)) == 1 for tasks in members.values())
    assert all(reason for state, reason, _ in groups.values() if state == "dropped")
    consumed = {name: step for name, (state, _, step) in groups.items() if state == "consumed"}
    steps = _standing_steps(run_dir)
    told = Counter(name for names in steps.values() for name in names)
    assert consumed and told == Counter(list(consumed)), "not each once"
    assert all(name in steps[step] for name, step in consumed.items())


def _standing_steps(run_dir: Path) -> dict[int, list[str]]:
    """Groups by step, as the log tells it."""
    standing: dict[int, list[str]] = {}
    for (entry_json,) in rows(run_dir, "SELECT entry_json FROM entries ORDER BY seq"):
        entry = LogEntry.model_validate_json(entry_json)
        if entry.kind == "restored":
            standing = {step: names for step, names in standing.items() if step <= entry.step}
        if entry.kind == "step":
            standing[entry.step] = [one.group_id for one in entry.groups]
    return standing


def rows(run_dir: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{run_dir}/journal.sqlite?mode=ro", uri=True)) as db:
        return db.execute(query).fetchall()
