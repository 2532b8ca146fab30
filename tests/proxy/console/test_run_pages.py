"""The pages Evaluations, Releases and Configuration."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fakevllm.console.pages import evaluations
from fakevllm.console.sources import shared_evaluations
from fakevllm.console.sources.proxy_settings import SettingRow, sections_of
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.releases import (
    Decision,
    ReleaseRecord,
    ReleaseReply,
    ReleasesReply,
)
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app as server_app
from tests.fuzz.in_process_stack import listening
from tests.proxy.console.console_rig import ConsoleRig, open_console
from tests.proxy.console.test_pages import MARKUP, Elements, put
from tests.proxy.evaluation.test_evaluation_routes import open_client
from tests.proxy.ledger.ledger_cases import group, sibling
from tests.proxy.scripted_swarm import ScriptedSwarm

RELEASE = ReleaseRecord(
    number=1,
    id="operator-1",
    decision=Decision.RELEASED,
    version=10,
    parent=0,
    time_s=1_700_000_000.0,
    decided_by="ops",
)
REJECTION = ReleaseRecord(
    number=2,
    id="gate-20-rejected-1",
    decision=Decision.REJECTED,
    version=20,
    parent=10,
    time_s=1_700_000_100.0,
    decided_by="gate",
    evidence={"difference": -0.125, "low": -0.2, "high": -0.06, "pairs": 96, "restored": 10},
)
HISTORY = ReleasesReply(
    run_id="run-a",
    records=[RELEASE, REJECTION],
    released=10,
    candidate=None,
    rejected=[20, 21, 22],
    is_held=False,
)


@asynccontextmanager
async def open_swarm(**answers: Any) -> AsyncGenerator[ScriptedSwarm]:
    """Run a scripted server. `answers` are its replies by path without the slash."""
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {f"/{path}": answer for path, answer in answers.items()}
        yield swarm


def evaluated(
    row: int,
    version: int | None,
    rewards: Sequence[float | None],
    *,
    eval_id: str = "e1",
    greedy: float | None = 1.0,
    at: float = 1000.0,
) -> GroupRecord:
    record = group(f"{eval_id}-{row}-{version}-{at}", task_id=f"r{row}", received_at=at)
    samples = [sibling(index, reward) for index, reward in enumerate([greedy, *rewards])]
    return replace(
        record,
        siblings=samples,
        kind="eval",
        eval_id=eval_id,
        eval_version=version,
        state="served",
        reason="evaluation",
        question=f"question {row}",
    )


def table_rows(html: str) -> list[str]:
    """Return the text of each row in the body of the first table."""
    body = html.partition("<tbody>")[2].partition("</tbody>")[0]
    texts = [re.sub(r"<[^>]+>", " ", row) for row in body.split("</tr>")[:-1]]
    return [" ".join(text.split()) for text in texts]


# ---------------------------------------------------------------------------------- evaluations


async def test_an_evaluation_of_two_versions_shows_means_intervals_and_the_comparison(
    path: Path, ledger: Ledger
) -> None:
    put(
        ledger,
        *(evaluated(row, 0, [0.0, 0.0], at=1000.0 + row) for row in range(8)),
        *(evaluated(row, 5, [1.0, 0.0], at=2000.0 + row) for row in range(8)),
        group("app"),
    )
    async with open_console(path) as rig:
        for url in ("/evaluations", "/evaluations/e1"):
            first, second = table_rows(await rig.get(url))
            assert " 0 " in f" {first} " and "0.000 (0.000 to " in first
            assert "0.500 (" in second and "+0.500 (" in second
        detail = await rig.get("/evaluations/e1")
    assert "question 7" in detail
    assert 'href="/groups/e1-7-5-2007.0"' in detail
    assert table_rows(detail)[1].endswith("8 0 0")


async def test_weights_that_change_during_an_evaluation_make_one_version_with_a_range(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, evaluated(1, 12, [1.0]), evaluated(2, 14, [1.0]), evaluated(3, None, [0.0]))
    async with open_console(path) as rig:
        (row,) = table_rows(await rig.get("/evaluations"))
    assert "12 to 14 3 0.667" in row


async def test_rows_without_rewards_do_not_count_and_are_explained(
    path: Path, ledger: Ledger
) -> None:
    failed = replace(evaluated(2, 3, [None], greedy=None), reason="hook_failed: KeyError")
    put(ledger, evaluated(1, 3, [1.0]), failed)
    async with open_console(path) as rig:
        html = await rig.get("/evaluations/e1")
    assert "1 sampled rows have no reward" in html and "hook_failed: KeyError" in html
    assert "1 1.000" in table_rows(html)[0]


async def test_a_row_that_the_gate_draws_twice_counts_twice_and_is_compared_draw_by_draw(
    path: Path, ledger: Ledger
) -> None:
    draws = [(version, at) for version in (0, 4) for at in (1000.0, 1001.0)]
    put(
        ledger,
        *(
            evaluated(1, version, [float(version > 0)], eval_id="gate-4-h", at=at + version)
            for version, at in draws
        ),
    )
    async with open_console(path) as rig:
        html = await rig.get("/evaluations/gate-4-h")
    assert "release gate" in html
    assert table_rows(html)[1].endswith("2 0 0")


async def test_the_newest_evaluation_is_first_and_a_cut_one_is_left_out(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_evaluations, "MAX_LATEST", 5)
    monkeypatch.setattr(evaluations, "MAX_LATEST", 5)
    for number in range(3):
        put(
            ledger,
            *(
                evaluated(row, 1, [1.0], eval_id=f"e{number}", at=1000.0 * number + row)
                for row in range(2)
            ),
        )
    async with open_console(path) as rig:
        html = await rig.get("/evaluations")
    assert re.findall(r'href="/evaluations/(\w+)"', html) == ["e2", "e1"]
    assert "Only the latest 5 evaluated rows are read" in html


async def test_the_rows_of_a_large_evaluation_have_pages(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "ROWS_PER_PAGE", 2)
    put(ledger, *(evaluated(row, 1, [1.0], at=1000.0 + row) for row in range(5)))
    seen: list[str] = []
    async with open_console(path) as rig:
        url: str | None = "/evaluations/e1"
        while url is not None:
            html = await rig.get(url)
            seen += re.findall(r"question \d", html)
            found = re.search(r'href="([^"]+)">Later', html)
            url = None if found is None else found[1]
        for wrong in ("x", "-1", "9" * 5000):
            await rig.get(f"/evaluations/e1?rows_from={wrong}")
        assert (await rig.browser.get("/evaluations/none")).status_code == 404
    assert seen == [f"question {row}" for row in range(5)]


async def test_without_evaluations_the_page_says_how_to_make_one(
    path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        assert "fakevllm eval" in await rig.get("/evaluations")


# ------------------------------------------------------------------------------------- releases


async def test_the_history_is_shown_newest_first_with_figures(path: Path, ledger: Ledger) -> None:
    async with (
        open_swarm(releases=HISTORY) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        html = await rig.get("/releases")
    rejected, released = table_rows(html)
    assert "rejected" in rejected and "-0.125 (-0.200 to -0.060)" in rejected and "96" in rejected
    assert "released" in released and "ops" in released
    assert "Rejected versions: 20 to 22" in html


async def test_many_pages_share_one_question_to_the_server(path: Path, ledger: Ledger) -> None:
    async with (
        open_swarm(releases=HISTORY) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        for _ in range(5):
            await rig.get("/releases")
        assert swarm.calls["/releases"] == 1


async def form_of(rig: ConsoleRig, version: int, action: str) -> dict[str, str]:
    """Return the fields of a form on the page on which a decision is confirmed."""
    html = await rig.get(f"/releases/decision?version={version}")
    form = html.partition(f'action="/releases/{action}"')[2].partition("</form>")[0]
    assert form, html
    return dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))


async def test_a_promotion_is_confirmed_and_then_sent_with_its_run_and_its_id(
    path: Path, ledger: Ledger
) -> None:
    record = RELEASE.model_copy(update={"version": 15, "number": 3})
    after = HISTORY.model_copy(update={"records": [*HISTORY.records, record], "released": 15})
    async with (
        open_swarm(releases=HISTORY, release=ReleaseReply(success=True, record=record)) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await form_of(rig, 15, "promote")
        assert swarm.calls["/release"] == 0
        swarm.answers["/releases"] = after
        replies = [await rig.browser.post("/releases/promote", data=form) for _ in range(2)]
        assert swarm.calls["/release"] == 2
        # A double click sends the same decision again, and the server carries it out once.
        assert swarm.bodies["/release"]["id"] == form["decision_id"]
        assert [reply.status_code for reply in replies] == [303, 303]
        body = swarm.bodies["/release"]
        html = await rig.get(replies[-1].headers["location"])
    assert (body["decision"], body["version"], body["force"]) == ("released", 15, False)
    assert body["run_id"] == "run-a" and body["id"].startswith("operator-")
    assert "Version 15 is released (decision 3)." in html


async def test_a_rejected_version_is_released_only_if_the_box_is_ticked(
    path: Path, ledger: Ledger
) -> None:
    reply = ReleaseReply(success=True, record=RELEASE)
    async with (
        open_swarm(releases=HISTORY, release=reply) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await form_of(rig, 20, "promote")
        assert form["force"] == "yes"
        await rig.browser.post("/releases/promote", data=form)
        assert swarm.bodies["/release"]["force"] is True
        del form["force"]  # as a browser does if the box is not ticked
        await rig.browser.post("/releases/promote", data=form)
        assert swarm.bodies["/release"]["force"] is False


async def test_a_rollback_is_sent_and_its_result_is_shown(path: Path, ledger: Ledger) -> None:
    async with (
        open_swarm(
            releases=HISTORY, rollback=ReleaseReply(success=True, record=REJECTION)
        ) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await form_of(rig, 10, "rollback")
        reply = await rig.browser.post("/releases/rollback", data=form)
        html = await rig.get(reply.headers["location"])
        body = swarm.bodies["/rollback"]
    assert (body["version"], body["run_id"]) == (10, "run-a")
    assert "Training goes on from version 10 (decision 2)" in html


async def test_the_versions_whose_weights_the_server_has_can_be_chosen(path: Path) -> None:
    history = HISTORY.model_copy(update={"with_weights": [0, 10, 15]})
    async with (
        open_swarm(releases=history) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        html = await rig.get("/releases")
    assert re.findall(r"<option>(\d+)</option>", html) == ["15", "10", "0"]


async def hold_form(rig: ConsoleRig, action: str) -> dict[str, str]:
    """Return the fields of the form with which releases are stopped or allowed."""
    html = await rig.get("/releases/hold")
    form = html.partition(f'action="/releases/{action}"')[2].partition("</form>")[0]
    assert form, html
    return dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))


@pytest.mark.parametrize("action", ["hold", "resume"])
async def test_releases_are_held_and_resumed_after_a_confirmation(
    action: str, path: Path, ledger: Ledger
) -> None:
    is_held = action == "resume"
    record = RELEASE.model_copy(
        update={"decision": Decision(action), "version": None, "parent": None, "number": 3}
    )
    before = HISTORY.model_copy(update={"is_held": is_held})
    after = HISTORY.model_copy(
        update={"records": [*HISTORY.records, record], "is_held": not is_held}
    )
    async with (
        open_swarm(releases=before, release=ReleaseReply(success=True, record=record)) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        button = "Resume releases" if is_held else "Hold releases"
        assert f">{button}</button>" in await rig.get("/releases")
        form = await hold_form(rig, action)
        assert swarm.calls["/release"] == 0
        swarm.answers["/releases"] = after
        replies = [await rig.browser.post(f"/releases/{action}", data=form) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [303, 303]
        body = swarm.bodies["/release"]
        html = await rig.get(replies[-1].headers["location"])
    assert (body["decision"], body["version"]) == (action, None)
    assert (body["run_id"], body["id"]) == ("run-a", form["decision_id"])
    sentence = "Versions may be released again" if is_held else "Releases are on hold"
    assert f"{sentence} (decision 3)." in html


async def test_a_real_server_holds_releases_and_resumes_them(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    app = server_app(ServerConfig("fake", tmp_path / "server"))
    try:
        async with listening(app) as url, open_console(path, server_url=url) as rig:
            for number, action, words in (
                (1, "hold", "Releases are on hold (decision 1)."),
                (2, "resume", "Versions may be released again (decision 2)."),
            ):
                form = await hold_form(rig, action)
                reply = await rig.browser.post(f"/releases/{action}", data=form)
                assert reply.status_code == 303, reply.text
                html = await rig.get(reply.headers["location"])
                assert words in html and len(table_rows(html)) == number
    finally:
        await app.state.server.close()


async def test_a_hold_that_the_server_refuses_is_explained(path: Path, ledger: Ledger) -> None:
    refusal = ReleaseReply(success=False, failure_reason="Another run is the current one: <b>")
    async with (
        open_swarm(releases=HISTORY, release=refusal) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await hold_form(rig, "hold")
        reply = await rig.browser.post("/releases/hold", data=form)
        assert reply.status_code == 409
        assert "Another run is the current one: &lt;b&gt;" in reply.text
        reply = await rig.browser.post("/releases/hold", data=form | {"decision_id": "gate-1"})
        assert reply.status_code == 400 and "is not complete" in reply.text


async def test_without_a_server_releases_cannot_be_held(path: Path, ledger: Ledger) -> None:
    async with open_console(path) as rig:
        reply = await rig.browser.get("/releases/hold")
        assert reply.status_code == 503 and "fakevllm-server start" in reply.text
        assert "Hold releases" not in await rig.get("/releases")


@pytest.mark.parametrize("action", ["hold", "resume"])
async def test_a_hold_without_the_form_token_or_a_login_is_not_sent(
    action: str, path: Path, ledger: Ledger
) -> None:
    history = HISTORY.model_copy(update={"is_held": action == "resume"})
    async with (
        open_swarm(releases=history) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await hold_form(rig, action)
        reply = await rig.browser.post(f"/releases/{action}", data=form | {"form_token": "0" * 64})
        assert reply.status_code == 403
        rig.browser.cookies.clear()
        reply = await rig.browser.post(f"/releases/{action}", data=form)
        assert reply.status_code in (401, 403)
        assert swarm.calls["/release"] == 0


@pytest.mark.parametrize("action", ["promote", "rollback"])
async def test_a_decision_without_the_form_token_or_a_login_is_not_sent(
    action: str, path: Path, ledger: Ledger
) -> None:
    async with (
        open_swarm(releases=HISTORY) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await form_of(rig, 15 if action == "promote" else 10, action)
        for token in ("", "0" * 64):
            data = form | {"form_token": token}
            reply = await rig.browser.post(f"/releases/{action}", data=data)
            assert reply.status_code == 403
        # The address of a form is not a page.
        assert (await rig.browser.get(f"/releases/{action}")).status_code == 303
        rig.browser.cookies.clear()
        reply = await rig.browser.post(f"/releases/{action}", data=form)
        assert reply.status_code in (401, 403)
        assert swarm.calls["/release"] == swarm.calls["/rollback"] == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": "x"}, "is not a version"),
        ({"version": "9" * 30}, "is not a version"),
        ({"version": "\u0665"}, "is not a version"),
        ({"version": ""}, "is not a version"),
        ({"decision_id": "gate-1"}, "is not complete"),
        ({"decision_id": ""}, "is not complete"),
    ],
)
async def test_a_form_that_cannot_be_understood_is_refused(
    fields: dict[str, str], words: str, path: Path, ledger: Ledger
) -> None:
    async with (
        open_swarm(releases=HISTORY) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await form_of(rig, 10, "rollback")
        reply = await rig.browser.post("/releases/rollback", data=form | fields)
        assert reply.status_code == 400 and words in reply.text
        assert swarm.calls["/rollback"] == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (401, "The server needs an API key"),
        (403, "This key may not decide about releases"),
        (404, "does not know releases"),
        (409, "refused"),
        (
            ReleaseReply(success=False, failure_reason="Version 15 has no checkpoint: <b>"),
            "Version 15 has no checkpoint: &lt;b&gt;",
        ),
    ],
)
async def test_a_refusal_of_the_server_is_one_plain_sentence(
    answer: Any, words: str, path: Path, ledger: Ledger
) -> None:
    async with (
        open_swarm(releases=HISTORY, release=answer) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        form = await form_of(rig, 15, "promote")
        reply = await rig.browser.post("/releases/promote", data=form)
        assert reply.status_code == 409
        (sentence,) = re.findall(r'role="alert"><p><strong>(.*?)</strong>', reply.text, re.DOTALL)
        assert words in sentence
        assert 'action="/releases/promote"' in reply.text


@pytest.mark.parametrize(
    ("answer", "words"), [(403, "pass an admin&#39;s key"), (404, "does not know releases")]
)
async def test_a_history_that_the_server_refuses_is_explained(
    answer: int, words: str, path: Path, ledger: Ledger
) -> None:
    async with (
        open_swarm(releases=answer) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        assert words in await rig.get("/releases")
        reply = await rig.browser.get("/releases/decision?version=3")
        assert reply.status_code == 503 and words in reply.text


async def test_without_a_server_the_page_names_the_command_that_starts_one(
    path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        assert "fakevllm-server start" in await rig.get("/releases")


async def test_a_run_without_decisions_says_which_version_is_released(
    path: Path, ledger: Ledger
) -> None:
    empty = ReleasesReply(records=[], released=0, candidate=None, rejected=[], is_held=True)
    async with (
        open_swarm(releases=empty) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        html = await rig.get("/releases")
    assert "version 0, the model before any training, counts as released" in html
    assert "fakevllm release resume" in html


# -------------------------------------------------------------------------------- configuration


async def settings_of_a_proxy(
    folder: Path, *, job: dict[str, Any], fallback: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a real proxy says about its settings."""
    async with open_client(folder, job=job, fallback=fallback or {}) as (_, _, client):
        reply = await client.get("/fakevllm/configuration")
        assert reply.status_code == 200
        return reply.json()


