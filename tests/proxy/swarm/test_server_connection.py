"""The link to the swarm server recovers from every reply and error."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from fakevllm.ledger.store import Ledger
from fakevllm.swarm import server_connection as link_module
from fakevllm.swarm.errors import NEEDS_ADMIN_KEY, describe_error
from fakevllm.swarm.load_probe import LoadProbe
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.releases import Decision, ReleaseRequest, ReleasesReply
from fakevllm_adapters.protocol.swarm import EngineStatus
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm, until


def response_error(status: int, message: str) -> aiohttp.ClientResponseError:
    url = URL("http://localhost:10086/get_engine_status")
    request = aiohttp.RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict[str]()), url)
    return aiohttp.ClientResponseError(request, (), status=status, message=message)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


@asynccontextmanager
async def following(
    swarm: ScriptedSwarm,
    ledger: Ledger,
    load_probe: LoadProbe | None = None,
    job: TrainJob | None = None,
) -> AsyncGenerator[SwarmLink]:
    link = SwarmLink(swarm.url, None, job or TrainJob(), ledger, load_probe)
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()


@pytest.mark.parametrize("answer", ["<html>hello</html>", [], {}, 500])
async def test_a_malformed_status_is_logged_once_and_the_link_recovers(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, answer: object
) -> None:
    caplog.set_level(logging.INFO, "fakevllm.link")
    async with ScriptedSwarm() as swarm, following(swarm, ledger) as link:
        await link.reached.wait()
        assert link.status == ROLLING
        swarm.answers["/get_engine_status"] = answer
        num_before = swarm.calls["/get_engine_status"]
        await until(lambda: swarm.calls["/get_engine_status"] >= num_before + 4)
        assert link.status is None and not link.reached.is_set() and not link.is_silent
        swarm.answers["/get_engine_status"] = ROLLING
        await link.reached.wait()
        assert link.status == ROLLING
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "INFO"]
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_an_unreachable_server_is_logged_in_one_line_with_its_url_and_a_fix(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound but not listening, so connections are refused
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        link = SwarmLink(url, None, TrainJob(), ledger)
        task = asyncio.create_task(link.run())
        await until(lambda: bool(link_messages(caplog)))
        assert link.is_silent
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()
    assert link_messages(caplog) == [
        f"swarm server {url} cannot be reached (Connection refused): start it with "
        "`fakevllm-server start`, or name another with --swarm; retrying"
    ]


def link_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "fakevllm.link"]


@pytest.mark.parametrize(
    ("error", "beginning"),
    [
        (
            response_error(401, "Unauthorized"),
            "refuses the proxy's key (401): give a key of the server with",
        ),
        (response_error(404, "Not Found"), "answers 404 Not Found: see its log, or name a"),
        (aiohttp.ServerDisconnectedError(), "cannot be reached (Server disconnected): start it"),
        (aiohttp.ServerTimeoutError("slow"), "does not answer within 10 s"),
        (ValueError("a\n  b" * 200), "cannot be polled (ValueError: a b"),
    ],
)
def test_every_error_of_the_server_is_described_in_one_line(
    error: Exception, beginning: str
) -> None:
    line = describe_error(error)
    assert line.startswith(beginning)
    assert "\n" not in line and "ConnectionKey" not in line and len(line) < 400


async def test_a_server_that_speaks_no_tls_is_described_in_the_words_of_openssl() -> None:
    async with ScriptedSwarm() as swarm, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientSSLError) as raised:
            await http.get(swarm.url.replace("http:", "https:"))
    line = describe_error(raised.value)
    assert line.startswith("cannot be reached ([SSL"), line


class CountingLedger(Ledger):
    num_reads = 0

    def log_cursor(self, run_id: str) -> int:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        self.num_reads += 1
        if self.num_reads == 1:
            raise OSError("the disk is not available")
        return super().log_cursor(run_id)


async def test_the_cursor_is_read_once_in_a_thread_and_an_error_of_the_read_is_retried(
    tmp_path: Path,
) -> None:
    plain = Ledger.open(tmp_path / "ledger.sqlite")
    plain.__class__ = CountingLedger
    assert isinstance(plain, CountingLedger)
    async with ScriptedSwarm() as swarm, following(swarm, plain) as link:
        await link.reached.wait()
        num_before = swarm.calls["/get_run_log"]
        await until(lambda: swarm.calls["/get_run_log"] >= num_before + 3)
    assert plain.num_reads == 2
    plain.close()


async def test_a_server_that_answers_is_not_silent_although_its_log_cannot_be_fetched(
    ledger: Ledger,
) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_run_log"] = 500
        link = SwarmLink(swarm.url, None, TrainJob(), ledger)
        link.is_silent = True
        task = asyncio.create_task(link.run())
        await until(lambda: swarm.calls["/get_run_log"] >= 2)
        assert not link.is_silent
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()


async def test_until_serving_waits_for_an_engine_that_has_become_unavailable(
    ledger: Ledger,
) -> None:
    booting = ROLLING.model_copy(update={"engine_status": EngineStatus.BOOTING})
    async with ScriptedSwarm() as swarm, following(swarm, ledger) as link:
        await link.reached.wait()
        await until(lambda: swarm.calls["/get_run_log"] >= 2)
        swarm.answers["/get_engine_status"] = booting
        link.status = booting  # as set before the rest of the poll
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await link.until_serving(30)


async def test_until_serving_returns_when_the_engine_becomes_ready(ledger: Ledger) -> None:
    booting = ROLLING.model_copy(update={"engine_status": EngineStatus.BOOTING})
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_engine_status"] = booting
        async with following(swarm, ledger) as link:
            await link.reached.wait()
            waiting = asyncio.create_task(link.until_serving(30))
            await asyncio.sleep(0)
            swarm.answers |= {"/get_engine_status": ROLLING, "/get_run_log": 500}
            async with asyncio.timeout(30):  # although the log cannot be fetched
                await waiting


class HangingProbe(LoadProbe):
    num_probes = num_cancelled = 0

    async def follow(self, http: aiohttp.ClientSession, *, is_serving: bool) -> None:
        self.num_probes += is_serving
        try:
            await (asyncio.Event().wait() if is_serving else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def test_a_server_is_polled_although_its_engine_does_not_answer_the_load_probe(
    ledger: Ledger,
) -> None:
    load_probe = HangingProbe()
    async with ScriptedSwarm() as swarm, following(swarm, ledger, load_probe) as link:
        async with asyncio.timeout(30):
            await link.reached.wait()
        await until(lambda: load_probe.num_probes == 1)
        num_before = swarm.calls["/get_engine_status"], swarm.calls["/get_run_log"]
        await until(lambda: swarm.calls["/get_engine_status"] >= num_before[0] + 3)
        await until(lambda: swarm.calls["/get_run_log"] >= num_before[1] + 2)
        assert load_probe.num_probes == 1 and load_probe.num_cancelled == 0
    assert load_probe.num_cancelled == 1, "the probe ends only with the link"


async def test_the_run_log_is_requested_when_the_status_changes_and_at_intervals_otherwise(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "LOG_EVERY_S", 3600.0)
    async with ScriptedSwarm() as swarm, following(swarm, ledger):
        await until(lambda: swarm.calls["/get_engine_status"] >= 4)
        assert swarm.calls["/get_run_log"] == 1
        counts = {"backlog": 0.5, "waiting": {"finished_groups": 1}}
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update=counts)
        num_polls = swarm.calls["/get_engine_status"]
        await until(lambda: swarm.calls["/get_engine_status"] >= num_polls + 3)
        assert swarm.calls["/get_run_log"] == 1, "a waiting group makes no entry"
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"global_step": 7})
        await until(lambda: swarm.calls["/get_run_log"] == 2)
        monkeypatch.setattr(link_module, "LOG_EVERY_S", 0.0)
        await until(lambda: swarm.calls["/get_run_log"] >= 4)


OFFLINE = ROLLING.model_copy(update={"engine_status": EngineStatus.OFFLINE, "model": None})
ACCEPTED = {"success": True}
REFUSED = {"success": False, "error": "1 validation error\nfuture_setting is not known"}


@pytest.mark.parametrize(
    ("sync", "start"), [(REFUSED, ACCEPTED), (ACCEPTED, REFUSED)], ids=["sync", "start"]
)
async def test_the_reason_for_a_refused_job_is_logged_once_and_stays_in_the_status(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, sync: object, start: object
) -> None:
    reason = "1 validation error future_setting is not known"
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {
            "/get_engine_status": OFFLINE,
            "/sync_train_config": sync,
            "/start_engine": start,
        }
        async with following(swarm, ledger) as link:
            await until(lambda: swarm.calls["/get_engine_status"] >= 5)
            assert link.status is not None and link.status.engine_status_detail == reason
            swarm.answers["/get_engine_status"] = OFFLINE.model_copy(
                update={"engine_status_detail": "its own"}
            )
            await until(lambda: link.status is not None and "own" in str(link.status))
            swarm.answers["/get_engine_status"] = ROLLING
            await until(lambda: link.status == ROLLING)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1 and errors[0].endswith(reason)
    assert swarm.calls["/sync_train_config"] == 1


async def test_a_key_that_may_not_start_the_engine_is_logged_with_a_fix(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    detail = "/sync_train_config is for admins"
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {
            "/get_engine_status": OFFLINE,
            "/sync_train_config": web.json_response({"detail": detail}, status=403),
        }
        async with following(swarm, ledger) as link:
            await until(lambda: swarm.calls["/get_engine_status"] >= 5)
            assert link.status is not None
            assert link.status.engine_status_detail == f"{NEEDS_ADMIN_KEY} ({detail})"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"{swarm.url}/sync_train_config: {NEEDS_ADMIN_KEY} ({detail})"]
    assert swarm.calls["/start_engine"] == 0


NO_SPACE = "The request cannot be written to the journal now (disk is full). Try again later."


async def test_a_server_that_cannot_start_its_engine_now_is_asked_again(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "FIRST_START_PAUSE_S", 0.01)
    monkeypatch.setattr(link_module, "MAX_START_PAUSE_S", 0.01)
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {"/get_engine_status": OFFLINE, "/sync_train_config": ACCEPTED}
        swarm.answers["/start_engine"] = {"detail": NO_SPACE}
        swarm.statuses["/start_engine"] = 503
        async with following(swarm, ledger) as link:
            await until(lambda: swarm.calls["/start_engine"] >= 3)
            assert link.status is not None and link.status.engine_status_detail == NO_SPACE
            assert link.may_become_ready, "requests wait for the engine"
            swarm.answers["/start_engine"] = ACCEPTED
            del swarm.statuses["/start_engine"]
            await until(lambda: not link.may_become_ready)
            num_starts = swarm.calls["/start_engine"]
            num_polls = swarm.calls["/get_engine_status"]
            await until(lambda: swarm.calls["/get_engine_status"] >= num_polls + 2)
            assert swarm.calls["/start_engine"] == num_starts
            assert link.status.engine_status_detail is None
    lines = [line for line in link_messages(caplog) if NO_SPACE in line and "start_engine" in line]
    assert lines == [f"{swarm.url}/start_engine: {NO_SPACE}; retrying"]


async def test_warnings_about_the_job_are_logged_by_the_proxy_too(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    warning = "logging = 'tensorboard' is without effect:\ncurves are elsewhere"
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {
            "/get_engine_status": OFFLINE,
            "/sync_train_config": ACCEPTED | {"warnings": [warning]},
            "/start_engine": ACCEPTED,
        }
        async with following(swarm, ledger):
            await until(lambda: swarm.calls["/start_engine"] == 1)
    assert [line for line in link_messages(caplog) if "without effect" in line] == [
        "[job]: logging = 'tensorboard' is without effect: curves are elsewhere"
    ]


async def test_an_engine_that_runs_with_another_job_is_logged_key_by_key(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_train_config"] = TrainJob(lora_rank=4, num_repeat=9).model_dump()
        async with following(swarm, ledger) as link:
            await link.reached.wait()
    (message,) = [line for line in link_messages(caplog) if "job" in line]
    assert "with another job: lora_rank = 4, not 0; to apply [job], stop" in message


async def test_an_engine_that_another_client_restarts_with_another_job_is_logged_once(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_train_config"] = TrainJob().model_dump()
        async with following(swarm, ledger) as link:
            await link.serving.wait()
            swarm.answers["/get_train_config"] = TrainJob(lora_rank=4).model_dump()
            for restart in range(1, 3):
                swarm.answers["/get_engine_status"] = OFFLINE
                await until(lambda: not link.is_serving)
                swarm.answers["/get_engine_status"] = ROLLING
                await until(lambda num=1 + restart: swarm.calls["/get_train_config"] >= num)
            other_run = ROLLING.model_copy(update={"run_id": "other"})
            swarm.answers["/get_train_config"] = TrainJob(experiment_name="b").model_dump()
            swarm.answers["/get_engine_status"] = other_run
            await until(lambda: "experiment_name = b, not None" in caplog.text)
    assert len([line for line in link_messages(caplog) if "lora_rank = 4, not 0" in line]) == 1


async def test_a_server_that_redacts_less_than_the_proxy_is_logged_once(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    own = PrivacySettings(redact=("email",), patterns={"mine": "K-[0-9]+"})
    partial = {"redact": ["email", "card"]}
    complete = partial | {"patterns": {"other_name": "K-[0-9]+"}}
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_train_config"] = TrainJob().model_dump()
        async with following(swarm, ledger, job=TrainJob(privacy=own)) as link:
            for privacy, expected in [({}, False), (partial, False), (complete, True)] * 2:
                status = ROLLING.model_copy(update={"privacy": privacy})
                swarm.answers["/get_engine_status"] = status
                await until(lambda status=status: link.status == status)
                assert link.server_redacts is expected
    lines = [line for line in link_messages(caplog) if "server_does_not_redact" in line]
    assert len(lines) == 2
    assert "start both again" in lines[0]


async def test_a_proxy_that_only_prunes_does_not_need_a_server_that_redacts(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_train_config"] = TrainJob().model_dump()
        swarm.answers["/get_engine_status"] = ROLLING
        job = TrainJob(privacy=PrivacySettings(retention_days=1))
        async with following(swarm, ledger, job=job) as link:
            assert link.server_redacts  # also before the first status
            await until(lambda: link.status is not None)
            assert link.server_redacts
    assert not [line for line in link_messages(caplog) if "server_does_not_redact" in line]


async def test_settings_that_the_proxy_cannot_use_are_used_in_part_and_logged_once(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    redaction = RedactionInUse(PrivacySettings())
    privacy = {"redact": ["email", "of_a_newer_version"], "patterns": {"bad": "("}}
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"privacy": privacy})
        link = SwarmLink(swarm.url, None, TrainJob(), ledger, redaction=redaction)
        task = asyncio.create_task(link.run())
        await link.reached.wait()
        await until(lambda: swarm.calls["/get_engine_status"] > 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()
    assert not redaction.is_complete
    assert redaction.redactor.text("ann@example.org") == "[redacted: email]"
    lines = [line for line in link_messages(caplog) if "nothing of them is stored" in line]
    assert len(lines) == 1


class StartingSwarm(ScriptedSwarm):
    """A server whose engine rolls as soon as somebody starts it."""

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/start_engine":
            self.answers["/get_engine_status"] = ROLLING
        return await super()._answer(request)


@pytest.mark.parametrize(
    "start", [ACCEPTED, {"detail": "Cannot start engine when engine is not offline."}], ids=str
)
async def test_a_start_with_the_job_of_another_client_is_logged(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, start: dict[str, object]
) -> None:
    async with StartingSwarm() as swarm:
        swarm.answers |= {
            "/get_engine_status": OFFLINE,
            "/sync_train_config": ACCEPTED,
            "/start_engine": start,
            "/get_train_config": TrainJob(experiment_name="theirs").model_dump(),
        }
        async with following(swarm, ledger) as link:
            await link.reached.wait()
    assert swarm.calls["/start_engine"] == 1
    assert "with another job: experiment_name = theirs, not None" in caplog.text


async def test_a_decision_names_the_run_of_the_history_that_was_read_last(ledger: Ledger) -> None:
    decisions: list[dict[str, object]] = []

    async def releases(_: web.Request) -> web.Response:
        reply = ReleasesReply(
            run_id="run-1", records=[], released=0, candidate=None, rejected=[], is_held=False
        )
        return web.json_response(reply.model_dump())

    async def release(request: web.Request) -> web.Response:
        decisions.append(await request.json())
        return web.json_response({"success": True})

    app = web.Application()
    app.add_routes([web.get("/releases", releases), web.post("/release", release)])
    async with TestServer(app) as server:
        link = SwarmLink(str(server.make_url("")), None, TrainJob(), ledger)
        request = ReleaseRequest(id="1", decision=Decision.HOLD)
        await link.decide(request)
        await link.releases()
        await link.decide(request)
        await link.close()
    assert [decision["run_id"] for decision in decisions] == [None, "run-1"]


async def test_a_limit_of_training_names_the_run_of_the_history_that_was_read_last(
    ledger: Ledger,
) -> None:
    limits: list[dict[str, object]] = []

    async def releases(_: web.Request) -> web.Response:
        reply = ReleasesReply(
            run_id="run-1", records=[], released=0, candidate=None, rejected=[], is_held=False
        )
        return web.json_response(reply.model_dump())

    async def limit_training(request: web.Request) -> web.Response:
        limits.append(await request.json())
        reply = {"success": len(limits) == 1, "failure_reason": "" if len(limits) == 1 else "no"}
        return web.json_response(reply)

    app = web.Application()
    app.add_routes([web.get("/releases", releases), web.post("/training_limit", limit_training)])
    async with TestServer(app) as server:
        link = SwarmLink(str(server.make_url("")), None, TrainJob(), ledger)
        assert (await link.limit_training(5)).success
        history = await link.releases()
        refused = await link.limit_training(None)
        await link.close()
    assert not refused.success and refused.failure_reason == "no"
    assert limits == [{"version": 5, "run_id": None}, {"version": None, "run_id": "run-1"}]
    # A server that is too old for limits has neither of these fields.
    assert history.training_limit is None and history.released_copies == []


async def test_an_older_server_refuses_a_limit_of_training_with_an_error(ledger: Ledger) -> None:
    async with TestServer(web.Application()) as server:
        link = SwarmLink(str(server.make_url("")), None, TrainJob(), ledger)
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            await link.limit_training(5)
        await link.close()
