"""A response can be retrieved, deleted and cancelled by the key that made it, and by no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

pytestmark = pytest.mark.slow

Json = dict[str, Any]
ALICE, BOB = "sk-alice", "sk-bob"
PATH = "/v1/responses"
BODY: Json = {"model": "fake", "input": "[[say yes]]"}
NOT_FOUND = "Response with id '{}' not found."


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    """A proxy that samples two siblings, and its server. Both are called directly."""
    folder = tmp_path_factory.mktemp("responses")
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    with Processes(folder) as processes:
        server = processes.server("--backend", "fake")
        proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "2")
        yield {"proxy": proxy, "server": server}


@pytest.fixture(params=["proxy", "server"])
def process(request: pytest.FixtureRequest, started: dict[str, Process]) -> Process:
    return started[request.param]


def send(
    process: Process,
    method: str,
    path: str,
    body: Json | None = None,
    key: str = ALICE,
    **more: str,
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} | more
    return httpx.request(method, process.url + path, json=body, headers=headers, timeout=60)


def create(process: Process, key: str = ALICE, **fields: Any) -> Json:
    """Return the response object of a new response, which may be streamed."""
    reply = send(process, "POST", PATH, BODY | fields, key)
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        return reply.json()
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return json.loads(events[-1])["response"]


def is_missing(reply: httpx.Response, response_id: str) -> bool:
    error = reply.json()["error"]
    return (reply.status_code, error["message"], error["param"]) == (
        404,
        NOT_FOUND.format(response_id),
        "response_id",
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_key_that_made_a_response_retrieves_it(process: Process, streamed: bool) -> None:
    made = create(process, stream=streamed)
    reply = send(process, "GET", f"{PATH}/{made['id']}")
    assert (reply.status_code, reply.json()) == (200, made)
    assert made["status"] == "completed" and made["output"][0]["content"][0]["text"] == "yes"


def test_no_other_key_reaches_a_response(process: Process) -> None:
    made = create(process)
    path = f"{PATH}/{made['id']}"
    for method, own in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        assert is_missing(send(process, method, own, key=BOB), made["id"])
    follow_up = BODY | {"previous_response_id": made["id"]}
    assert is_missing(send(process, "POST", PATH, follow_up, BOB), made["id"])
    assert send(process, "GET", path).json() == made


@pytest.mark.parametrize("fields", ['"top_p": NaN', '"user": "\\ud83d"', '"truncation": null'])
def test_a_body_that_only_vllm_reads_does_not_reach_a_response(
    process: Process, fields: str
) -> None:
    response_id = create(process)["id"]
    body = f'{{"input": "hi", {fields}, "previous_response_id": "{response_id}"}}'
    headers = {"Authorization": f"Bearer {BOB}", "Content-Type": "application/json"}
    reply = httpx.post(process.url + PATH, content=body, headers=headers, timeout=60)
    assert is_missing(reply, response_id)


def test_a_deleted_response_cannot_be_reached(process: Process) -> None:
    made, other = create(process), create(process)
    path = f"{PATH}/{made['id']}"
    reply = send(process, "DELETE", path)
    assert reply.status_code == 200
    assert reply.json() == {"id": made["id"], "object": "response", "deleted": True}
    for method, own in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        assert is_missing(send(process, method, own), made["id"])
    follow_up = BODY | {"previous_response_id": made["id"]}
    assert is_missing(send(process, "POST", PATH, follow_up), made["id"])
    assert send(process, "GET", f"{PATH}/{other['id']}").status_code == 200


def test_a_conversation_does_not_continue_past_a_deleted_response(
    started: dict[str, Process],
) -> None:
    proxy = started["proxy"]
    first = create(proxy)
    second = create(proxy, previous_response_id=first["id"])
    send(proxy, "DELETE", f"{PATH}/{first['id']}")
    follow_up = BODY | {"previous_response_id": second["id"]}
    assert is_missing(send(proxy, "POST", PATH, follow_up), second["id"])


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
def test_a_retry_after_a_deletion_does_not_get_the_deleted_answer(
    started: dict[str, Process], stored: bool
) -> None:
    proxy = started["proxy"]
    again = {"Idempotency-Key": f"stored: {stored}"}
    body = BODY | {"store": stored}
    made = send(proxy, "POST", PATH, body, **again).json()
    assert send(proxy, "POST", PATH, body, **again).json() == made
    assert send(proxy, "DELETE", f"{PATH}/{made['id']}").status_code == 200
    assert send(proxy, "POST", PATH, body, **again).json()["id"] != made["id"]


def test_an_id_that_was_deleted_can_be_used_again(process: Process) -> None:
    made = create(process, request_id="resp_mine")
    assert made["id"] == "resp_mine"
    send(process, "DELETE", f"{PATH}/resp_mine")
    made = create(process, request_id="resp_mine", input="[[say no]]")
    assert send(process, "GET", f"{PATH}/resp_mine").json() == made


def test_a_response_whose_id_is_no_word_can_be_retrieved_and_deleted(process: Process) -> None:
    made = create(process, request_id="a.b")
    assert send(process, "GET", f"{PATH}/a.b").json() == made
    assert send(process, "POST", f"{PATH}/a.b/cancel").status_code == 400
    assert send(process, "DELETE", f"{PATH}/a.b").status_code == 200
    assert is_missing(send(process, "GET", f"{PATH}/a.b"), "a.b")


def test_a_complete_response_cannot_be_cancelled(process: Process) -> None:
    reply = send(process, "POST", f"{PATH}/{create(process)['id']}/cancel")
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": "Cannot cancel a synchronous response.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": 400,
    }


def test_a_response_that_is_not_to_be_stored_cannot_be_retrieved(process: Process) -> None:
    made = create(process, store=False)
    assert is_missing(send(process, "GET", f"{PATH}/{made['id']}"), made["id"])


def test_a_query_is_checked_as_by_vllm(process: Process) -> None:
    path = f"{PATH}/{create(process)['id']}"
    assert send(process, "GET", f"{path}?stream=false&include[]=x").status_code == 200
    error = send(process, "GET", f"{path}?starting_after=x").json()["error"]
    assert (error["code"], error["param"]) == (400, "query.starting_after")
    reply = send(process, "GET", f"{path}?stream=true")
    assert reply.status_code == 400 and "Unknown response_id" in reply.text


@pytest.mark.parametrize("path", [f"{PATH}/%2e%2e%2fmodels", f"{PATH}/r/input_items"])
def test_an_odd_path_leads_to_no_other_route(process: Process, path: str) -> None:
    assert send(process, "GET", path).json() == {"detail": "Not Found"}


def test_responses_and_deletions_outlive_a_restart_of_the_proxy(
    started: dict[str, Process],
) -> None:
    proxy = started["proxy"]
    kept, deleted = create(proxy), create(proxy)
    send(proxy, "DELETE", f"{PATH}/{deleted['id']}")
    proxy.stop()
    proxy.start()
    proxy.wait_until_healthy()
    assert send(proxy, "GET", f"{PATH}/{kept['id']}").json() == kept
    assert is_missing(send(proxy, "GET", f"{PATH}/{deleted['id']}"), deleted["id"])
    follow_up = BODY | {"previous_response_id": deleted["id"]}
    assert is_missing(send(proxy, "POST", PATH, follow_up), deleted["id"])
    assert create(proxy, previous_response_id=kept["id"])["status"] == "completed"
