"""Claims and keys over a crash and a revocation, and a server that asks for no keys."""

from __future__ import annotations

from pathlib import Path

from swarm_server.boxes import Box, ask, asking, box_of, write_keys

from tests.e2e.processes import Processes, wait_until


def test_a_claim_is_still_its_owners_after_a_crash(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = box_of(processes, write_keys(tmp_path / "keys"))
        alice, bob = box.member("alice"), box.member("bob")
        claim = alice.claim()
        box.server.kill()
        box.server.start()
        box.server.wait_until_healthy()
        box.until_rolling()
        assert bob.about("/end_episode", claim.uuid, owner="alice").status_code == 404
        with asking(alice, claim) as app:
            assert ask(app) == "hello"
        assert alice.about("/end_episode", claim.uuid).json() == {"success": True}


def test_a_revoked_key_takes_the_keys_of_its_episodes_with_it(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = box_of(processes, write_keys(tmp_path / "keys"))
        claim, his = box.member("alice").claim(), box.member("bob").claim()
        assert claim.asked(key=claim.key).status_code == 200
        write_keys(tmp_path / "keys", "root", "bob")
        wait_until(lambda: claim.asked(key=claim.key).status_code == 401, 10)
        assert his.asked(key=his.key).status_code == 200


def test_without_keys_everybody_is_an_admin_and_a_url_may_have_credentials(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = Box(processes.server("--backend", "fake", "--keep-latest-call"))
        box.start_engine()
        alice, bob = box.member("alice"), box.member("bob")
        claim = alice.claim()
        with asking(alice, claim) as app:
            assert ask(app) == "hello"
        assert [
            one["episode_uuid"] for one in bob.post("/get_episode_buffer").json()["buffer"]
        ] == [claim.uuid]
        assert claim.asked(key="sk-ajet-1-old").status_code == 404
        assert alice.about("/end_episode", claim.uuid).json() == {"success": True}
        assert bob.post("/replay_latest_llm_call").json()["input"]["model"] == "fake"
        assert bob.post("/stop_engine").json()["success"]
