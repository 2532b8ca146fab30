"""What holds of every run, whatever it went through: V1 to V7 of the design of the journal. Each
function reads the run's directory and the client's own file, and nothing of the server's memory.

The script ends with a clean stop, so that the newest checkpoint is all that was trained.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crash.client import Ack
from crash.finished import Finished
from crash.life import open_swarm
from crash.nursery import Nursery

from fakevllm_adapters.protocol.swarm import AddSampleRequest, EndEpisodeRequest, EndGroupRequest
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.types.calls import RecordedCall

ENDS = {"consumed", "dropped", "eval"}
ID_CHARS = 28
"""Of an episode's id in a claim's uuid; the rest is its epoch."""


def v1_acknowledged_is_accounted_for(run: Finished) -> None:
    """Every end that was acknowledged has its group, trained or dropped with a reason or waiting;
    every claim its episode; every call is kept for as long as its group may train, and trained
    where that was."""
    for ack in run.of("end_group") + run.of("add_sample"):
        request = ack["request"]
        _check_group(run, request.get("group_id") or request["sample_id"])
    for ack in run.of("abort_group"):
        assert run.states[ack["group_id"]] == ("dropped", "aborted"), ack
    for ack in run.of("end_episode"):
        uuid = ack["request"]["episode_uuid"]
        found = run.rows("SELECT group_id, reward FROM samples WHERE owner = ?", uuid)
        assert found, f"the end of {uuid} was acknowledged and is lost"
        ((group_id, reward),) = found
        assert reward == ack["reward"]
        if group_id is not None:
            _check_group(run, group_id)
    for ack in run.of("claim"):
        episode_id, epoch = ack["uuid"][:ID_CHARS], int(ack["uuid"][ID_CHARS:], 16)
        ((known,),) = run.rows("SELECT epoch FROM episodes WHERE episode_id = ?", episode_id)
        assert known >= epoch, ack
    _check_calls(run)


def _check_group(run: Finished, group_id: str) -> None:
    assert group_id in run.states, f"{group_id} was acknowledged and is lost"
    state, reason = run.states[group_id]
    assert state in ENDS, f"{group_id} is {state} when all is done"
    assert bool(reason) == (state == "dropped"), f"{group_id} is {state}, reason {reason}"


def _check_calls(run: Finished) -> None:
    trained = {mark for _, calls in run.lineage for _, mark in calls}
    updating = {one.group_id for entry in run.last_steps for one in entry.groups if one.siblings}
    for name, ack in run.acks.items():
        if not name.startswith("call ") or ack["mark"] is None:
            continue
        owner = ack.get("uuid") or name.removeprefix("call ")
        group_id = ack.get("group_id") or _group_of(run, owner)
        if group_id in updating:
            assert ack["mark"] in trained, f"{name} was acknowledged and not trained"
        elif group_id not in run.states and not _is_given_up(run, owner):
            assert ack["mark"] in run.kept_marks(owner), f"{name} was acknowledged and is lost"


def _group_of(run: Finished, owner: str) -> str | None:
    return next(
        (found for (found,) in run.rows("SELECT group_id FROM samples WHERE owner = ?", owner)),
        None,
    )


def _is_given_up(run: Finished, owner: str) -> bool:
    gone = run.of("abort_episode") + run.of("sweep") + run.of("refused")
    return owner in {ack["uuid"] for ack in gone}


def v2_nothing_is_trained_twice(run: Finished) -> None:
    """The weights that survived have seen each call of each group once, in steps that follow one
    another. (A feedback sample is a group of its own, made of a call seen before.)"""
    steps = [step for step, _ in run.lineage]
    assert steps == sorted(set(steps)), steps
    twice = {
        one: num
        for one, num in Counter(c for _, calls in run.lineage for c in calls).items()
        if num > 1
    }
    assert not twice, f"trained more than once: {twice}"
    groups = Counter(group for _, calls in run.lineage for group in {group for group, _ in calls})
    assert max(groups.values()) == 1, f"in more than one step: {groups}"


def v4_a_stale_epoch_changes_nothing(run: Finished) -> None:
    """What a claim that ran out or was given up tried left no trace."""
    gone = {ack["uuid"] for ack in run.of("abort_episode") + run.of("sweep") + run.of("late")}
    assert gone, "the script lets none run out"
    for uuid in gone:
        assert not run.rows("SELECT 1 FROM samples WHERE owner = ?", uuid)
        assert not run.rows("SELECT 1 FROM calls WHERE owner = ?", uuid)
        assert not run.rows("SELECT 1 FROM submissions WHERE key = ?", f"episode:{uuid}")
    for ack in run.of("late"):
        assert ack["refused"] == 400


def v5_no_episode_appears_or_vanishes(run: Finished) -> None:
    """created = open + claimed + ended, and ended = waiting + in a group."""
    states = Counter(state for (state,) in run.rows("SELECT state FROM episodes"))
    assert set(states) <= {"open", "claimed", "ended"}
    ended = {one for (one,) in run.rows("SELECT episode_id FROM episodes WHERE state = 'ended'")}
    samples = run.rows("SELECT owner, group_id FROM samples WHERE owner NOT LIKE '%/%'")
    assert Counter(owner[:ID_CHARS] for owner, _ in samples) == Counter(ended)
    for owner, group_id in samples:
        assert group_id is None or group_id in run.states, f"{owner} is in no group there is"
    created = {ack["uuid"][:ID_CHARS] for ack in run.of("claim")}
    known = {one for (one,) in run.rows("SELECT episode_id FROM episodes")}
    assert created <= known, f"claims of episodes that vanished: {created - known}"


def v6_siblings_are_distinct_and_few_enough(run: Finished) -> None:
    most = 3
    query = 'SELECT group_id, "index" FROM samples WHERE group_id IS NOT NULL'
    by_group: dict[str, list[int]] = {}
    for group_id, index in run.rows(query):
        by_group.setdefault(group_id, []).append(index)
    for group_id, indices in by_group.items():
        assert len(set(indices)) == len(indices) <= most, (group_id, indices)


def v7_batches_are_what_was_consumed(run: Finished) -> None:
    """Every consumed group is in one done batch, whose hash is of just these; the log's last word
    on a step names the same groups, and so do the weights."""
    assert not run.rows("SELECT step FROM batches WHERE state != 'done'"), "a batch is left over"
    query = "SELECT group_id FROM groups WHERE state = 'consumed' AND step = ? ORDER BY position"
    told = {entry.step: entry for entry in run.last_steps}
    seen: list[str] = []
    for step, expected in run.rows("SELECT step, groups_hash FROM batches ORDER BY step"):
        ids = [group_id for (group_id,) in run.rows(query, step)]
        assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == expected, (step, ids)
        assert [one.group_id for one in told.pop(step).groups] == ids, step
        seen += ids
    assert not told, f"steps the log knows and no batch: {list(told)}"
    consumed = [group for group, (state, _) in run.states.items() if state == "consumed"]
    assert sorted(seen) == sorted(consumed)
    assert _trained_groups(run) == {
        entry.step: names
        for entry in run.last_steps
        if (names := {one.group_id for one in entry.groups if one.siblings})
    }


def _trained_groups(run: Finished) -> dict[int, set[str]]:
    return {step: {group for group, _ in calls} for step, calls in run.lineage}


def versions_only_grow(run: Finished) -> None:
    told = [entry.version for entry in run.entries if entry.kind in ("step", "restored")]
    assert told == sorted(set(told)), told
    served = {version for (version,) in run.rows("SELECT version FROM publications")}
    assert served <= set(told), "weights were served under a version the log never told"


def evaluations_are_told_once(run: Finished) -> None:
    """Each that was acknowledged, by weights that had been served."""
    query = "SELECT s.reward FROM samples s JOIN groups g USING (group_id) WHERE g.state = 'eval'"
    rewards = [reward for (reward,) in run.rows(query)]
    told = [entry for entry in run.entries if entry.kind == "evaluated"]
    assert sorted(entry.metrics["reward"] for entry in told) == sorted(rewards)
    served = {(0, 0), *run.rows("SELECT version, step FROM publications")}
    assert {(entry.version, entry.step) for entry in told} <= served


def rows_have_whole_folders(run: Finished) -> None:
    """At any moment: a row tells of a checkpoint that is whole. But for those that the script
    tore, until the next start has noticed."""
    is_torn = "tear" in run.acks and "start third" not in run.acks
    torn: list[str] = run.acks["tear"]["torn"] if is_torn else []
    folders = CheckpointFolders(run.run_dir / "checkpoints")
    query = "SELECT step, folder, version, digest, reward_mean FROM checkpoints"
    for row in run.rows(query):
        saved = SavedCheckpoint(*row)
        if saved.folder in torn:
            continue
        try:
            folders.find(saved)
        except OSError as error:
            raise AssertionError(f"{saved.folder} has a row and no whole folder") from error


def folders_have_rows(run: Finished) -> None:
    """Once a server has been started again, and the newest is the last step."""
    known = dict(run.rows("SELECT folder, step FROM checkpoints"))
    assert {one.name for one in run.folders} == set(known)
    assert max(known.values()) == max(entry.step for entry in run.last_steps)


async def v3_a_request_has_one_effect(run: Finished) -> None:
    """What was acknowledged and is sent again gets the same words; with other words under the same
    name it is refused; neither changes a row."""
    server = open_swarm(run.run_dir)
    await server.journal.flush()
    before = _dump(run)
    acks = run.of("end_group") + run.of("add_sample") + run.of("end_episode")
    for ack in (one for one in acks if one["reply"]["success"]):
        for send in _resends(server, ack):
            assert (await send()).model_dump() == ack["reply"] | _calls_gone(run, ack), ack["name"]
        for send in _resends(server, ack, other=True):
            try:
                await send()
            except IdempotencyConflict:
                continue
            raise AssertionError(f"{ack['name']}: other words under the same name were taken")
    await server.journal.flush()
    assert _dump(run) == before
    server.journal.close()
    await server.close()


def _resends(server: Any, ack: Ack, other: bool = False) -> Iterator[Callable[[], Any]]:
    request = ack["request"]
    if "rewards" in request:
        end = EndGroupRequest.model_validate(request | ({"rewards": [0.77, 0.78]} if other else {}))
        yield lambda: server.intake.end_group(end, None)
    elif "sample_id" in request:
        sample = AddSampleRequest.model_validate(request | ({"advantage": 0.77} if other else {}))
        calls = [RecordedCall.from_wire(call) for call in sample.calls]
        yield lambda: server.intake.add_sample(sample, calls, None)
    else:
        done = EndEpisodeRequest.model_validate(request | ({"task_id": "other"} if other else {}))
        yield lambda: server.intake.end_episode(done, ack["reward"], None)


def _calls_gone(run: Finished, ack: Ack) -> dict[str, Any]:
    """A reply that is told again has the calls that are still kept."""
    request = ack["request"]
    if "rewards" not in request:
        return {}
    kept = [
        run.kept_marks(f"{request['group_id']}/{index}") for index in range(len(request["rewards"]))
    ]
    return {} if any(kept) else {"calls": [[] for _ in kept]}


def _dump(run: Finished) -> list[Any]:
    tables = [name for (name,) in run.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [run.rows(f"SELECT * FROM {name}") for name in sorted(tables)]


OF_FILES: tuple[Callable[[Finished], None], ...] = (
    v1_acknowledged_is_accounted_for,
    v2_nothing_is_trained_twice,
    v4_a_stale_epoch_changes_nothing,
    v5_no_episode_appears_or_vanishes,
    v6_siblings_are_distinct_and_few_enough,
    v7_batches_are_what_was_consumed,
    versions_only_grow,
    evaluations_are_told_once,
    rows_have_whole_folders,
    folders_have_rows,
)


def check_after_crash(run_dir: Path) -> None:
    """Before the next life has mended anything."""
    rows_have_whole_folders(Finished(run_dir))


async def finish_and_check(nursery: Nursery, run_dir: Path, *, is_damaged: bool = False) -> None:
    """Before checkpoints are torn and after it: what was lost with them would hide other losses."""
    if "tear" not in Finished(run_dir).acks:
        nursery.finish(run_dir, is_half=True)
        await check_all(run_dir, is_damaged=is_damaged)
    nursery.finish(run_dir)
    await check_all(run_dir, is_damaged=is_damaged)


async def check_all(run_dir: Path, *, is_damaged: bool = False) -> None:
    """`is_damaged`: a test has changed what was written, so that something had to be given up."""
    run = Finished(run_dir)
    given_up = [*run.of("refused"), *(one for one in run.states.values() if one[1] == "corrupt")]
    assert bool(given_up) == is_damaged, given_up
    for holds in OF_FILES:
        holds(run)
    await v3_a_request_has_one_effect(run)
