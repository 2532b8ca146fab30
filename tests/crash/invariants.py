"""Invariants V1 to V7 of the journal, which hold for every run, whatever faults it had.

Each function reads the files of the run directory, including the client's own file. It reads
nothing from the server's memory. The script ends with a clean stop, so the newest checkpoint
contains all that was trained.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crash.client import Ack
from crash.fork_server import ForkServer
from crash.run_files import RunFiles
from crash.server_process import open_swarm

from fakevllm_adapters.protocol.swarm import AddSampleRequest, EndEpisodeRequest, EndGroupRequest
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.types.calls import RecordedCall

ENDS = {"consumed", "dropped", "eval"}
ID_CHARS = 28
"""Number of characters of the episode's id in a claim's uuid. The other characters are the claim's
epoch."""


def v1_acknowledged_is_accounted_for(run: RunFiles) -> None:
    """V1: nothing that was acknowledged is lost.

    * Each acknowledged end has a group that waits, is trained, or is dropped with a reason.
    * Each acknowledged claim has an episode.
    * Each acknowledged call is kept while its group may train, and is trained if its group is.
    """
    for ack in run.acks_of_kind("end_group") + run.acks_of_kind("add_sample"):
        request = ack["request"]
        _check_group(run, request.get("group_id") or request["sample_id"])
    for ack in run.acks_of_kind("abort_group"):
        assert run.states[ack["group_id"]] == ("dropped", "aborted"), ack
    for ack in run.acks_of_kind("end_episode"):
        uuid = ack["request"]["episode_uuid"]
        rows = run.rows("SELECT group_id, reward FROM samples WHERE owner = ?", uuid)
        assert rows, f"the end of {uuid} was acknowledged and is lost"
        ((group_id, reward),) = rows
        assert reward == ack["reward"]
        if group_id is not None:
            _check_group(run, group_id)
    for ack in run.acks_of_kind("claim"):
        episode_id, epoch = ack["uuid"][:ID_CHARS], int(ack["uuid"][ID_CHARS:], 16)
        ((known,),) = run.rows("SELECT epoch FROM episodes WHERE episode_id = ?", episode_id)
        assert known >= epoch, ack
    _check_calls(run)


def _check_group(run: RunFiles, group_id: str) -> None:
    assert group_id in run.states, f"{group_id} was acknowledged and is lost"
    state, reason = run.states[group_id]
    assert state in ENDS, f"{group_id} is {state} at the end"
    assert bool(reason) == (state == "dropped"), f"{group_id} is {state}, reason {reason}"


def _check_calls(run: RunFiles) -> None:
    trained = {mark for _, calls in run.lineage for _, mark in calls}
    updating = {
        group.group_id for entry in run.last_steps for group in entry.groups if group.siblings
    }
    for name, ack in run.acks.items():
        if not name.startswith("call ") or ack["mark"] is None:
            continue
        owner = ack.get("uuid") or name.removeprefix("call ")
        group_id = ack.get("group_id") or _group_of(run, owner)
        if group_id in updating:
            assert ack["mark"] in trained, f"{name} was acknowledged and not trained"
        elif group_id not in run.states and not _is_discarded(run, owner):
            assert ack["mark"] in run.kept_marks(owner), f"{name} was acknowledged and is lost"


def _group_of(run: RunFiles, owner: str) -> str | None:
    query = "SELECT group_id FROM samples WHERE owner = ?"
    return next((group_id for (group_id,) in run.rows(query, owner)), None)


def _is_discarded(run: RunFiles, owner: str) -> bool:
    kinds = "abort_episode", "sweep", "refused"
    return owner in {ack["uuid"] for kind in kinds for ack in run.acks_of_kind(kind)}


def v2_nothing_is_trained_twice(run: RunFiles) -> None:
    """V2: the last weights were trained on each call of each group once, in ascending steps.

    A feedback sample is a group of its own, with a call that another group has trained too.
    """
    steps = [step for step, _ in run.lineage]
    assert steps == sorted(set(steps)), steps
    twice = {
        call: count
        for call, count in Counter(c for _, calls in run.lineage for c in calls).items()
        if count > 1
    }
    assert not twice, f"trained more than once: {twice}"
    groups = Counter(group for _, calls in run.lineage for group in {group for group, _ in calls})
    assert max(groups.values()) == 1, f"in more than one step: {groups}"


def v4_a_stale_epoch_changes_nothing(run: RunFiles) -> None:
    """V4: requests under an expired or aborted claim leave no trace."""
    kinds = "abort_episode", "sweep", "late"
    ended_claims = {ack["uuid"] for kind in kinds for ack in run.acks_of_kind(kind)}
    assert ended_claims, "the script lets no claim expire"
    for uuid in ended_claims:
        assert not run.rows("SELECT 1 FROM samples WHERE owner = ?", uuid)
        assert not run.rows("SELECT 1 FROM calls WHERE owner = ?", uuid)
        assert not run.rows("SELECT 1 FROM submissions WHERE key = ?", f"episode:{uuid}")
    for ack in run.acks_of_kind("late"):
        assert ack["refused"] == 400


def v5_no_episode_appears_or_vanishes(run: RunFiles) -> None:
    """V5: created = open + claimed + ended, and ended = waiting + in a group."""
    states = Counter(state for (state,) in run.rows("SELECT state FROM episodes"))
    assert set(states) <= {"open", "claimed", "ended"}
    query = "SELECT episode_id FROM episodes WHERE state = 'ended'"
    ended = {episode_id for (episode_id,) in run.rows(query)}
    samples = run.rows("SELECT owner, group_id FROM samples WHERE owner NOT LIKE '%/%'")
    assert Counter(owner[:ID_CHARS] for owner, _ in samples) == Counter(ended)
    for owner, group_id in samples:
        assert group_id is None or group_id in run.states, (
            f"the group {group_id} of {owner} does not exist"
        )
    created = {ack["uuid"][:ID_CHARS] for ack in run.acks_of_kind("claim")}
    known = {episode_id for (episode_id,) in run.rows("SELECT episode_id FROM episodes")}
    assert created <= known, f"claims of episodes that vanished: {created - known}"


def v6_siblings_are_distinct_and_at_most_three(run: RunFiles) -> None:
    query = 'SELECT group_id, "index" FROM samples WHERE group_id IS NOT NULL'
    by_group: dict[str, list[int]] = {}
    for group_id, index in run.rows(query):
        by_group.setdefault(group_id, []).append(index)
    for group_id, indices in by_group.items():
        assert len(set(indices)) == len(indices) <= 3, (group_id, indices)


def v7_batches_contain_the_consumed_groups(run: RunFiles) -> None:
    """V7: batches, their hashes, the log and the weights name the same groups.

    Each consumed group is in one finished batch. The last log entry of a step counts.
    """
    assert not run.rows("SELECT step FROM batches WHERE state != 'done'"), "a batch is not done"
    query = "SELECT group_id FROM groups WHERE state = 'consumed' AND step = ? ORDER BY position"
    entries = {entry.step: entry for entry in run.last_steps}
    batched: list[str] = []
    for step, expected in run.rows("SELECT step, groups_hash FROM batches ORDER BY step"):
        ids = [group_id for (group_id,) in run.rows(query, step)]
        assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == expected, (step, ids)
        assert [group.group_id for group in entries.pop(step).groups] == ids, step
        batched += ids
    assert not entries, f"steps of the log without a batch: {list(entries)}"
    consumed = [group for group, (state, _) in run.states.items() if state == "consumed"]
    assert sorted(batched) == sorted(consumed)
    assert _trained_groups(run) == {
        entry.step: names
        for entry in run.last_steps
        if (names := {group.group_id for group in entry.groups if group.siblings})
    }


def _trained_groups(run: RunFiles) -> dict[int, set[str]]:
    return {step: {group for group, _ in calls} for step, calls in run.lineage}


def versions_only_grow(run: RunFiles) -> None:
    logged = [entry.version for entry in run.entries if entry.kind in ("step", "restored")]
    assert logged == sorted(set(logged)), logged
    served = {version for (version,) in run.rows("SELECT version FROM publications")}
    assert served <= set(logged), "weights were served under a version that is not in the log"


def evaluations_are_logged_once(run: RunFiles) -> None:
    """Each acknowledged evaluation has one log entry, with a version that was served."""
    query = "SELECT s.reward FROM samples s JOIN groups g USING (group_id) WHERE g.state = 'eval'"
    rewards = [reward for (reward,) in run.rows(query)]
    logged = [entry for entry in run.entries if entry.kind == "evaluated"]
    assert sorted(entry.metrics["reward"] for entry in logged) == sorted(rewards)
    served = {(0, 0), *run.rows("SELECT version, step FROM publications")}
    assert {(entry.version, entry.step) for entry in logged} <= served


def rows_have_complete_folders(run: RunFiles) -> None:
    """At any moment, each row of `checkpoints` has a complete folder.

    Exempt are the checkpoints that the script has damaged, until the next start detects them.
    """
    is_torn = "tear" in run.acks and "start third" not in run.acks
    torn: list[str] = run.acks["tear"]["torn"] if is_torn else []
    folders = CheckpointFolders(run.run_dir / "checkpoints")
    columns = "step, folder, version, digest, reward_mean"
    tables = "checkpoints", "side_checkpoints"
    for row in [row for table in tables for row in run.rows(f"SELECT {columns} FROM {table}")]:
        saved = SavedCheckpoint(*row)
        if saved.folder in torn:
            continue
        try:
            folders.find(saved)
        except OSError as error:
            raise AssertionError(f"{saved.folder} has a row and no complete folder") from error


def folders_have_rows(run: RunFiles) -> None:
    """After a restart, each folder has a row, and the newest is the last step's."""
    known = dict(run.rows("SELECT folder, step FROM checkpoints"))
    beside = {folder for (folder,) in run.rows("SELECT folder FROM side_checkpoints")}
    assert {folder.name for folder in run.folders} == {*known, *beside}
    assert max(known.values()) == max(entry.step for entry in run.last_steps)


