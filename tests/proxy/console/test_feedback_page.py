"""The page Feedback in front of a real proxy: the queue, the form, and what became of feedback."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm.config.key_file import KeyFile
from fakevllm.console.feedback_sentences import step_sentence, tokens_sentence, value_sentence
from fakevllm.console.pages import feedback as feedback_page
from fakevllm.ledger.feedback_reads import FeedbackOutcome
from fakevllm.ledger.forgotten_groups import Cause
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.ledger.store import Ledger
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm_adapters.protocol.keys import Role, fingerprint, named_key
from fakevllm_adapters.protocol.swarm import LogEntry, TrainedGroup
from tests.fuzz.in_process_stack import listening
from tests.proxy.console.console_rig import ConsoleRig, open_console
from tests.proxy.ledger.ledger_cases import call, group
from tests.proxy.scripted_swarm import ROLLING, until
from tests.proxy.settlement.feedback_rig import (
    open_feedback_proxy,
    record_pooled,
    rows,
    until_states,
)

PART = {"hx-request": "true"}


@dataclass(frozen=True, slots=True)
class Rig:
    proxy: ProxyComponents
    console: ConsoleRig

    async def send(
        self, group_id: str, *, headers: dict[str, str] | None = None, **fields: str
    ) -> httpx.Response:
        """Send the form of an answer."""
        token = await self.console.form_token("/feedback")
        data = {"form_token": token, **fields}
        return await self.console.browser.post(
            f"/feedback/{group_id}", data=data, headers=headers or PART
        )


@asynccontextmanager
async def open_rig(folder: Path, key: str | None = None, **settings: Any) -> AsyncGenerator[Rig]:
    ledger = folder / "ledger.sqlite"
    async with (
        open_feedback_proxy(folder, **settings) as (proxy, _, _),
        listening(create_app(proxy)) as url,
        open_console(ledger, proxy_url=url, proxy_key=key, num_for_baseline=2) as console,
    ):
        yield Rig(proxy, console)


def feedback(group_id: str, **columns: Any) -> FeedbackRecord:
    return FeedbackRecord(group_id=group_id, feedback_id="f", received_at=1.0, **columns)


def queued(html: str) -> list[str]:
    return re.findall(r'hx-post="/feedback/([^"]+)"', html)


async def test_a_thumb_is_stored_by_the_proxy_and_its_training_is_shown(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        record_pooled(rig.proxy, "g1", "g2")
        assert rig.proxy.ledger.drain()
        assert sorted(queued(await rig.console.get("/feedback"))) == ["g1", "g2"]
        reply = await rig.send("g1", send="up")
        assert reply.status_code == 200 and "The proxy has stored your feedback" in reply.text
        assert 'href="/groups/g1"' in reply.text and "<html" not in reply.text
        await until_states(rig.proxy, "waiting")
        html = await rig.console.get("/feedback")
        assert queued(html) == ["g2"] and "has sent feedback about 1 more answer," in html
        assert "when 2 have been sent without an API key: 1 more is missing." in html
        await rig.send("g2", send="down")
        first, _ = await until_states(rig.proxy, "pooled", "pooled")
        assert "It waits for the next training step" in await rig.console.get("/feedback/g1")
        sample = TrainedGroup(group_id=f"feedback:g1/{first.feedback_id}", siblings=[0])
        step = LogEntry(seq=1, kind="step", step=4, version=5, groups=[sample], metrics={"a": 0})
        rig.proxy.ledger.apply_log("r", [step])
        await until_states(rig.proxy, "trained", "pooled")
        for page in ("/feedback", "/feedback/g1"):
            part = await rig.console.browser.get(page, headers=PART)
            assert "It was trained in step 4." in part.text
            assert "<textarea" not in part.text, "an update must not replace a text that is typed"


async def test_the_page_says_how_much_is_missing_until_feedback_is_trained(
    tmp_path: Path,
) -> None:
    quarter = ROLLING.model_copy(update={"backlog": 0.25, "global_step": 7})
    async with open_rig(tmp_path, status=quarter) as rig:
        record_pooled(rig.proxy, "g1", "g2")
        assert rig.proxy.ledger.drain()
        await until(lambda: rig.proxy.link.status is not None)
        html = await rig.console.get("/feedback")
        assert "when 2 have been sent without an API key: 2 more are missing." in html
        assert "Step 7 has 25 % of its groups." in html
        assert 'id="progress"' in html and "hx-swap-oob" not in html
        await rig.send("g1", send="up")
        await rig.send("g2", send="down")
        await until_states(rig.proxy, "pooled", "pooled")
        part = (await rig.console.browser.get("/feedback", headers=PART)).text
        assert 'id="progress" class="soft" role="status" hx-swap-oob="true"' in part
        assert "further ones are trained if they differ" in part


async def test_an_answer_without_tokens_says_that_feedback_about_it_is_not_trained(
    path: Path, ledger: Ledger
) -> None:
    ledger.record(replace(group("alone"), state="served"))
    ledger.record(group("waits", state="scored"))
    ledger.record(group("kept", state="scored"))
    ledger.settle("kept", "pooled", None, 1, [[call()], [call()]], "r")
    ledger.record(group("deleted", state="dropped"))
    ledger.forgotten.forget(["deleted"], Cause.PRUNED, 1.0)
    assert ledger.drain()
    words = "Feedback about this answer is stored, and is not trained: its tokens are not kept."
    async with open_console(path) as console:
        html = await console.get("/feedback")
        assert sorted(queued(html)) == ["alone", "kept", "waits"] and html.count(words) == 1
        for name in ("alone", "waits", "kept"):
            assert (words in await console.get(f"/feedback/{name}")) == (name == "alone")
        deleted = await console.get("/feedback/deleted")
        assert "it cannot be rated any more" in deleted and 'action="/feedback/' not in deleted


def test_the_tokens_of_an_answer_decide_whether_its_feedback_can_be_trained() -> None:
    pooled = group("g", state="pooled")
    assert tokens_sentence(pooled, [None]) == tokens_sentence(pooled, ["why", None]) == ""
    assert tokens_sentence(pooled, ["redacted", "why"]).endswith("not trained: redacted.")


@pytest.mark.parametrize(
    "engine",
    [None, {}, {"global_step": None, "backlog": 0.5}, {"global_step": 3, "backlog": "x"}],
)
def test_without_a_known_step_nothing_is_said_about_it(engine: dict[str, Any] | None) -> None:
    assert step_sentence(engine) == ""


def test_a_run_that_takes_no_more_steps_has_no_next_step() -> None:
    rolling = {"global_step": 3, "backlog": 2.5}
    assert "100 %" in step_sentence(rolling)
    assert step_sentence(rolling | {"closed": "training_finished"}) == ""


async def test_a_corrected_text_is_sent_only_if_it_was_changed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        record_pooled(rig.proxy, "g1", "g2")
        assert rig.proxy.ledger.drain()
        assert "\nanswer 0</textarea>" in await rig.console.get("/feedback")
        reply = await rig.send("g1", send="text", edited="answer 0")
        assert reply.status_code == 409 and "Nothing was sent" in reply.text
        assert rows(rig.proxy) == []
        await rig.send("g1", send="down", edited="a\r\nbetter\r\nanswer", comment="too short")
        await rig.send("g2", send="up", edited="answer 0")
        one, other = rows(rig.proxy)
        assert (one.thumbs, one.edited, one.comment) == ("down", "a\nbetter\nanswer", "too short")
        assert (other.thumbs, other.edited, other.comment) == ("up", None, None)
        html = await rig.console.get("/feedback/g1")
        assert "The correction is stored, and is not trained" in html


async def test_feedback_can_be_taken_back_on_the_page_of_its_answer(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        record_pooled(rig.proxy, "g1")
        assert rig.proxy.ledger.drain()
        sent = await rig.send("g1", headers={"accept": "text/html"}, send="up")
        assert (sent.status_code, sent.headers["location"]) == (303, "/feedback/g1")
        await until_states(rig.proxy, "waiting")
        await rig.send("g1", send="take_back")
        assert "It was taken back." in await rig.console.get("/feedback/g1")


async def test_a_refusal_is_shown_and_the_typed_text_stays(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    keys.add(named_key("k-admin", "boss", "2026-01-01"))
    keys.add(named_key("k-client", "app", "2026-01-01", role=Role.CLIENT))
    expected = {
        "k-client": "Only the key of an admin may set",
        None: "The proxy needs an API key",
        "k-admin": "The proxy has stored your feedback",
    }
    for key, words in expected.items():
        async with open_rig(tmp_path, key=key) as rig:
            record_pooled(rig.proxy, "g1")
            assert rig.proxy.ledger.drain()
            for headers in (PART, {"accept": "text/html"}):
                reply = await rig.send("g1", headers=headers, send="up", edited="my own words")
                if key == "k-admin":
                    assert words in reply.text or reply.status_code == 303
                else:
                    assert reply.status_code == 409 and words in reply.text
                    assert "\nmy own words</textarea>" in reply.text
                    assert rows(rig.proxy) == []
            if key == "k-admin":
                (row,) = rows(rig.proxy)
                assert row.app_key == fingerprint("k-admin")


async def test_only_an_admin_may_rate_the_answers_of_other_keys(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    keys.add(named_key("k-admin", "boss", "2026-01-01"))
    keys.add(named_key("k-client", "app", "2026-01-01", role=Role.CLIENT))
    async with (
        open_feedback_proxy(tmp_path) as (proxy, _, _),
        listening(create_app(proxy)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        record_pooled(proxy, "g1")
        assert proxy.ledger.drain()

        async def status(key: str, **fields: object) -> int:
            body = {"id": "g1", "thumbs": "up", **fields}
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post("/v1/feedback", json=body, headers=headers)).status_code

        assert await status("k-client") == 404
        assert await status("k-admin") == 404
        assert await status("k-client", any_key=True) == 403
        assert await status("k-admin", any_key=True, id="none") == 404
        assert rows(proxy) == []
        assert await status("k-admin", any_key=True) == 200


async def test_without_a_proxy_the_form_says_so(path: Path, ledger: Ledger) -> None:
    ledger.record(group("g1"))
    assert ledger.drain()
    async with open_console(path) as console:
        token = await console.form_token("/feedback")
        data = {"form_token": token, "send": "up", "edited": "typed"}
        reply = await console.browser.post("/feedback/g1", data=data, headers=PART)
        assert reply.status_code == 409 and "No fakevllm proxy answers" in reply.text
        assert "\ntyped</textarea>" in reply.text


async def test_a_form_without_its_token_changes_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        record_pooled(rig.proxy, "g1")
        assert rig.proxy.ledger.drain()
        reply = await rig.console.browser.post("/feedback/g1", data={"send": "up"})
        assert reply.status_code == 403 and rows(rig.proxy) == []


async def test_the_queue_has_each_unrated_answer_once(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback_page, "ANSWERS_PER_PAGE", 3)
    for number in range(8):
        ledger.record(group(f"g{number}", received_at=1000.0 + number // 2))
    ledger.record(replace(group("failed"), served_index=None))
    ledger.record(replace(group("eval"), kind="eval"))
    ledger.feedback.record(feedback("g5", thumbs="up"))
    ledger.feedback.record(feedback("g4", kind="next_message"))
    assert ledger.drain()
    seen: list[str] = []
    async with open_console(path) as console:
        url: str | None = "/feedback"
        while url is not None:
            html = await console.get(url)
            seen += queued(html)
            older = re.search(r'href="([^"]+)">Older', html)
            url = None if older is None else older[1].replace("&amp;", "&")
        assert seen == ["g7", "g6", "g4", "g3", "g2", "g1", "g0"]
        assert (await console.browser.get("/feedback?after=x")).status_code == 400
        for name in ("failed", "none"):
            assert (await console.browser.get(f"/feedback/{name}")).status_code == 404


def test_feedback_that_joined_its_group_is_trained_with_the_group() -> None:
    row = feedback("g", thumbs="up", state="joined", value=1.0)
    assert value_sentence(FeedbackOutcome(row, "q", "trained", None, 7)) == (
        "It was trained in step 7."
    )
    assert "waits for a training step" in value_sentence(FeedbackOutcome(row, "q", "pooled"))
    assert "stale" in value_sentence(FeedbackOutcome(row, "q", "dropped", "stale"))
    lost = value_sentence(FeedbackOutcome(row, "q", "lost", "server_crashed", 7))
    assert "server_crashed" in lost
    unvalued = replace(row, state="kept", reason="no_number")
    assert value_sentence(FeedbackOutcome(unvalued)).startswith("The hook gave it no value")
    comment = replace(unvalued, thumbs=None, comment="hm")
    assert value_sentence(FeedbackOutcome(comment)).startswith("It has neither thumb nor score")
    refused = replace(row, state="kept", reason="no_calls")
    assert value_sentence(FeedbackOutcome(refused)) == "It does not count: no_calls."
