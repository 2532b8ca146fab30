"""Claims and keys after a crash and after a revocation, and a server without keys."""

from __future__ import annotations

from pathlib import Path

from swarm_server.team_server import (
    TeamServer,
    openai_client,
    say_hello,
    start_team_server,
    write_keys,
)

from tests.e2e.processes import Processes, wait_until


def test_a_claim_still_belongs_to_its_owner_after_a_crash(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = start_team_server(processes, write_keys(tmp_path / "keys"))
        alice, bob = box.member("alice"), box.member("bob")
        claim = alice.claim()
        box.server.kill()
        box.server.start()
        box.server.wait_until_healthy()
        box.wait_until_rolling()
        assert bob.post_episode("/end_episode", claim.uuid, owner="alice").status_code == 404
        with openai_client(alice, claim) as app:
            assert say_hello(app) == "hello"
        assert alice.post_episode("/end_episode", claim.uuid).json() == {"success": True}


def test_a_revoked_key_also_revokes_the_keys_of_its_episodes(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = start_team_server(processes, write_keys(tmp_path / "keys"))
        claim, his = box.member("alice").claim(), box.member("bob").claim()
        assert claim.call_model(key=claim.key).status_code == 200
        write_keys(tmp_path / "keys", "root", "bob")
        wait_until(lambda: claim.call_model(key=claim.key).status_code == 401, 10)
        assert his.call_model(key=his.key).status_code == 200


def test_without_keys_everybody_is_an_admin_and_credentials_are_ignored(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = TeamServer(processes.server("--backend", "fake", "--keep-latest-call"))
        box.start_engine()
        alice, bob = box.member("alice"), box.member("bob")
        claim = alice.claim()
        with openai_client(alice, claim) as app:
            assert say_hello(app) == "hello"
        assert [
            one["episode_uuid"] for one in bob.post("/get_episode_buffer").json()["buffer"]
        ] == [claim.uuid]
        assert claim.call_model(key="sk-ajet-1-old").status_code == 404
        assert alice.post_episode("/end_episode", claim.uuid).json() == {"success": True}
        assert bob.post("/replay_latest_llm_call").json()["input"]["model"] == "fake"
        assert bob.post("/stop_engine").json()["success"]
