"""An app that asks for an alias reads the alias in every answer, and finds every model's card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

pytestmark = pytest.mark.slow

Json = dict[str, Any]
ALIAS = 'openai/gpt-"4o"'
QUESTION = '[[say "model":"fake"]]'
MESSAGES = [{"role": "user", "content": QUESTION}]
REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completions": ("/v1/completions", {"prompt": QUESTION}),
    "responses": ("/v1/responses", {"input": QUESTION}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 20}),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    folder = tmp_path_factory.mktemp("models")
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    with Processes(folder) as processes:
        server = processes.server("--backend", "fake")
        group = processes.proxy(server, "--hooks", str(hooks), "--n", "2", "--alias", ALIAS)
        single = processes.proxy(server, "--alias", "*", folder="single")
        yield {"two siblings": group, "one answer": single, "server": server}


def models_in(value: object) -> set[str]:
    """Return the values of all fields with the name `model` in a JSON value."""
    if isinstance(value, list):
        return {name for item in cast(list[Any], value) for name in models_in(item)}
    if not isinstance(value, dict):
        return set()
    fields = cast(Json, value)
    own: set[str] = {fields["model"]} if "model" in fields else set()
    return own | {name for item in fields.values() for name in models_in(item)}


def sent_objects(reply: httpx.Response) -> list[Json]:
    """Return the JSON objects of a response: the events of a stream, or the whole body."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return [reply.json()]
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("proxy", ["two siblings", "one answer"])
def test_an_answer_carries_the_alias_that_the_app_asked_for(
    started: dict[str, Process], proxy: str, name: str, streamed: bool
) -> None:
    path, body = REQUESTS[name]
    for model in (ALIAS, "fake"):
        request = body | {"model": model, "stream": streamed}
        reply = httpx.post(f"{started[proxy].url}{path}", json=request, timeout=60)
        assert reply.status_code == 200, reply.text
        objects = sent_objects(reply)
        assert models_in(objects) == {model}
        num_named = sum(bool(models_in(one)) for one in objects)
        assert num_named == len(objects) if name in ("chat", "completions") else num_named
        if not streamed:
            assert r"\"model\":\"fake\"" in reply.text, "the text of the answer is unchanged"


def test_a_stored_response_carries_the_alias(started: dict[str, Process]) -> None:
    url = f"{started['two siblings'].url}/v1/responses"
    made = httpx.post(url, json={"model": ALIAS, "input": "hi"}, timeout=60).json()
    assert httpx.get(f"{url}/{made['id']}").json()["model"] == ALIAS


@pytest.mark.parametrize("process", ["two siblings", "one answer", "server"])
def test_each_listed_model_has_a_card_of_its_own(started: dict[str, Process], process: str) -> None:
    url = f"{started[process].url}/v1/models"
    for card in httpx.get(url).json()["data"]:
        quoted = card["id"].replace('"', "%22")
        for path in (quoted, quoted.replace("/", "%2F")):
            reply = httpx.get(f"{url}/{path}")
            assert reply.status_code == 200
            # Each request gets a new time and a new permission.
            new: Json = {"created": 0, "permission": []}
            assert reply.json() | new == card | new


def test_a_model_that_is_not_served_has_no_card(started: dict[str, Process]) -> None:
    for process in ("two siblings", "server"):
        for name in ("zz", "org/zz", "fake/"):
            reply = httpx.get(f"{started[process].url}/v1/models/{name}")
            assert reply.status_code == 404
            error = reply.json()["error"]
            assert (error["type"], error["param"]) == ("NotFoundError", "model")
            assert f"The model `{name}` does not exist." in error["message"]


def test_with_the_alias_star_every_name_has_a_card(started: dict[str, Process]) -> None:
    reply = httpx.get(f"{started['one answer'].url}/v1/models/org/any")
    assert (reply.status_code, reply.json()["id"]) == (200, "org/any")