async def v3_a_request_has_one_effect(run: RunFiles) -> None:
    """V3: an acknowledged request that is sent again gets the same reply and changes no row.

    Another body under the same name is refused, and changes no row either.
    """
    server = open_swarm(run.run_dir)
    await server.journal.flush()
    before = _dump(run)
    acks = (
        run.acks_of_kind("end_group")
        + run.acks_of_kind("add_sample")
        + run.acks_of_kind("end_episode")
    )
    for ack in (ack for ack in acks if ack["reply"]["success"]):
        for send in _resends(server, ack):
            assert (await send()).model_dump() == ack["reply"] | _deleted_calls(run, ack), ack[
                "name"
            ]
        for send in _resends(server, ack, other=True):
            try:
                await send()
            except IdempotencyConflict:
                continue
            raise AssertionError(f"{ack['name']}: another body under the same name was accepted")
    await server.journal.flush()
    assert _dump(run) == before
    server.journal.close()
    await server.close()


def _resends(server: Any, ack: Ack, other: bool = False) -> Iterator[Callable[[], Any]]:
    request = ack["request"]
    if "rewards" in request:
        end = EndGroupRequest.model_validate(request | ({"rewards": [0.77, 0.78]} if other else {}))

        async def end_again() -> Any:
            return (await server.intake.end_group(end, None)).with_prompts_per_call()

        yield end_again
    elif "sample_id" in request:
        sample = AddSampleRequest.model_validate(request | ({"advantage": 0.77} if other else {}))
        calls = [RecordedCall.from_wire(call) for call in sample.calls]
        yield lambda: server.intake.add_sample(sample, calls, None)
    else:
        done = EndEpisodeRequest.model_validate(request | ({"task_id": "other"} if other else {}))
        yield lambda: server.intake.end_episode(done, ack["reward"], None)


