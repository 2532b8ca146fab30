"""Faults that are no crash, or more than one. Those that need no whole server are elsewhere:

lease expiry, then a late end   every life here (`Client.lapse`), swarm_server/test_intake.py
lost reply after the commit     every `*.after_commit` in test_every_label.py
torn checkpoint                 every life here (`abandon`), swarm_server/test_trainer.py
engine dies while it answers    e2e/test_trouble.py
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from crash.client import NAME
from crash.finished import Finished
from crash.invariants import check_after_crash, finish_and_check
from crash.life import open_swarm
from crash.nursery import Nursery
from swarm_server.samples import call

from fakevllm_adapters.protocol.swarm import EndEpisodeRequest, EndGroupRequest, SiblingRef
from fakevllm_server.config.model import ConfigError
from fakevllm_server.types.crash_points import EXIT_CODE


@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_a_disk_that_takes_nothing_for_a_while_costs_nothing(
    nursery: Nursery, run_dir: Path, kind: str
) -> None:
    """Nothing is acknowledged meanwhile, serving goes on, and then all that waited is written."""
    nursery.finish(run_dir, disk=f"{kind} mended", is_half=True)
    await finish_and_check(nursery, run_dir)


@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_nor_when_the_server_is_killed_meanwhile(
    nursery: Nursery, run_dir: Path, kind: str
) -> None:
    assert nursery.live(run_dir, disk=f"{kind} killed") == EXIT_CODE
    check_after_crash(run_dir)
    await finish_and_check(nursery, run_dir)


async def test_a_wall_clock_that_jumps_is_of_no_matter(nursery: Nursery, run_dir: Path) -> None:
    nursery.crash(run_dir, "train.after_commit:5", clock_s=3600.0)
    nursery.crash(run_dir, "plan.after_commit:3", clock_s=-3600.0)
    await finish_and_check(nursery, run_dir)


CORRUPT = {
    "a pooled group": "end_group.after_commit:2",
    "a planned group": "plan.after_commit:2",
    "an open group": "call.after_commit:5",
    "a claimed episode": "end_episode.before_commit",
    "a sample that waits": "claim.after_commit:2",
}


@pytest.mark.parametrize("label", CORRUPT.values(), ids=CORRUPT)
async def test_what_a_disk_has_changed_is_dropped_by_name_and_the_rest_trains(
    nursery: Nursery, run_dir: Path, label: str
) -> None:
    """One byte of the call that was captured last."""
    nursery.crash(run_dir, label)
    run = Finished(run_dir)
    ((owner, group_id),) = run.rows("SELECT owner, group_id FROM calls ORDER BY id DESC LIMIT 1")
    _change_a_byte(run_dir)

    await finish_and_check(nursery, run_dir, is_damaged=True)
    if group_id is not None:
        assert run.states[group_id] == ("dropped", "corrupt")
        assert "corrupt" in {entry.reasons.get(group_id) for entry in run.entries}
    elif run.rows("SELECT 1 FROM samples WHERE owner = ?", owner):
        assert run.states[owner] == ("dropped", "corrupt")
    else:  # a claim, which is open again
        assert [ack["uuid"] for ack in run.of("refused")] == [owner]
    assert not run.rows("SELECT 1 FROM calls WHERE owner = ?", owner)
    assert "last" in {group for _, calls in run.lineage for group, _ in calls}


def _change_a_byte(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
        newest = "SELECT id, response_ids FROM calls ORDER BY id DESC LIMIT 1"
        ((id, was),) = db.execute(newest).fetchall()
        changed = bytes([was[0] ^ 1]) + was[1:]
        db.execute("UPDATE calls SET response_ids = ? WHERE id = ?", (changed, id))


async def test_the_same_end_from_five_threads_at_once_is_one(run_dir: Path) -> None:
    server = open_swarm(run_dir)
    for index in range(2):
        await server.intake.add_call(SiblingRef("g", index), call())
    request = EndGroupRequest(group_id="g", rewards=[1.0, 0.0])
    replies = await asyncio.gather(*(server.intake.end_group(request, None) for _ in range(5)))
    assert replies == [replies[0]] * 5 and replies[0].pooled
    assert len(Finished(run_dir).rows("SELECT * FROM submissions")) == server.pool.num_finished == 1
    await server.close()


async def test_ends_may_come_in_another_order_than_the_claims(run_dir: Path) -> None:
    server = open_swarm(run_dir)
    uuids = [(await server.intake.claim(NAME, "train", 60.0)).uuid for _ in range(4)]
    for uuid in uuids:
        episode = server.episodes.find(uuid)
        assert episode is not None
        await server.intake.add_episode_call(episode, call())
    ends = {
        uuid: EndEpisodeRequest(client_uuid=NAME, episode_uuid=uuid, task_id="t") for uuid in uuids
    }
    told = [ends[uuids[at]] for at in (3, 1, 3, 0, 2, 1)]
    for end in told:
        reward = float(uuids.index(end.episode_uuid))
        assert (await server.intake.end_episode(end, reward, None)).success
    rows = Finished(run_dir).rows('SELECT owner, reward FROM samples ORDER BY "index"')
    assert rows == [(uuids[at], float(at)) for at in (3, 1, 0, 2)]
    assert server.pool.num_finished == 1
    await server.close()


async def test_a_second_server_on_the_same_run_is_refused_and_harms_nothing(run_dir: Path) -> None:
    first = open_swarm(run_dir)
    with pytest.raises(ConfigError, match="is used by another server"):
        open_swarm(run_dir)
    await first.intake.claim(NAME, "train", 60.0)
    await first.close()
    assert Finished(run_dir).rows("SELECT COUNT(*) FROM episodes") == [(1,)]
    await open_swarm(run_dir).close()
