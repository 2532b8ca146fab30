"""What the server shows of a group's or an episode's tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swarm_server.samples import call
from swarm_server.training.intakes import CLIENT, Lives

from fakevllm_adapters.protocol.swarm import EndEpisodeRequest, EndGroupRequest, SiblingRef
from fakevllm_adapters.protocol.token_view import GroupView
from fakevllm_server.journal.rows import CorruptCall
from fakevllm_server.run.group_view import shown


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    found = Lives(tmp_path / "run")
    await found.now.boot_trainer()
    yield found
    found.now.close()


def look(lives: Lives, name: str) -> GroupView | None:
    assert lives.now.journal.drain()
    return lives.now.journal.read(shown, name)


async def end(lives: Lives, *rewards: float, kind: str = "train") -> list[str]:
    """Episodes of one task; their uuids."""
    uuids: list[str] = []
    for reward in rewards:
        episode = await lives.played(kind=kind)
        request = EndEpisodeRequest(client_uuid=CLIENT, episode_uuid=episode.uuid, task_id="t")
        await lives.now.intake.end_episode(request, reward, None)
        uuids.append(episode.uuid)
    return uuids


async def test_a_trained_group_has_each_siblings_reward_advantage_and_calls(lives: Lives) -> None:
    for index in range(2):
        await lives.now.intake.add_call(SiblingRef("g", index), call())
    await lives.now.intake.end_group(EndGroupRequest(group_id="g", rewards=[1.0, 0.0]), None)
    before = look(lives, "g")
    assert before is not None and before.state == "pooled"
    assert [one.advantage for one in before.siblings] == [None, None]
    assert await lives.now.step()
    found = look(lives, "g")
    assert found is not None
    assert (found.group_id, found.state, found.step, found.version) == ("g", "consumed", 1, 1)
    assert [(one.name, one.reward, one.is_trained) for one in found.siblings] == [
        ("g/0", 1.0, True),
        ("g/1", 0.0, True),
    ]
    better, worse = [one.advantage for one in found.siblings]
    assert better is not None and better > 0 and worse == -better
    (captured,) = found.siblings[0].calls
    assert captured.model_dump(exclude={"forced"}) == call().to_wire().model_dump()


async def test_an_episode_is_found_by_its_uuid_and_by_its_task(lives: Lives) -> None:
    first, second = await end(lives, 1.0, 0.0)
    assert await lives.now.step()
    found = look(lives, second)
    assert found is not None and found.group_id == f"task:t#{second}"
    (one,) = found.siblings
    assert (one.name, one.index, one.reward) == (second, 1, 0.0)
    assert one.advantage is not None and one.advantage < 0
    whole = look(lives, found.group_id)
    assert whole is not None
    assert [one.name for one in whole.siblings] == [first, second]


async def test_what_has_not_ended_yet_is_shown_as_open(lives: Lives) -> None:
    episode = await lives.played()
    await lives.now.intake.add_call(SiblingRef("h", 1), call())
    for name in (episode.uuid, "h/1"):
        found = look(lives, name)
        assert found is not None and found.state == "open"
        assert len(found.siblings[0].calls) == 1
    (waiting,) = await end(lives, 0.5)  # the other of its task is missing
    found = look(lives, waiting)
    assert found is not None and (found.state, found.siblings[0].reward) == ("open", 0.5)


async def test_an_evaluation_has_its_reward_and_no_calls_any_more(lives: Lives) -> None:
    (uuid,) = await end(lives, 0.5, kind="eval")
    found = look(lives, uuid)
    assert found is not None
    assert (found.state, found.siblings[0].reward, found.siblings[0].calls) == ("eval", 0.5, [])


async def test_nothing_is_shown_of_what_is_not_known(lives: Lives) -> None:
    assert look(lives, "nobody") is None


async def test_a_call_that_the_disk_has_changed_is_not_shown(lives: Lives) -> None:
    episode = await lives.played()
    assert lives.now.journal.drain()
    lives.now.journal.read(
        lambda db: db.exec_driver_sql("UPDATE calls SET prompt_ids = x'00000000'")
    )
    with pytest.raises(CorruptCall):
        look(lives, episode.uuid)
