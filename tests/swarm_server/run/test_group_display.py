"""Views of a group's or an episode's tokens in the journal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swarm_server.samples import call
from swarm_server.training.intake_server import CLIENT, IntakeServer

from fakevllm_adapters.protocol.group_tokens import GroupView
from fakevllm_adapters.protocol.swarm import EndEpisodeRequest, EndGroupRequest, SiblingRef
from fakevllm_server.journal.rows import CorruptCall
from fakevllm_server.run.group_display import read_group_view


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[IntakeServer]:
    server = IntakeServer(tmp_path / "run")
    await server.process.boot_trainer()
    yield server
    server.process.close()


def view_of(server: IntakeServer, name: str) -> GroupView | None:
    assert server.process.journal.drain()
    return server.process.journal.read(read_group_view, name)


async def end(server: IntakeServer, *rewards: float, kind: str = "train") -> list[str]:
    """End one episode of a task for each reward; return their uuids."""
    uuids: list[str] = []
    for reward in rewards:
        episode = await server.play(kind=kind)
        request = EndEpisodeRequest(client_uuid=CLIENT, episode_uuid=episode.uuid, task_id="t")
        await server.process.intake.end_episode(request, reward, None)
        uuids.append(episode.uuid)
    return uuids


async def test_a_trained_group_has_each_siblings_reward_advantage_and_calls(
    server: IntakeServer,
) -> None:
    for index in range(2):
        await server.process.intake.add_call(SiblingRef("g", index), call())
    await server.process.intake.end_group(EndGroupRequest(group_id="g", rewards=[1.0, 0.0]), None)
    before = view_of(server, "g")
    assert before is not None and before.state == "pooled"
    assert [one.advantage for one in before.siblings] == [None, None]
    assert await server.process.step()
    view = view_of(server, "g")
    assert view is not None
    assert (view.group_id, view.state, view.step, view.version) == ("g", "consumed", 1, 1)
    assert [(one.name, one.reward, one.is_trained) for one in view.siblings] == [
        ("g/0", 1.0, True),
        ("g/1", 0.0, True),
    ]
    better, worse = [one.advantage for one in view.siblings]
    assert better is not None and better > 0 and worse == -better
    (captured,) = view.siblings[0].calls
    assert captured.model_dump(exclude={"forced"}) == call().to_wire().model_dump()


async def test_an_episode_is_found_by_its_uuid_and_by_its_task(server: IntakeServer) -> None:
    first, second = await end(server, 1.0, 0.0)
    assert await server.process.step()
    view = view_of(server, second)
    assert view is not None and view.group_id == f"task:t#{second}"
    (one,) = view.siblings
    assert (one.name, one.index, one.reward) == (second, 1, 0.0)
    assert one.advantage is not None and one.advantage < 0
    whole = view_of(server, view.group_id)
    assert whole is not None
    assert [one.name for one in whole.siblings] == [first, second]


async def test_a_group_that_has_not_ended_is_open(server: IntakeServer) -> None:
    episode = await server.play()
    await server.process.intake.add_call(SiblingRef("h", 1), call())
    for name in (episode.uuid, "h/1"):
        view = view_of(server, name)
        assert view is not None and view.state == "open"
        assert len(view.siblings[0].calls) == 1
    (waiting,) = await end(server, 0.5)  # the task's second episode has not ended
    view = view_of(server, waiting)
    assert view is not None and (view.state, view.siblings[0].reward) == ("open", 0.5)


async def test_an_evaluation_has_its_reward_and_no_calls(server: IntakeServer) -> None:
    (uuid,) = await end(server, 0.5, kind="eval")
    view = view_of(server, uuid)
    assert view is not None
    assert (view.state, view.siblings[0].reward, view.siblings[0].calls) == ("eval", 0.5, [])


async def test_an_unknown_name_has_no_view(server: IntakeServer) -> None:
    assert view_of(server, "nobody") is None


async def test_a_corrupt_call_raises_an_error(server: IntakeServer) -> None:
    episode = await server.play()
    assert server.process.journal.drain()
    server.process.journal.read(
        lambda db: db.exec_driver_sql("UPDATE calls SET prompt_ids = x'00000000'")
    )
    with pytest.raises(CorruptCall):
        view_of(server, episode.uuid)
