"""Credentials, roles and owners of episodes on a server with keys, over real sockets."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from swarm_server.team_server import (
    CHAT_BODY,
    KEYS,
    Claim,
    Member,
    TeamServer,
    openai_client,
    say_hello,
    start_team_server,
    write_keys,
)

from fakevllm_server.web.routes.authorization import ADMIN_PATHS
from tests.e2e.processes import Processes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeamServer]:
    folder = tmp_path_factory.mktemp("box")
    with Processes(folder) as processes:
        yield start_team_server(processes, write_keys(folder / "keys"))


@pytest.fixture
def box(shared: TeamServer) -> Iterator[TeamServer]:
    yield shared
    for member in map(shared.member, KEYS):
        for one in member.post("/get_episode_buffer").json()["buffer"]:
            member.post_episode("/abort_episode", one["episode_uuid"])


@pytest.fixture
def alice(box: TeamServer) -> Member:
    return box.member("alice")


@pytest.fixture
def bob(box: TeamServer) -> Member:
    return box.member("bob")


# --- credentials


def test_a_key_is_accepted_in_the_url_as_a_bearer_and_in_anthropics_header(alice: Member) -> None:
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
def test_a_name_that_does_not_match_the_key_is_401(alice: Member, name: str, key: str) -> None:
    url = f"{alice.server.url}/get_engine_status"
    answer = httpx.get(url, auth=httpx.BasicAuth(name, key))
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    assert "www-authenticate" not in answer.headers


@pytest.mark.parametrize("value", ["", "!", "YWxpY2U=", "/w==", "é", "Bearer sk-alice-1"])
def test_unreadable_basic_credentials_are_401(alice: Member, value: str) -> None:
    headers = [(b"Authorization", f"Basic {value}".strip().encode())]
    assert httpx.get(f"{alice.server.url}/get_engine_status", headers=headers).status_code == 401


# --- roles


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_a_client_may_not_use_an_admin_route_and_the_refusal_has_the_remedy(
    alice: Member, path: str
) -> None:
    answer = alice.post(path, yaml_as_string="job: {}")
    assert answer.status_code == 403
    detail = answer.json()["detail"]
    assert detail.startswith(f"{path} is for admins, and the key of alice has the role client")
    assert "fakevllm keys add NAME --role admin" in detail
    assert alice.get("/get_engine_status").json()["engine_status"] != "ENGINE.OFFLINE"


def test_another_spelling_of_a_path_does_not_bypass_the_role(alice: Member) -> None:
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
        "/get_runs",
        "/v1/models",
        "/get_verbose_logs",
        "/get_server_experiment_dir",
    ],
)
def test_a_client_may_read_the_status(alice: Member, path: str) -> None:
    assert alice.get(path).status_code == 200


def test_an_admin_who_starts_a_running_engine_is_refused_for_its_state_not_the_role(
    box: TeamServer,
) -> None:
    answer = box.member("root").post("/start_engine")
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("Cannot start engine when engine is not offline.")


# --- episodes


def test_a_url_with_credentials_works_for_claim_calls_and_end(
    alice: Member,
) -> None:
    claim = alice.claim()
    with openai_client(
        alice, claim
    ) as app:  # sends the URL's credentials instead of the episode's key
        assert say_hello(app) == "hello"
    assert alice.post_episode("/can_continue_episode", claim.uuid).json() == {"can_continue": True}
    assert alice.post_episode("/end_episode", claim.uuid).json() == {"success": True}


def test_an_openai_client_sends_the_urls_credentials_and_not_its_key(alice: Member) -> None:
    """This is the reason why the path must name the episode."""
    sent: list[str] = []

    def record(request: Any) -> None:
        sent.append(request.headers["authorization"])

    claim = alice.claim()
    with openai_client(alice, claim) as app:
        hooks: Any = app._client.event_hooks  # pyright: ignore[reportPrivateUsage]
        hooks["request"].append(record)
        say_hello(app)
    assert sent == ["Basic " + base64.b64encode(b"alice:sk-alice-1").decode()]
    alice.post_episode("/abort_episode", claim.uuid)


def test_calls_by_path_and_by_key_belong_to_the_episode(alice: Member, box: TeamServer) -> None:
    claim = alice.claim()
    with openai_client(alice, claim) as app:
        say_hello(app)
    assert claim.call_model(key=claim.key).status_code == 200
    assert claim.call_model(key=alice.key).status_code == 200
    (shown,) = alice.post("/get_episode_buffer").json()["buffer"]
    assert shown["llm_call_count"] == 3
    alice.post_episode("/abort_episode", claim.uuid)


def test_another_clients_key_cannot_use_the_episode(alice: Member, bob: Member) -> None:
    claim = alice.claim()
    message = f"Episode {claim.uuid} is claimed by different client: alice, but got bob."
    for path, status in (("/end_episode", 404), ("/abort_episode", 404), ("/renew_episode", 410)):
        answer = bob.post_episode(path, claim.uuid, owner="alice")
        assert (answer.status_code, answer.json()) == (status, {"detail": message})
    can = bob.post_episode("/can_continue_episode", claim.uuid, owner="alice")
    assert (can.status_code, can.json()) == (200, {"can_continue": False})
    with (
        openai_client(bob, claim) as app,
        pytest.raises(openai.NotFoundError, match="alice, but got bob"),
    ):
        say_hello(app)
    assert claim.call_model(key=bob.key).status_code == 404
    (shown,) = alice.post("/get_episode_buffer").json()["buffer"]
    assert shown["llm_call_count"] == 0
    assert alice.post_episode("/end_episode", claim.uuid).json()["success"] is True


def test_an_admin_cannot_use_the_episodes_of_others(alice: Member, box: TeamServer) -> None:
    claim = alice.claim()
    assert (
        box.member("root").post_episode("/end_episode", claim.uuid, owner="alice").status_code
        == 404
    )
    assert alice.post_episode("/abort_episode", claim.uuid).json() == {"success": True}


def test_a_uuid_in_the_path_does_not_give_access_to_another_clients_episode(
    alice: Member, bob: Member
) -> None:
    hers, his = alice.claim(), bob.claim()
    for key in (his.key, "sk-ajet-1-made-up"):
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{alice.server.url}/e/{hers.uuid}/v1/chat/completions"
        assert httpx.post(url, json=CHAT_BODY, headers=headers).status_code == 404
    alice.post_episode("/abort_episode", hers.uuid)
    bob.post_episode("/abort_episode", his.uuid)


def test_a_late_call_for_an_aborted_episode_is_404_and_changes_nothing(alice: Member) -> None:
    old = alice.claim()
    alice.post_episode("/abort_episode", old.uuid)
    claims = [alice.claim() for _ in range(5)]
    assert old.uuid[:-4] in {claim.uuid[:-4] for claim in claims}
    with openai_client(alice, old) as app, pytest.raises(openai.NotFoundError, match="not found"):
        say_hello(app)
    plain = Claim(old.uuid, f"{alice.server.url}/v1", old.key)
    for claim in (old, plain):
        answer = claim.call_model(key=old.key)
        assert answer.status_code == 404
        assert "is not claimed, cannot accept new requests." in answer.json()["error"]["message"]
    assert old.call_model(key="sk-unknown").status_code == 401
    late = httpx.post(f"{alice.server.url}/end_episode", headers={"x-api-key": old.key}, json={})
    assert late.status_code == 401
    shown = alice.post("/get_episode_buffer").json()["buffer"]
    assert len(shown) == 5 and {one["llm_call_count"] for one in shown} == {0}


def test_a_client_sees_its_own_episodes_an_admin_all_and_nobody_their_keys(
    alice: Member, bob: Member, box: TeamServer
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
    alice.post_episode("/abort_episode", hers.uuid)
    bob.post_episode("/abort_episode", his.uuid)
