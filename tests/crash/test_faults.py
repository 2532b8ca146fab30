"""Faults other than a single crash. The tests of these faults are elsewhere:

a claim expires, then its late end    the script of the crash suite (`Client.let_claim_expire`),
                                      swarm_server/training/test_intake.py
lost reply after the commit           every `*.after_commit` in test_crash_points.py
damaged checkpoint                    the second half of the script,
                                      swarm_server/training/
engine dies during a call             e2e/test_trouble.py
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from crash.client import NAME
from crash.fork_server import ForkServer
from crash.invariants import check_after_crash, finish_and_check
from crash.run_files import RunFiles
from crash.server_process import open_swarm
from swarm_server.samples import call

from fakevllm_adapters.protocol.swarm import EndEpisodeRequest, EndGroupRequest, SiblingRef
from fakevllm_server.config.model import ConfigError
from fakevllm_server.types.crash_points import EXIT_CODE


@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_a_disk_that_refuses_writes_for_a_while_loses_nothing(
    fork_server: ForkServer, run_dir: Path, kind: str
) -> None:
    """Meanwhile nothing is acknowledged and serving continues. Later all rows are written."""
    fork_server.run_to_end(run_dir, disk=f"{kind} repaired", is_half=True)
    await finish_and_check(fork_server, run_dir)


@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_a_kill_while_the_disk_refuses_writes_loses_nothing(
    fork_server: ForkServer, run_dir: Path, kind: str
) -> None:
    assert fork_server.run(run_dir, disk=f"{kind} killed") == EXIT_CODE
    check_after_crash(run_dir)
    await finish_and_check(fork_server, run_dir)


async def test_a_wall_clock_that_jumps_changes_nothing(
    fork_server: ForkServer, run_dir: Path
) -> None:
    fork_server.run_to_crash(run_dir, "train.after_commit:5", clock_s=3600.0)
    fork_server.run_to_crash(run_dir, "plan.after_commit:3", clock_s=-3600.0)
    await finish_and_check(fork_server, run_dir)


CORRUPT = {
    "a pooled group": "end_group.after_commit:2",
    "a planned group": "plan.after_commit:2",
    "an open group": "call.after_commit:5",
    "a claimed episode": "end_episode.before_commit",
    "a waiting sample": "claim.after_commit:2",
}


@pytest.mark.parametrize("label", CORRUPT.values(), ids=CORRUPT)
async def test_a_group_with_a_changed_byte_is_dropped_by_name_and_the_rest_trains(
    fork_server: ForkServer, run_dir: Path, label: str
) -> None:
    """The test changes one byte of the call that was captured last."""
    fork_server.run_to_crash(run_dir, label)
    run = RunFiles(run_dir)
    ((owner, group_id),) = run.rows("SELECT owner, group_id FROM calls ORDER BY id DESC LIMIT 1")
    _change_a_byte(run_dir)

    await finish_and_check(fork_server, run_dir, is_damaged=True)
    if group_id is not None:
        assert run.states[group_id] == ("dropped", "corrupt")
        assert "corrupt" in {entry.reasons.get(group_id) for entry in run.entries}
    elif run.rows("SELECT 1 FROM samples WHERE owner = ?", owner):
        assert run.states[owner] == ("dropped", "corrupt")
    else:  # a claimed episode, which is open again
        assert [ack["uuid"] for ack in run.acks_of_kind("refused")] == [owner]
    assert not run.rows("SELECT 1 FROM calls WHERE owner = ?", owner)
    assert "last" in {group for _, calls in run.lineage for group, _ in calls}


def _change_a_byte(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
        newest = "SELECT id, response_ids FROM calls ORDER BY id DESC LIMIT 1"
        ((id, ids),) = db.execute(newest).fetchall()
        changed = bytes([ids[0] ^ 1]) + ids[1:]
        db.execute("UPDATE calls SET response_ids = ? WHERE id = ?", (changed, id))


async def test_five_simultaneous_ends_of_one_group_have_one_effect(run_dir: Path) -> None:
    server = open_swarm(run_dir)
    for index in range(2):
        await server.intake.add_call(SiblingRef("g", index), call())
    request = EndGroupRequest(group_id="g", rewards=[1.0, 0.0])
    replies = await asyncio.gather(*(server.intake.end_group(request, None) for _ in range(5)))
    assert replies == [replies[0]] * 5 and replies[0].pooled
    assert len(RunFiles(run_dir).rows("SELECT * FROM submissions")) == server.pool.num_finished == 1
    await server.close()


async def test_episodes_may_end_in_another_order_than_they_were_claimed(run_dir: Path) -> None:
    server = open_swarm(run_dir)
    uuids = [(await server.intake.claim(NAME, "train", 60.0)).uuid for _ in range(4)]
    for uuid in uuids:
        episode = server.episodes.find(uuid)
        assert episode is not None
        await server.intake.add_episode_call(episode, call())
    ends = {
        uuid: EndEpisodeRequest(client_uuid=NAME, episode_uuid=uuid, task_id="t") for uuid in uuids
    }
    requests = [ends[uuids[at]] for at in (3, 1, 3, 0, 2, 1)]
    for end in requests:
        reward = float(uuids.index(end.episode_uuid))
        assert (await server.intake.end_episode(end, reward, None)).success
    rows = RunFiles(run_dir).rows('SELECT owner, reward FROM samples ORDER BY "index"')
    assert rows == [(uuids[at], float(at)) for at in (3, 1, 0, 2)]
    assert server.pool.num_finished == 1
    await server.close()


async def test_a_second_server_on_the_same_run_is_refused_and_harms_nothing(run_dir: Path) -> None:
    first = open_swarm(run_dir)
    with pytest.raises(ConfigError, match="is used by another server"):
        open_swarm(run_dir)
    await first.intake.claim(NAME, "train", 60.0)
    await first.close()
    assert RunFiles(run_dir).rows("SELECT COUNT(*) FROM episodes") == [(1,)]
    await open_swarm(run_dir).close()
