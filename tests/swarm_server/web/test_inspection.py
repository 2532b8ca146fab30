"""The inspection routes of a server with keys, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_server.team_server import (
    CHAT_BODY,
    TeamServer,
    openai_client,
    start_team_server,
    write_keys,
)

from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app
from fakevllm_server.web.latest_call_recorder import LatestCall
from tests.e2e.processes import Processes


@pytest.fixture
def box(tmp_path: Path) -> Iterator[TeamServer]:
    with Processes(tmp_path) as processes:
        yield start_team_server(processes, write_keys(tmp_path / "keys"))


def test_an_admin_reads_the_latest_call_of_a_server_that_keeps_it(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = start_team_server(processes, write_keys(tmp_path / "keys"), "--keep-latest-call")
        root, alice = box.member("root"), box.member("alice")
        before_any = root.post("/replay_latest_llm_call")
        assert before_any.status_code == 404
        assert before_any.json() == {"detail": "No LLM call has been made yet"}
        assert alice.post("/v1/chat/completions", **CHAT_BODY).status_code == 200
        record = root.post("/replay_latest_llm_call").json()
        assert record["input"] == CHAT_BODY and "format" not in record
        assert record["output"]["choices"][0]["message"]["content"] == "hello"
        claim = alice.claim()
        with openai_client(alice, claim) as app:
            for _ in app.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
            ):
                pass
        record = root.post("/replay_latest_llm_call").json()
        assert record["input"]["stream"] is True
        assert record["output"][0]["object"] == "chat.completion.chunk"
        alice.post("/v1/messages/count_tokens", **CHAT_BODY)
        assert root.post("/replay_latest_llm_call").json() == record


def test_without_the_flag_no_call_is_kept_and_the_refusal_names_the_flag(box: TeamServer) -> None:
    root = box.member("root")
    assert root.post("/v1/chat/completions", **CHAT_BODY).status_code == 200
    refusal = root.post("/replay_latest_llm_call")
    assert refusal.status_code == 404
    assert "--keep-latest-call" in refusal.json()["detail"]


def test_without_the_flag_the_recording_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*_: object) -> None:
        raise AssertionError("a call is recorded")

    monkeypatch.setattr(LatestCall, "record", record)
    create_app(ServerConfig(backend="fake", run_dir=tmp_path / "off"))
    with pytest.raises(AssertionError, match="a call is recorded"):
        create_app(ServerConfig(backend="fake", run_dir=tmp_path / "on", keep_latest_call=True))


def test_verbose_log_entries_reach_every_client_and_are_bounded(box: TeamServer) -> None:
    alice, bob = box.member("alice"), box.member("bob")
    assert alice.post("/push_verbose_log", tag="t", message="here").json()["success"]
    assert alice.post("/push_verbose_log", message="no tag").json()["success"]
    assert alice.post("/push_verbose_log", message="x" * 4001).status_code == 422
    entries = bob.get("/get_verbose_logs").json()["entries"]
    assert [(entry["tag"], entry["message"]) for entry in entries] == [
        ("t", "here"),
        ("", "no tag"),
    ]
    assert all(entry["timestamp"] > 1e9 for entry in entries)


def test_the_run_directory_is_shown(box: TeamServer) -> None:
    reply = box.member("alice").get("/get_server_experiment_dir").json()
    assert reply == {"server_experiment_dir": str(box.server.folder.resolve())}