async def test_the_configuration_shows_values_origins_and_no_secret(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    reply = await settings_of_a_proxy(tmp_path, fallback={"key": "sk-fallback"}, job={"lr": 0.5})
    async with (
        open_swarm(**{"fakevllm/configuration": reply}) as swarm,
        open_console(path, proxy_url=swarm.url, server_url=swarm.url) as rig,
    ):
        shown = await rig.get("/configuration")
        everything = await rig.get("/configuration?all=yes")
    assert "sk-fallback" not in everything
    assert "not set" in everything and "<code>set</code>" in shown
    assert "batch_size" in everything and "batch_size" not in shown
    assert "8000" in everything


async def test_a_job_that_differs_from_that_of_the_server_is_marked(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    reply = await settings_of_a_proxy(tmp_path, job={"lr": 0.5})
    async with (
        open_swarm(**{"fakevllm/configuration": reply, "get_train_config": {"lr": 0.25}}) as swarm,
        open_console(path, proxy_url=swarm.url, server_url=swarm.url) as rig,
    ):
        html = await rig.get("/configuration")
    assert "The server trains with 0.25." in html
    assert html.count("The server trains with") == 1


def test_settings_are_listed_by_section_in_their_order() -> None:
    entries = [
        {"key": "proxy.port", "value": "8000", "origin": "default"},
        {"key": "hooks.reload.groups", "value": "50", "origin": "file"},
    ]
    assert sections_of(entries, None) == {
        "proxy": [SettingRow("port", "8000", "default")],
        "hooks": [SettingRow("reload.groups", "50", "file")],
    }


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (404, "does not show its settings"),
        (401, "The proxy needs an API key"),
        ({"settings": 3}, "does not show its settings"),
        ({"settings": ["x"], "file": None}, "does not show its settings"),
    ],
)
async def test_a_proxy_that_does_not_show_its_settings_is_explained(
    answer: Any, words: str, path: Path, ledger: Ledger
) -> None:
    async with (
        open_swarm(**{"fakevllm/configuration": answer}) as swarm,
        open_console(path, proxy_url=swarm.url, server_url=swarm.url) as rig,
    ):
        assert words in await rig.get("/configuration")


