"""Checks of a server's journal against the notes of the clients that ended episodes.

The checks must pass no matter which process was killed meanwhile.
"""

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
    """Check that no acknowledged end is lost or counted twice, and that each end was sent."""
    sent = {uuid: body for client in notes for uuid, body in client.sent.items()}
    ended = {uuid for client in notes for uuid in client.ended}
    refused = {uuid for client in notes for uuid in client.refused}
    samples = {
        owner: (reward, task_id, group_id)
        for owner, reward, task_id, group_id in rows(
            run_dir, "SELECT owner, reward, task_id, group_id FROM samples"
        )
    }
    assert ended <= set(samples), "an acknowledged end is lost"
    assert set(samples) <= set(sent), "an end was never sent"
    assert not refused & set(samples), "a refused end was counted"
    for uuid, (reward, task_id, _) in samples.items():
        expected = sent[uuid]["workflow_output"]["reward"], sent[uuid]["task_id"]
        assert expected == (reward, task_id), uuid
    _check_episodes(run_dir, ended, samples)
    _check_groups(run_dir, samples)


def _check_episodes(run_dir: Path, ended: set[str], samples: dict[str, Any]) -> None:
    query = "SELECT episode_id, epoch, state FROM episodes"
    states = {f"{name}{epoch:04x}": state for name, epoch, state in rows(run_dir, query)}
    assert {uuid for uuid, state in states.items() if state == "ended"} == set(samples)
    keys = [key for (key,) in rows(run_dir, "SELECT key FROM submissions")]
    assert Counter(keys) == Counter(f"episode:{uuid}" for uuid in samples)


def _check_groups(run_dir: Path, samples: dict[str, Any]) -> None:
    """Check that each group is complete, has one task, and is trained in at most one step.

    The log has a step twice only if the step was rolled back.
    """
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
    steps = _valid_steps(run_dir)
    logged = Counter(name for names in steps.values() for name in names)
    assert consumed and logged == Counter(list(consumed)), "a group is not in the log once"
    assert all(name in steps[step] for name, step in consumed.items())


def _valid_steps(run_dir: Path) -> dict[int, list[str]]:
    """Return the groups of each step in the log that was not rolled back."""
    valid: dict[int, list[str]] = {}
    for (entry_json,) in rows(run_dir, "SELECT entry_json FROM entries ORDER BY seq"):
        entry = LogEntry.model_validate_json(entry_json)
        if entry.kind == "restored":
            valid = {step: names for step, names in valid.items() if step <= entry.step}
        if entry.kind == "step":
            valid[entry.step] = [group.group_id for group in entry.groups]
    return valid


def rows(run_dir: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{run_dir}/journal.sqlite?mode=ro", uri=True)) as db:
        return db.execute(query).fetchall()
