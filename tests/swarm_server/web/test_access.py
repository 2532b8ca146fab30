"""Who may do what on a server with keys, over real sockets."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from swarm_server.boxes import (
    ASKED,
    KEYS,
    Box,
    Claim,
    Member,
    ask,
    asking,
    box_of,
    write_keys,
)

from fakevllm_server.web.routes.access import ADMIN_PATHS
from tests.e2e.processes import Processes

OF_EPISODES = ("/end_episode", "/abort_episode", "/renew_episode", "/can_continue_episode")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("box")
    with Processes(folder) as processes:
        yield box_of(processes, write_keys(folder / "keys"))


@pytest.fixture
def box(shared: Box) -> Iterator[Box]:
    yield shared
    for member in map(shared.member, KEYS):
        for one in member.post("/get_episode_buffer").json()["buffer"]:
            member.about("/abort_episode", one["episode_uuid"])


@pytest.fixture
def alice(box: Box) -> Member:
    return box.member("alice")


@pytest.fixture
def bob(box: Box) -> Member:
    return box.member("bob")


# --- credentials


def test_a_url_with_name_and_key_a_bearer_and_anthropics_header_are_good(alice: Member) -> None:
    url = f"{alice.server.url}/get_engine_status"
    for headers in ({"Authorization": f"Bearer {alice.key}"}, {"x-api-key": alice.key}):
        assert httpx.get(url, headers=headers).status_code == 200
    assert alice.get("/get_engine_status").status_code == 200


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bob", "sk-alice-1"),
        ("", "sk-alice-1"),
        ("sk-alice-1", ""),
        ("alice", "sk-no-key"),
        ("alice", ""),
        ("Alice", "sk-alice-1"),
    ],
)
def test_a_name_that_is_not_the_keys_is_401(alice: Member, name: str, key: str) -> None:
    url = f"{alice.server.url}/get_engine_status"
    answer = httpx.get(url, auth=httpx.BasicAuth(name, key))
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    assert "www-authenticate" not in answer.headers


@pytest.mark.parametrize("value", ["", "!", "YWxpY2U=", "/w==", "é", "Bearer sk-alice-1"])
def test_basic_that_cannot_be_read_is_401(alice: Member, value: str) -> None:
    headers = [(b"Authorization", f"Basic {value}".strip().encode())]
    assert httpx.get(f"{alice.server.url}/get_engine_status", headers=headers).status_code == 401


# --- roles


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_a_client_may_not_stop_others_and_is_told_what_to_do(alice: Member, path: str) -> None:
    answer = alice.post(path, yaml_as_string="job: {}")
    assert answer.status_code == 403
    detail = answer.json()["detail"]
    assert detail.startswith(f"{path} is for admins, and the key of alice has the role client")
    assert "fakevllm keys add NAME --role admin" in detail
    assert alice.get("/get_engine_status").json()["engine_status"] != "ENGINE.OFFLINE"


def test_nobody_gets_past_a_role_by_another_spelling_of_the_path(alice: Member) -> None:
    for path in (
        "/stop_engine/",
        "//stop_engine",
        "/e/../stop_engine",
        "/stop%5Fengine",
        "/v1/..;/stop_engine",
    ):
        with httpx.Client(follow_redirects=True) as http:
            request = http.build_request("POST", f"{alice.url}{path}", json={})
            assert http.send(request).status_code in (403, 404), path
    assert alice.get("/get_engine_status").json()["engine_status"] != "ENGINE.OFFLINE"


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/get_engine_status",
        "/get_train_config",
        "/get_run_log",
        "/v1/models",
        "/get_verbose_logs",
        "/get_server_experiment_dir",
    ],
)
def test_a_client_may_look(alice: Member, path: str) -> None:
    assert alice.get(path).status_code == 200


def test_an_admin_is_told_of_an_engine_that_runs_and_not_of_roles(box: Box) -> None:
    answer = box.member("root").post("/start_engine")
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("Cannot start engine when engine is not offline.")


# --- episodes


def test_the_stock_clients_url_carries_its_credentials_through_claim_calls_and_end(
    alice: Member,
) -> None:
    claim = alice.claim()
    with asking(alice, claim) as app:  # the URL's credentials go in place of the episode's key
        assert ask(app) == "hello"
    assert alice.about("/can_continue_episode", claim.uuid).json() == {"can_continue": True}
    assert alice.about("/end_episode", claim.uuid).json() == {"success": True}


def test_an_openai_client_sends_the_urls_credentials_and_not_its_key(alice: Member) -> None:
    """Why the path must name the episode."""
    seen: list[str] = []

    def note(request: Any) -> None:
        seen.append(request.headers["authorization"])

    claim = alice.claim()
    with asking(alice, claim) as app:
        hooks: Any = app._client.event_hooks  # pyright: ignore[reportPrivateUsage]
        hooks["request"].append(note)
        ask(app)
    assert seen == ["Basic " + base64.b64encode(b"alice:sk-alice-1").decode()]
    alice.about("/abort_episode", claim.uuid)


def test_calls_by_path_and_credentials_are_the_episodes(alice: Member, box: Box) -> None:
    claim = alice.claim()
    with asking(alice, claim) as app:
        ask(app)
    assert claim.asked(key=claim.key).status_code == 200
    assert claim.asked(key=alice.key).status_code == 200
    (shown,) = alice.post("/get_episode_buffer").json()["buffer"]
    assert shown["llm_call_count"] == 3
    alice.about("/abort_episode", claim.uuid)


def test_anothers_key_ends_aborts_renews_and_asks_nothing(alice: Member, bob: Member) -> None:
    claim = alice.claim()
    words = f"Episode {claim.uuid} is claimed by different client: alice, but got bob."
    for path, status in (("/end_episode", 404), ("/abort_episode", 404), ("/renew_episode", 410)):
        answer = bob.about(path, claim.uuid, owner="alice")
        assert (answer.status_code, answer.json()) == (status, {"detail": words})
    can = bob.about("/can_continue_episode", claim.uuid, owner="alice")
    assert (can.status_code, can.json()) == (200, {"can_continue": False})
    with asking(bob, claim) as app, pytest.raises(openai.NotFoundError, match="alice, but got bob"):
        ask(app)
    assert claim.asked(key=bob.key).status_code == 404
    (shown,) = alice.post("/get_episode_buffer").json()["buffer"]
    assert shown["llm_call_count"] == 0
    assert alice.about("/end_episode", claim.uuid).json()["success"] is True


def test_an_admin_plays_only_its_own_episodes_too(alice: Member, box: Box) -> None:
    claim = alice.claim()
    assert box.member("root").about("/end_episode", claim.uuid, owner="alice").status_code == 404
    assert alice.about("/abort_episode", claim.uuid).json() == {"success": True}


def test_one_key_may_not_play_anothers_claim_by_its_uuid_in_the_path(
    alice: Member, bob: Member
) -> None:
    hers, his = alice.claim(), bob.claim()
    for key in (his.key, "sk-ajet-1-made-up"):
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{alice.server.url}/e/{hers.uuid}/v1/chat/completions"
        assert httpx.post(url, json=ASKED, headers=headers).status_code == 404
    alice.about("/abort_episode", hers.uuid)
    bob.about("/abort_episode", his.uuid)


def test_a_late_call_by_the_old_path_or_key_is_404_and_changes_nothing(alice: Member) -> None:
    old = alice.claim()
    alice.about("/abort_episode", old.uuid)
    claims = [alice.claim() for _ in range(5)]
    assert old.uuid[:-4] in {claim.uuid[:-4] for claim in claims}
    with asking(alice, old) as app, pytest.raises(openai.NotFoundError, match="not found"):
        ask(app)
    plain = Claim(old.uuid, f"{alice.server.url}/v1", old.key)
    for claim in (old, plain):
        answer = claim.asked(key=old.key)
        assert answer.status_code == 404
        assert "is not claimed, cannot accept new requests." in answer.json()["error"]["message"]
    assert old.asked(key="sk-unknown").status_code == 401
    late = httpx.post(f"{alice.server.url}/end_episode", headers={"x-api-key": old.key}, json={})
    assert late.status_code == 401
    shown = alice.post("/get_episode_buffer").json()["buffer"]
    assert len(shown) == 5 and {one["llm_call_count"] for one in shown} == {0}


def test_everybody_sees_his_own_episodes_an_admin_all_and_nobody_their_keys(
    alice: Member, bob: Member, box: Box
) -> None:
    hers, his = alice.claim(), bob.claim()
    for member, uuids in (
        (alice, {hers.uuid}),
        (bob, {his.uuid}),
        (box.member("root"), {hers.uuid, his.uuid}),
    ):
        answer = member.post("/get_episode_buffer")
        assert {shown["episode_uuid"] for shown in answer.json()["buffer"]} == uuids
        assert hers.key not in answer.text and his.key not in answer.text
    (shown,) = alice.post("/get_episode_buffer").json()["buffer"]
    assert {name: shown[name] for name in shown if name != "latest_activity_timestamp"} == {
        "episode_uuid": hers.uuid,
        "episode_status": "claimed",
        "episode_type": "train",
        "openai_base_url": hers.base_url,
        "openai_api_key": "***",
        "client_uuid": "alice's",
        "zmq_listen_result_addr": "",
        "discard_episode_timeout": 60.0,
        "llm_call_count": 0,
        "debug_log": [],
        "optional_task_id": "",
    }
    alice.about("/abort_episode", hers.uuid)
    bob.about("/abort_episode", his.uuid)