def _deleted_calls(run: RunFiles, ack: Ack) -> dict[str, Any]:
    """Return the fields that differ in the repeated reply if the journal no longer has the calls of
    the reply."""
    request = ack["request"]
    if "rewards" not in request:
        return {}
    kept = [
        run.kept_marks(f"{request['group_id']}/{index}") for index in range(len(request["rewards"]))
    ]
    return {} if any(kept) else {"calls": [[] for _ in kept]}


def _dump(run: RunFiles) -> list[Any]:
    tables = [name for (name,) in run.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [run.rows(f"SELECT * FROM {name}") for name in sorted(tables)]


def decisions_are_made_once(run: RunFiles) -> None:
    """Each acknowledged decision has one record with the same content, in the order of the script.
    Groups of rejected versions are dropped, and no weights were trained on them."""
    columns = "number, id, decision, version, parent, decided_by"
    rows = run.rows(f"SELECT {columns} FROM releases ORDER BY number")
    records = [ack["record"] for ack in run.acks_of_kind("decide")]
    assert rows == [tuple(record[name] for name in columns.split(", ")) for record in records]
    returns = [entry for entry in run.entries if entry.reason == "rejected_version"]
    assert len(returns) == len([record for record in records if "restored" in record["evidence"]])
    trained = {group for _, calls in run.lineage for group, _ in calls}
    for ack in run.acks_of_kind("end_group"):
        if not ack["request"]["group_id"].startswith("rejected"):
            continue
        assert run.states[ack["request"]["group_id"]] == ("dropped", "rejected_version"), ack
    assert not [group for group in trained if group.startswith("rejected")]
    if "decide roll back while off" in run.acks:
        assert {"released", "kept"} <= trained
        assert len(run.rows("SELECT 1 FROM side_checkpoints")) == 1, "the version of `try worse`"


FILE_INVARIANTS: tuple[Callable[[RunFiles], None], ...] = (
    v1_acknowledged_is_accounted_for,
    v2_nothing_is_trained_twice,
    v4_a_stale_epoch_changes_nothing,
    v5_no_episode_appears_or_vanishes,
    v6_siblings_are_distinct_and_at_most_three,
    v7_batches_contain_the_consumed_groups,
    versions_only_grow,
    evaluations_are_logged_once,
    decisions_are_made_once,
    rows_have_complete_folders,
    folders_have_rows,
)


def check_after_crash(run_dir: Path) -> None:
    """Check the files before the next server process repairs anything."""
    rows_have_complete_folders(RunFiles(run_dir))


async def finish_and_check(
    fork_server: ForkServer, run_dir: Path, *, is_damaged: bool = False, async_steps: int = 0
) -> None:
    """Run the script to its end, and check the run.

    The run is also checked before the script damages checkpoints, because that damage would hide
    other losses. `async_steps` is the setting of the script's jobs.
    """
    if "tear" not in RunFiles(run_dir).acks:
        fork_server.run_to_end(run_dir, is_half=True, async_steps=async_steps)
        await check_all(run_dir, is_damaged=is_damaged)
    fork_server.run_to_end(run_dir, async_steps=async_steps)
    await check_all(run_dir, is_damaged=is_damaged)


async def check_all(run_dir: Path, *, is_damaged: bool = False) -> None:
    """Check all invariants.

    `is_damaged` says that a test has changed the journal, so that some data had to be dropped.
    """
    run = RunFiles(run_dir)
    corrupt = [state for state in run.states.values() if state[1] == "corrupt"]
    dropped = [*run.acks_of_kind("refused"), *corrupt]
    assert bool(dropped) == is_damaged, dropped
    for check in FILE_INVARIANTS:
        check(run)
    await v3_a_request_has_one_effect(run)
