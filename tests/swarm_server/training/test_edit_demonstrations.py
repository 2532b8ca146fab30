"""Users' edits of answers are trained as demonstrations. They are accepted once, survive a restart,
and leave other groups unchanged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from swarm_server.journal.server_process import JOB
from swarm_server.samples import call
from swarm_server.training.intake_server import IntakeServer

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import pack_ids
from fakevllm_adapters.protocol.swarm import (
    AddDemonstrationRequest,
    DemonstrationIds,
    EndGroupReply,
    SiblingRef,
)
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.journal.forgotten_calls import calls_forgotten
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.trained_token_share import coverage
from fakevllm_server.training.durable_acknowledgement import IdempotencyConflict
from fakevllm_server.training.step_log import step_line
from fakevllm_server.training.step_plan import PlannedStep, plan_step
from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode
from fakevllm_server.types.edit_demonstrations import edit_episodes, parse_demonstrations
from fakevllm_server.web.app import create_app

EDIT = "edit:g/f"


@pytest.fixture
def server(tmp_path: Path) -> IntakeServer:
    return IntakeServer(tmp_path)


def ids(kind: str, response: tuple[int, ...] = (7, 8, 2)) -> DemonstrationIds:
    packed = {"prompt_ids": pack_ids([1, 2, 3]), "response_ids": pack_ids(response)}
    return DemonstrationIds.model_validate({"kind": kind, **packed})


PLAIN = [ids("plain")]
PAIR = [ids("chosen"), ids("rejected", (5, 6))]


def request(*demonstrations: DemonstrationIds, name: str = EDIT) -> AddDemonstrationRequest:
    own = list(demonstrations or PLAIN)
    return AddDemonstrationRequest(sample_id=name, run_id="r", demonstrations=own)


def group_of_edit(*demonstrations: DemonstrationIds) -> FinishedGroup:
    loss, calls = parse_demonstrations(request(*demonstrations))
    return FinishedGroup(EDIT, edit_episodes(EDIT, calls), demonstrates=loss)


def group() -> FinishedGroup:
    return FinishedGroup("g", [ScoredEpisode(at, float(at), [call()]) for at in range(2)])


def planned(*groups: FinishedGroup, **settings: object) -> PlannedStep:
    return plan_step(1, groups, TrainJob.model_validate(settings))


async def add(server: IntakeServer, sent: AddDemonstrationRequest) -> EndGroupReply:
    loss, calls = parse_demonstrations(sent)
    return await server.process.intake.add_demonstration(sent, loss, calls, None)


def test_an_edit_is_a_plain_demonstration_of_sft_with_its_own_ids() -> None:
    plan = planned(group_of_edit(*PLAIN), loss="sft")
    (only,) = plan.batch.demonstrations
    assert (only.kind, only.pair, only.group_id) == ("plain", None, EDIT)
    assert (list(only.prompt_ids), list(only.response_ids)) == ([1, 2, 3], [7, 8, 2])
    assert (plan.batch.calls, plan.trained[0].siblings) == ([], [0])


def test_an_edit_and_the_served_answer_are_a_pair_of_dpo() -> None:
    plan = planned(group_of_edit(*PAIR), demonstration_loss="dpo")
    kinds = [(one.kind, one.pair, list(one.response_ids)) for one in plan.batch.demonstrations]
    assert kinds == [("chosen", EDIT, [7, 8, 2]), ("rejected", EDIT, [5, 6])]
    assert plan.trained[0].siblings == [0, 1]


def test_an_edit_leaves_the_other_groups_of_the_step_unchanged() -> None:
    alone = planned(group(), demonstration_loss="sft")
    both = planned(group(), group_of_edit(), demonstration_loss="sft")
    assert both.batch.calls == alone.batch.calls
    assert both.trained[:1] == alone.trained
    assert both.metrics == alone.metrics | {"edits": 1.0}
    assert coverage([group(), group_of_edit()], both.calls) == coverage([group()], alone.calls)


@pytest.mark.parametrize("control", ["frozen", "shuffled"])
def test_a_control_run_trains_no_edit(control: str) -> None:
    plan = planned(group_of_edit(), loss="sft", control=control)
    assert (plan.batch.demonstrations, plan.trained[0].siblings) == ([], [])


def test_a_planned_edit_is_left_out_if_the_job_has_another_loss_now() -> None:
    plan = planned(group_of_edit(), loss="dpo")
    assert (plan.batch.demonstrations, plan.trained[0].siblings) == ([], [])


def test_the_line_of_a_step_counts_the_edits() -> None:
    line = step_line(1, 1, planned(group_of_edit(), loss="sft").metrics)
    assert line == "step 1 → version 1: 1 edits of answers"


@pytest.mark.parametrize(
    "demonstrations",
    [
        [ids("chosen")],
        [ids("rejected"), ids("chosen")],
        [ids("plain"), ids("plain")],
        [ids("plain", ())],
        [ids("plain", (-1,))],
    ],
)
def test_demonstrations_that_are_no_edit_are_refused(
    demonstrations: list[DemonstrationIds],
) -> None:
    with pytest.raises(ValueError):
        parse_demonstrations(request(*demonstrations))


def test_an_edit_counts_as_one_group_and_never_becomes_stale() -> None:
    pool = Pool(TrainJob(batch_size=2, max_staleness=0, loss="dpo"), rejected=lambda: {0, 1})
    loss, calls = parse_demonstrations(request(*PAIR))
    first = pool.add_demonstrations(EDIT, loss, calls, 3)
    assert (first.success, first.pooled, first.step) == (True, True, 3)
    assert not pool.add_demonstrations(EDIT, loss, calls, 3).success
    assert (pool.num_finished, pool.is_due) == (1, False)
    pool.add_demonstrations("edit:g/other", loss, calls, 3)
    assert pool.is_due
    taken = pool.take(version=99)
    assert [one.demonstrates for one in taken.groups] == ["dpo", "dpo"] and taken.dropped == {}
    assert pool.take_excluded_counts() == {"stale_calls": 0}


def test_an_edit_is_dropped_if_the_job_does_not_train_its_loss() -> None:
    pool = Pool(TrainJob(loss="dpo"))
    reply = pool.add_demonstrations(EDIT, *parse_demonstrations(request()), 1)
    assert (reply.success, reply.pooled) == (True, False)
    assert reply.failure_reason == "no_demonstration_loss: the job has no loss sft"


def test_an_edit_with_the_id_of_an_open_group_is_refused() -> None:
    pool = Pool(TrainJob(loss="sft"))
    pool.add_call(SiblingRef("g", 0), call(), now=0.0)
    refused = pool.add_demonstrations("g", *parse_demonstrations(request()), 1)
    assert refused.failure_reason == "open_group"


async def test_an_edit_survives_a_crash_and_is_the_same_afterwards(server: IntakeServer) -> None:
    server.restart(demonstration_loss="dpo")
    reply = await add(server, request(*PAIR))
    assert reply.pooled
    (before,) = server.process.intake.pool.finished
    server.process = server.process.restarted_after_kill(server.process.folder / "next")
    server.restart(demonstration_loss="dpo")
    (after,) = server.process.intake.pool.finished
    assert after == replace(before, episodes=list(before.episodes))
    assert await add(server, request(*PAIR)) == reply
    with pytest.raises(IdempotencyConflict):
        await add(server, request(ids("chosen", (9,)), PAIR[1]))
    assert server.process.intake.pool.num_finished == 1


async def test_after_a_restart_with_another_loss_an_edit_is_dropped_with_the_reason(
    server: IntakeServer,
) -> None:
    server.restart(demonstration_loss="sft")
    await add(server, request())
    server.restart(demonstration_loss=None)
    assert server.process.intake.pool.num_finished == 0
    assert server.reasons == {EDIT: "no_demonstration_loss: the job has no loss sft"}


async def test_no_id_of_a_forgotten_edit_stays_in_the_journal(server: IntakeServer) -> None:
    server.restart(demonstration_loss="dpo")
    await add(server, request(*PAIR))
    query = "SELECT COUNT(*) FROM calls"
    journal = server.process.journal
    assert journal.read(lambda db: db.exec_driver_sql(query).scalar()) == 2
    await journal.write(calls_forgotten([EDIT]))
    assert journal.read(lambda db: db.exec_driver_sql(query).scalar()) == 0
    assert server.process.intake.pool.forget([EDIT]) == {EDIT: "forgotten"}


async def test_groups_of_an_older_journal_are_no_edits(server: IntakeServer) -> None:
    await server.capture("g")
    await server.end_group("g")
    assert server.process.journal.drain()
    folder = server.process.folder
    server.process.journal.close()
    (path,) = folder.glob("*.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE groups DROP COLUMN demonstrates")
        db.execute("DELETE FROM migrations WHERE name = 'm009_demonstrates'")
    Journal(path).close()
    server.process = type(server.process)(folder, JOB)
    assert [one.demonstrates for one in server.process.waiting().groups] == [None]


async def test_an_edit_of_this_run_is_accepted_once_and_another_run_is_refused(
    tmp_path: Path,
) -> None:
    app = create_app(ServerConfig("fake", tmp_path))
    swarm = app.state.server
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def send(sent: AddDemonstrationRequest) -> httpx.Response:
            return await client.post("/add_demonstration", json=sent.model_dump(mode="json"))

        other = (await send(request())).json()
        assert (other["success"], other["failure_reason"]) == (False, "other_run")
        own = request().model_copy(update={"run_id": swarm.run_id})
        first = (await send(own)).json()
        assert first["success"] and (await send(own)).json() == first
        changed = own.model_copy(update={"demonstrations": PAIR})
        assert (await send(changed)).status_code == 409
        wrong = own.model_copy(update={"demonstrations": PAIR[:1]})
        assert (await send(wrong)).status_code == 422
    await swarm.close()
