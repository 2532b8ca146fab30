"""Users' edits are sent to the server as demonstrations, once, and apart from thumbs. Each edit
that is not sent has a reason."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm.forgetting.server_requests import ServerRequests
from fakevllm.ledger.forgotten_groups import Cause
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.ledger.store import Ledger
from fakevllm.settlement import sending_loop
from fakevllm.settlement.feedback_service import FeedbackService
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_adapters.protocol.packed_numbers import unpack_ids
from fakevllm_adapters.protocol.swarm import EndGroupReply, LogEntry
from tests.proxy.ledger.ledger_cases import call, dropped, group, trained
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm, until
from tests.proxy.settlement.feedback_rig import KEY, POOLED, feedback_on, record_pooled, rows

PROMPT = unpack_ids(call().prompt_ids)
END = unpack_ids(call().response_ids)[-1]
REFUSED = EndGroupReply(success=False, failure_reason="other_run")


@asynccontextmanager
async def open_edit_proxy(
    folder: Path, loss: str = "sft", **settings: Any
) -> AsyncGenerator[tuple[ProxyComponents, FeedbackService, ScriptedSwarm]]:
    async def tokenize(body: Any) -> Any:
        text = body["messages"][-1]["content"]
        ids = [*PROMPT, *map(ord, text), END, 10]
        return {"tokens": ids, "count": len(ids), "max_model_len": 1000}

    async with ScriptedSwarm() as swarm:
        swarm.answers |= {"/add_sample": POOLED, "/add_demonstration": POOLED}
        swarm.functions["/tokenize"] = tokenize
        job = {} if loss == "keep" else {"demonstration_loss": loss}
        flags: dict[str, Any] = {
            "proxy": {"run_dir": folder},
            "swarm": {"url": swarm.url},
            "feedback": {"num_for_baseline": 2, "edits": loss},
            "job": job,
            **settings,
        }
        async with open_proxy(load(None, flags)) as proxy:
            yield proxy, proxy.feedback, swarm


def edits(proxy: ProxyComponents) -> list[tuple[str | None, str | None]]:
    return [(row.edit_state, row.edit_reason) for row in rows(proxy)]


async def until_edits(proxy: ProxyComponents, *states: str | None) -> list[str | None]:
    """Wait until the edits have these states. Return the slugs of their reasons."""
    await until(lambda: [state for state, _ in edits(proxy)] == [*states])
    return [reason and reason.partition(":")[0] for _, reason in edits(proxy)]


async def test_an_edit_is_sent_with_the_recorded_prompt_and_the_engines_ids(
    tmp_path: Path,
) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        record_pooled(proxy, "g1")
        row, _ = await service.accept(feedback_on("g1", edited="ab"), KEY)
        assert (row.edit_state, row.edit_reason) == ("waiting", None)
        await until_edits(proxy, "pooled")
        sent = swarm.bodies["/add_demonstration"]
        assert (sent["sample_id"], sent["run_id"]) == (f"edit:g1/{row.feedback_id}", "r")
        (one,) = sent["demonstrations"]
        assert one["kind"] == "plain" and unpack_ids(one["prompt_ids"]) == PROMPT
        assert unpack_ids(one["response_ids"]) == [97, 98, END]
        assert proxy.ledger.edits.counts() == {"pooled": 1}


async def test_an_edit_for_dpo_is_preferred_to_the_served_answer(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path, "dpo") as (proxy, service, swarm):
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        await until_edits(proxy, "pooled")
        chosen, rejected = swarm.bodies["/add_demonstration"]["demonstrations"]
        assert (chosen["kind"], rejected["kind"]) == ("chosen", "rejected")
        assert unpack_ids(rejected["response_ids"]) == unpack_ids(call().response_ids)


async def test_the_thumb_of_an_edit_is_trained_apart_from_it(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        record_pooled(proxy, "g1", "g2")
        await service.accept(feedback_on("g1", edited="ab", thumbs="down"), KEY)
        await service.accept(feedback_on("g2"), KEY)
        await until_edits(proxy, "pooled", None)
        await until(lambda: [row.state for row in rows(proxy)] == ["pooled", "pooled"])
        assert (swarm.calls["/add_demonstration"], swarm.calls["/add_sample"]) == (1, 2)
        name = f"g1/{rows(proxy)[0].feedback_id}"
        log = [
            trained(1, f"edit:{name}", step=4, siblings=[0]),
            dropped(2, **{f"feedback:{name}": "stale"}),
        ]
        proxy.ledger.apply_log("r", log)
        first = rows(proxy)[0]
        assert (first.state, first.reason, first.trained_step) == ("dropped", "stale", None)
        assert (first.edit_state, first.edit_step, first.edit_version) == ("trained", 4, 4)
        lost = LogEntry(seq=3, kind="restored", step=3, lost=[f"edit:{name}"])
        proxy.ledger.apply_log("r", [lost])
        assert edits(proxy)[0] == ("lost", "server_crashed")


async def test_without_the_setting_an_edit_is_only_stored(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path, "keep") as (proxy, service, swarm):
        record_pooled(proxy, "g1")
        row, _ = await service.accept(feedback_on("g1", edited="ab"), KEY)
        await until(lambda: rows(proxy)[0].state == "kept")
        assert (row.edit_state, edits(proxy)) == (None, [(None, None)])
        assert swarm.calls["/add_demonstration"] == swarm.calls["/tokenize"] == 0


async def test_an_edit_waits_until_its_group_has_reached_the_server(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED.model_copy(
            update={"run_id": "r", "calls": [[call()], [call()]]}
        )
        proxy.ledger.record(group("g1"))
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        await until(lambda: rows(proxy)[0].state == "kept")
        assert edits(proxy) == [("waiting", None)]
        proxy.delivery.settle(group("g1"))
        await until_edits(proxy, "pooled")


async def test_edits_of_an_earlier_proxy_process_are_sent_after_a_restart(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/get_engine_status"] = 503
        await until(lambda: not proxy.link.is_serving)
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        assert edits(proxy) == [("waiting", None)]
    async with open_edit_proxy(tmp_path) as (proxy, _, _):
        await until_edits(proxy, "pooled")


async def test_an_edit_that_waits_can_be_replaced_and_taken_back(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        proxy.ledger.record(group("g1"))  # not sent yet, so that its edits wait
        await service.accept(feedback_on("g1", edited="ab", thumbs="up"), KEY)
        await service.accept(feedback_on("g1", edited="cd"), KEY)
        assert edits(proxy) == [("kept", "replaced"), ("waiting", None)]
        again, is_repeated = await service.accept(feedback_on("g1", edited="cd"), KEY)
        assert is_repeated and again.edit_state == "waiting"
        await service.accept(feedback_on("g1", edited=None), KEY)
        assert edits(proxy)[1] == ("kept", "taken_back")
        _, is_repeated = await service.accept(feedback_on("g1", edited="cd"), KEY)
        assert not is_repeated and edits(proxy)[-1] == ("waiting", None)
        assert swarm.calls["/add_demonstration"] == 0


@pytest.mark.parametrize("loss", ["keep", "sft"])
async def test_an_edit_that_is_sent_again_after_another_one_is_the_last_edit(
    tmp_path: Path, loss: str
) -> None:
    state = None if loss == "keep" else "pooled"
    async with open_edit_proxy(tmp_path, loss) as (proxy, service, _):
        record_pooled(proxy, "g1")
        for number, text in enumerate(["ab", "cd", "ab"], start=1):
            for is_again in (False, True):
                body = feedback_on("g1", edited=text)
                assert (await service.accept(body, KEY))[1] is is_again
            await until_edits(proxy, *[state] * number)
        assert [row.edited for row in rows(proxy)] == ["ab", "cd", "ab"]
        await service.accept(feedback_on("g1", edited="ab", comment="Better."), KEY)
        assert (await service.accept(feedback_on("g1", edited="ab"), KEY))[1]


async def test_an_edit_that_was_sent_is_taken_back_too_late(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        await until_edits(proxy, "pooled")
        row, _ = await service.accept(feedback_on("g1", edited=None), KEY)
        assert (row.reason or "").startswith("too_late")
        assert edits(proxy)[0] == ("pooled", None)


async def test_a_later_thumb_leaves_an_edit_that_waits_unchanged(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, _):
        proxy.ledger.record(group("g1"))
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        await service.accept(feedback_on("g1", thumbs="down"), KEY)
        assert edits(proxy) == [("waiting", None), (None, None)]


async def test_an_edit_that_cannot_be_trained_is_kept_with_a_reason(tmp_path: Path) -> None:
    rows_ = tmp_path / "rows.jsonl"
    rows_.write_text('{"question": "what is the number of legs of a spider"}\n')
    held_out = {"release": {"eval_dataset": rows_}}
    async with open_edit_proxy(tmp_path / "run", "sft", **held_out) as (proxy, service, swarm):
        record_pooled(proxy, "g1")
        proxy.ledger.record(replace(group("g2", state="served"), reason="paused"))
        proxy.ledger.record(replace(group("g3"), arm="released"))
        proxy.ledger.settle("g3", "dropped", "released_version", 1, [[call()], [call()]], "r")
        await service.accept(feedback_on("g1", edited="answer 0"), KEY)
        await service.accept(feedback_on("g2", edited="ab"), KEY)
        await service.accept(feedback_on("g3", edited="ab"), KEY)
        reasons = await until_edits(proxy, "kept", "kept", "kept")
        assert reasons == ["same_text", "no_calls", "other_arm"]
        quote = "what is the number of legs of a spider? eight"
        await service.accept(feedback_on("g1", edited=quote), KEY)
        assert (await until_edits(proxy, *["kept"] * 4))[1] == "held_out"
        assert swarm.calls["/add_demonstration"] == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (400, "not_tokenized"),
        (500, "not_tokenized"),
        ("no JSON", "not_tokenized"),
        ({"tokens": None}, "not_tokenized"),
        ({"tokens": [1, 2], "max_model_len": 9}, "chat_template"),
    ],
)
async def test_an_edit_that_the_engine_does_not_render_is_kept(
    tmp_path: Path, answer: Any, reason: str
) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        del swarm.functions["/tokenize"]
        swarm.answers["/tokenize"] = answer
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        assert await until_edits(proxy, "kept") == [reason]
        assert swarm.calls["/add_demonstration"] == 0


async def test_an_edit_that_does_not_fit_into_the_context_is_kept(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        tokenize = swarm.functions["/tokenize"]

        async def with_small_context(body: Any) -> Any:
            return await tokenize(body) | {"max_model_len": len(PROMPT) + 2}

        swarm.functions["/tokenize"] = with_small_context
        record_pooled(proxy, "g1", "g2")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        await service.accept(feedback_on("g2", edited="a"), KEY)
        assert await until_edits(proxy, "kept", "pooled") == ["too_long", None]


@pytest.mark.parametrize("status", [429, 503])
async def test_an_edit_is_sent_again_after_a_passing_error(tmp_path: Path, status: int) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        tokenize = swarm.functions.pop("/tokenize")
        swarm.answers["/tokenize"] = status
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        await until(lambda: swarm.calls["/tokenize"] > 0)
        assert edits(proxy) == [("waiting", None)]
        swarm.functions["/tokenize"] = tokenize
        await until_edits(proxy, "pooled")


async def test_an_edit_that_cannot_be_sent_now_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending_loop, "FIRST_PAUSE_S", 0.01)
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        tokenize = swarm.functions["/tokenize"]

        async def fail_on_first(body: Any) -> Any:
            is_first = body["messages"][-1]["content"].startswith("ab")
            return 503 if is_first else await tokenize(body)

        swarm.functions["/tokenize"] = fail_on_first
        record_pooled(proxy, "g1", "g2", "g3")
        for name, text in (("g1", "ab"), ("g2", "cd"), ("g3", "ef")):
            await service.accept(feedback_on(name, edited=text), KEY)
        await until_edits(proxy, "waiting", "pooled", "pooled")
        swarm.functions["/tokenize"] = tokenize
        await until_edits(proxy, "pooled", "pooled", "pooled")
        assert swarm.calls["/add_demonstration"] == 3


async def test_an_edit_of_a_group_that_a_killed_proxy_has_not_written_is_kept(
    tmp_path: Path,
) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.feedback.record(
        FeedbackRecord(
            group_id="g1", feedback_id="f", received_at=1.0, edited="ab", edit_state="waiting"
        )
    )
    ledger.close()
    async with open_edit_proxy(tmp_path) as (proxy, _, _):
        assert await until_edits(proxy, "kept") == ["not_in_ledger"]


async def test_an_edit_of_an_answer_with_reasoning_is_not_trained(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        stored = group("g1", [0.5, 1.0])
        thought = '{"role":"assistant","content":"4","reasoning":"2+2 is 4."}'
        first = replace(stored.siblings[0], message_json=thought)
        proxy.ledger.record(replace(stored, siblings=[first, *stored.siblings[1:]]))
        proxy.ledger.settle("g1", "pooled", None, 1, [[call()], [call()]], "r")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        assert await until_edits(proxy, "kept") == ["reasoning"]
        assert swarm.calls["/add_demonstration"] == 0


@pytest.mark.parametrize("place", ["request", "answer"])
@pytest.mark.parametrize("loss", ["sft", "dpo"])
async def test_an_edit_of_a_group_that_would_be_redacted_today_is_not_trained(
    tmp_path: Path, loss: str, place: str
) -> None:
    secret = "write to jane@example.org"
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    stored = group("g1", [0.5, 1.0])
    if place == "request":
        stored = replace(stored, request_json=f'{{"messages":[{{"content":"{secret}"}}]}}')
    else:
        first = replace(stored.siblings[0], text=secret)
        stored = replace(stored, siblings=[first, *stored.siblings[1:]])
    ledger.record(stored)
    ledger.settle("g1", "pooled", None, 1, [[call()], [call()]], "r")
    ledger.close()
    settings = {"privacy": {"redact": ["email"]}}
    async with open_edit_proxy(tmp_path, loss, **settings) as (proxy, service, swarm):
        status = ROLLING.model_copy(update={"privacy": settings["privacy"]})
        swarm.answers["/get_engine_status"] = status
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        assert await until_edits(proxy, "kept") == ["redacted"]
        assert swarm.calls["/add_demonstration"] == swarm.calls["/tokenize"] == 0


@pytest.mark.parametrize(
    ("reply", "state", "reason"),
    [
        (REFUSED, "lost", "other_run"),
        (422, "lost", "swarm_refused"),
        (404, "kept", "old_server"),
        (409, "pooled", None),
        (
            EndGroupReply(success=True, failure_reason="no_demonstration_loss"),
            "dropped",
            "no_demonstration_loss",
        ),
    ],
)
async def test_the_outcome_of_an_edit_is_what_the_server_replies(
    tmp_path: Path, reply: Any, state: str, reason: str | None
) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/add_demonstration"] = reply
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1", edited="ab"), KEY)
        assert await until_edits(proxy, state) == [reason]


async def test_edits_that_wait_are_kept_when_the_setting_is_turned_off(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, _):
        proxy.ledger.record(group("g1"))
        await service.accept(feedback_on("g1", edited="ab"), KEY)
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.settle("g1", "pooled", None, 1, [[call()], [call()]], "r")
    ledger.close()
    async with open_edit_proxy(tmp_path, "keep") as (proxy, _, _):
        assert await until_edits(proxy, "kept") == ["turned_off"]


async def test_an_email_in_an_edit_is_redacted_and_the_edit_is_not_trained(tmp_path: Path) -> None:
    settings = {"privacy": {"redact": ["email"]}}
    status = ROLLING.model_copy(update={"privacy": settings["privacy"]})
    async with open_edit_proxy(tmp_path, "sft", **settings) as (proxy, service, swarm):
        swarm.answers["/get_engine_status"] = status
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1", edited="write to jane@example.org"), KEY)
        assert await until_edits(proxy, "kept") == ["redacted"]
        assert "jane" not in str(swarm.bodies)


async def test_a_forgotten_edit_leaves_no_text_and_is_not_trained(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, _):
        proxy.ledger.record(group("g1"))
        await service.accept(feedback_on("g1", edited="a secret"), KEY)
        proxy.ledger.forgotten.forget(["g1"], Cause.FORGOTTEN, 1.0)
        assert edits(proxy) == [("dropped", "forgotten")]
        assert rows(proxy)[0].edited is None


async def test_the_server_is_asked_to_forget_the_ids_of_an_edit(tmp_path: Path) -> None:
    async with open_edit_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1")
        row, _ = await service.accept(feedback_on("g1", edited="a secret"), KEY)
        await until_edits(proxy, "pooled")
        proxy.ledger.forgotten.forget(["g1"], Cause.FORGOTTEN, 1.0)
        assert proxy.ledger.drain()
        names: list[str] = []

        async def send(request: ForgetGroupsRequest) -> ForgetGroupsReply:
            names.extend(request.group_ids)
            return ForgetGroupsReply(success=True)

        async def find_run() -> str:
            return "r"

        await ServerRequests(proxy.ledger, send, find_run).send_unsent()
        assert {"g1", f"edit:g1/{row.feedback_id}"} <= set(names)


def test_a_trained_edit_is_among_the_versions_of_its_group(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.record(group("g1"))
    ledger.settle("g1", "dropped", "tied", 1, [[call()], [call()]], "r")
    assert ledger.drain()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute(
            "INSERT INTO feedback (group_id, feedback_id, received_at, kind, state, edit_state) "
            "VALUES ('g1', 'f', 0, 'feedback', 'kept', 'pooled')"
        )
    assert [one.has_open_feedback for one in ledger.stored_groups.after()] == [True]
    ledger.apply_log("r", [trained(1, "edit:g1/f", step=7, siblings=[0])])
    assert ledger.drain() and ledger.forgotten.versions(["g1"]) == [("r", 7)]
    assert ledger.trained(["1+1?"], []) == ({"1+1?"}, set())
    assert [one.has_open_feedback for one in ledger.stored_groups.after()] == [False]
    ledger.close()


def test_a_ledger_from_before_edits_were_trained_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP INDEX ix_feedback_edit")
        for column in ("edit_state", "edit_reason", "edit_step", "edit_version"):
            db.execute(f"ALTER TABLE feedback DROP COLUMN {column}")
        db.execute("DELETE FROM migrations WHERE name = 'm018_edits'")
        db.execute(
            "INSERT INTO feedback (group_id, feedback_id, received_at, kind, edited, state) "
            "VALUES ('g1', 'f', 0, 'feedback', 'ab', 'kept')"
        )
    ledger = Ledger.open(path)
    (row,) = ledger.feedback.of_group("g1")
    assert (row.edited, row.edit_state, row.edit_step) == ("ab", None, None)
    assert ledger.edits.waiting(1.0) == []
    ledger.close()


@pytest.mark.parametrize(
    ("edits_", "job"),
    [
        ("sft", {}),
        ("sft", {"demonstration_loss": "dpo"}),
        ("dpo", {"loss": "sft"}),
    ],
)
def test_edits_without_a_loss_that_trains_them_are_refused_in_one_line(
    edits_: str, job: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(None, {"feedback": {"edits": edits_}, "job": job})
    message = str(refusal.value)
    assert f'feedback.edits "{edits_}" needs a loss that trains edits' in message
    assert "\n" not in message


def test_edits_go_with_a_loss_alone_or_beside_the_policy_loss() -> None:
    for job in ({"loss": "sft"}, {"demonstration_loss": "sft"}):
        load(None, {"feedback": {"edits": "sft"}, "job": job})