async def test_without_a_proxy_the_configuration_says_what_to_do(
    path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        assert "fakevllm serve" in await rig.get("/configuration")


# ------------------------------------------------------------------------------------- markup


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_in_texts_of_runs_is_shown_as_text(
    text: str, path: Path, ledger: Ledger
) -> None:
    strange = replace(
        evaluated(1, 1, [None], eval_id=text, greedy=None),
        group_id=text,
        task_id=text,
        question=text,
        reason=text,
        model=text,
        hook_hash=text,
    )
    put(ledger, strange, replace(evaluated(1, 2, [1.0], eval_id=text), hook_hash=text + "2"))
    record = REJECTION.model_copy(
        update={"id": text, "decided_by": text, "evidence": {text: text, "pairs": text}}
    )
    history = HISTORY.model_copy(update={"run_id": text, "records": [record]})
    refusal = ReleaseReply(success=False, failure_reason=text)
    settings = {
        "file": text,
        "settings": [
            {"key": f"{text}.{text}", "value": text, "origin": text},
            {"key": "job.lr", "value": text, "origin": "file"},
        ],
    }
    answers = {"fakevllm/configuration": settings, "get_train_config": {"model": text}}
    quoted = quote(text, safe="")
    urls = ["/evaluations", f"/evaluations/{quoted}", f"/evaluations/x?rows_from={quoted}"]
    urls += ["/releases", f"/releases?decision={quoted}", "/releases/decision?version=20"]
    urls += ["/releases/hold"]
    urls += [f"/releases/decision?version={quoted}", "/configuration", "/configuration?all=yes"]
    async with (
        open_swarm(releases=history, rollback=refusal, **answers) as swarm,
        open_console(path, proxy_url=swarm.url, server_url=swarm.url) as rig,
    ):
        pages = [
            (await rig.browser.get(url, headers=headers)).text
            for url in urls
            for headers in ({}, {"hx-request": "true"})
        ]
        form = await form_of(rig, 20, "rollback") | {"run_id": text}
        pages.append((await rig.browser.post("/releases/rollback", data=form)).text)
    for html in pages:
        elements = Elements()
        elements.feed(html)
        assert elements.unexpected == []
    visible = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    visible = visible.replace("'", "&#39;").replace('"', "&#34;")
    assert visible in pages[2] and visible in pages[-1]
