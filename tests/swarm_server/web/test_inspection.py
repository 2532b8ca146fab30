"""What can be looked at on a server with keys, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_server.boxes import ASKED, Box, asking, box_of, write_keys

from tests.e2e.processes import Processes


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with Processes(tmp_path) as processes:
        yield box_of(processes, write_keys(tmp_path / "keys"))


def test_an_admin_is_told_the_latest_call_and_before_the_first_that_there_is_none(box: Box) -> None:
    root, alice = box.member("root"), box.member("alice")
    none = root.post("/replay_latest_llm_call")
    assert none.status_code == 404
    assert none.json() == {"detail": "No LLM call has been made yet"}
    assert alice.post("/v1/chat/completions", **ASKED).status_code == 200
    told = root.post("/replay_latest_llm_call").json()
    assert told["input"] == ASKED and "format" not in told
    assert told["output"]["choices"][0]["message"]["content"] == "hello"
    claim = alice.claim()
    with asking(alice, claim) as app:
        for _ in app.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
        ):
            pass
    told = root.post("/replay_latest_llm_call").json()
    assert told["input"]["stream"] is True
    assert told["output"][0]["object"] == "chat.completion.chunk"
    alice.post("/v1/messages/count_tokens", **ASKED)
    assert root.post("/replay_latest_llm_call").json() == told


def test_what_is_pushed_is_told_to_all_and_is_bounded(box: Box) -> None:
    alice, bob = box.member("alice"), box.member("bob")
    assert alice.post("/push_verbose_log", tag="t", message="here").json()["success"]
    assert alice.post("/push_verbose_log", message="no tag").json()["success"]
    assert alice.post("/push_verbose_log", message="x" * 4001).status_code == 422
    entries = bob.get("/get_verbose_logs").json()["entries"]
    assert [(one["tag"], one["message"]) for one in entries] == [("t", "here"), ("", "no tag")]
    assert all(one["timestamp"] > 1e9 for one in entries)


def test_the_run_directory_is_told(box: Box) -> None:
    told = box.member("alice").get("/get_server_experiment_dir").json()
    assert told == {"server_experiment_dir": str(box.server.folder.resolve())}
