"""What clients see of a model server that fails: an answer with a valid end, or one error.

A faulty swarm server stands behind two proxies, of one sibling and of four with a hook. Their
clocks run ten times as fast, and so do the clients' limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.clients.faulty_swarm import FAULTS, TEXT, FaultySwarm
from tests.clients.sessions import KEY, MODEL, SESSION, library
from tests.clients.test_codex import Codex, items
from tests.clients.test_opencode import TITLED, OpenCode, parts
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import wait_for_groups
from tests.e2e.processes import Process, Processes, free_port

pytestmark = SESSION

NUM_SIBLINGS = (1, 4)
LIMIT_S = 2.0
"""Between two bytes, of clients that are kept waiting."""
VALID_ENDS = {"stop", "length", "tool_calls", "content_filter", "function_call"}
STATUSES = {"404": 404, "400": 400, "429": 429, "500": 500, "503": 503}
WELL = {"none", "slow", "silent at first"}
CODEX_TRIES = 30
"""Its own limit: six streams, of five requests each where it is answered a 500."""
SAID: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def swarm() -> Iterator[FaultySwarm]:
    with FaultySwarm() as swarm:
        yield swarm


@pytest.fixture(scope="module")
def proxies(
    swarm: FaultySwarm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Process]]:
    folder = tmp_path_factory.mktemp("faults")
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    with Processes(folder) as started:
        yield {number: _proxy(started, swarm, hooks, number) for number in NUM_SIBLINGS}


def _proxy(started: Processes, swarm: FaultySwarm, hooks: Path, number: int) -> Process:
    port, own = free_port(), started.folder / f"n{number}"
    command = ["-m", "tests.clients.short_clocks", "serve", "--swarm", swarm.url, "--port"]
    command += [str(port), "--hooks", str(hooks), "--n", str(number), "--run-dir", str(own)]
    return started.adopt(Process("proxy", command, port, own)).wait_until_healthy()


class Faulty:
    """One proxy, and the requests that reached it since the start of the test."""

    def __init__(self, swarm: FaultySwarm, proxy: Process, num_siblings: int) -> None:
        self.num_siblings = num_siblings
        self.swarm = swarm
        self.proxy = proxy
        self._before = len(wait_for_groups(proxy, 0))

    @property
    def num_requests(self) -> int:
        return len(wait_for_groups(self.proxy, 0)) - self._before

    def requests(self, count: int) -> list[Any]:
        """Their groups, which must be so many."""
        found = wait_for_groups(self.proxy, self._before + count)[self._before :]
        assert len(found) == count
        return found


@pytest.fixture(params=NUM_SIBLINGS, ids=lambda number: f"N={number}")
def faulty(
    request: pytest.FixtureRequest, swarm: FaultySwarm, proxies: dict[int, Process]
) -> Faulty:
    swarm.reset("none")
    return Faulty(swarm, proxies[request.param], request.param)


EVERY_FAULT = pytest.mark.parametrize("fault", FAULTS)
BOTH_MODES = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@EVERY_FAULT
@BOTH_MODES
def test_a_chat_client_gets_an_answer_with_a_valid_end_or_one_error(
    faulty: Faulty, fault: str, streamed: bool
) -> None:
    faulty.swarm.reset(fault)
    with openai.OpenAI(
        base_url=f"{faulty.proxy.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S
    ) as client:
        told = outcome(lambda: chat(client, streamed), openai.APIError)
    check(told, fault, VALID_ENDS)
    faulty.requests(1)


def chat(client: openai.OpenAI, streamed: bool) -> tuple[str, str | None]:
    """Text and reason."""
    if not streamed:
        (choice,) = client.chat.completions.create(model=MODEL, messages=SAID).choices
        return choice.message.content or "", choice.finish_reason
    stream = client.chat.completions.create(model=MODEL, messages=SAID, stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    ends = [choice.finish_reason for choice in choices if choice.finish_reason]
    return "".join(choice.delta.content or "" for choice in choices), ends[-1] if ends else None


@EVERY_FAULT
@BOTH_MODES
def test_a_responses_client_gets_an_answer_with_a_valid_end_or_one_error(
    faulty: Faulty, fault: str, streamed: bool
) -> None:
    faulty.swarm.reset(fault)
    with openai.OpenAI(
        base_url=f"{faulty.proxy.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S
    ) as client:
        told = outcome(lambda: respond(client, streamed), openai.APIError)
    check(told, fault, {"completed", "incomplete", "failed"})
    faulty.requests(1)


def respond(client: openai.OpenAI, streamed: bool) -> tuple[str, str | None]:
    """Text and status."""
    if not streamed:
        response = client.responses.create(model=MODEL, input="hi")
        return response.output_text, response.status
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    last: Any = events[-1]
    assert last.type in ("response.completed", "response.incomplete", "response.failed", "error")
    return "".join(texts), "failed" if last.type == "error" else last.response.status


@EVERY_FAULT
@BOTH_MODES
def test_an_anthropic_client_gets_an_answer_with_a_valid_end_or_one_error(
    faulty: Faulty, fault: str, streamed: bool
) -> None:
    faulty.swarm.reset(fault)
    anthropic = library("anthropic")
    with anthropic.Anthropic(
        base_url=faulty.proxy.url, api_key=KEY, max_retries=0, timeout=LIMIT_S
    ) as client:
        told = outcome(lambda: message(client, streamed), anthropic.APIError)
    check(told, fault, {"end_turn", "max_tokens", "tool_use"})
    faulty.requests(1)


def message(client: Any, streamed: bool) -> tuple[str, str | None]:
    """Text and reason."""
    asked: Any = {"model": MODEL, "max_tokens": 99, "messages": SAID}
    if not streamed:
        answer = client.messages.create(**asked)
    else:
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    return "".join(block.text for block in answer.content), answer.stop_reason


Told = tuple[str, str | None] | Exception


def outcome(ask: Callable[[], tuple[str, str | None]], error: type[Exception]) -> Told:
    """Text and reason, or the client's own error. A broken stream is an error as well: what the
    proxy itself sends must never be one."""
    try:
        return ask()
    except error as told:
        assert not isinstance(told.__cause__, httpx.TransportError), "hung or broken off"
        return told


def check(told: Told, fault: str, valid_ends: set[str]) -> None:
    if isinstance(told, Exception):
        assert fault not in WELL, told
        status = getattr(told, "status_code", None)
        # None: it came so late that the stream had to be opened, and the error is inside.
        assert status in (None, STATUSES.get(fault, status)), told
        assert str(told)
        return
    text, end = told
    assert end in valid_ends, told
    assert fault not in STATUSES or end == "failed"
    if fault in WELL:
        assert (text, end == "failed") == (TEXT, False)


@pytest.mark.parametrize("fault", ["dropped", "cut", "an error in the stream", "500"])
def test_what_one_of_several_siblings_suffers_is_not_seen(
    swarm: FaultySwarm, proxies: dict[int, Process], fault: str
) -> None:
    faulty = Faulty(swarm, proxies[4], 4)
    faulty.swarm.reset(fault, failing=1)
    with openai.OpenAI(base_url=f"{faulty.proxy.url}/v1", api_key=KEY, max_retries=0) as client:
        assert chat(client, streamed=True) == (TEXT, "stop")
    faulty.requests(1)


@pytest.mark.parametrize("fault", ["429", "503"])
def test_a_client_that_is_told_to_come_back_does_and_is_answered(
    faulty: Faulty, fault: str
) -> None:
    faulty.swarm.reset(fault, failing=4)
    with openai.OpenAI(base_url=f"{faulty.proxy.url}/v1", api_key=KEY, max_retries=5) as client:
        assert chat(client, streamed=True) == (TEXT, "stop")


@pytest.mark.parametrize("fault", ["no finish_reason", "no [DONE]", "400"])
def test_opencode_ends_its_turn(faulty: Faulty, fault: str, tmp_path: Path) -> None:
    faulty.swarm.reset(fault)
    opencode = OpenCode(f"{faulty.proxy.url}/v1", tmp_path / "project")
    code, events = opencode("hi", *TITLED)
    kinds = {event["type"] for event in events}
    assert "error" in kinds or [part["reason"] for part in parts(events, "step_finish")] == ["stop"]
    assert (code != 0) == ("error" in kinds)
    faulty.requests(1)


@pytest.mark.parametrize("fault", ["dropped", "an error in the stream", "cut", "JSON for a stream"])
def test_opencode_recovers_with_the_model_server(
    faulty: Faulty, fault: str, tmp_path: Path
) -> None:
    faulty.swarm.reset(fault, failing=2 * faulty.num_siblings)
    opencode = OpenCode(f"{faulty.proxy.url}/v1", tmp_path / "project")
    code, events = opencode("hi", *TITLED)
    assert code == 0 or [event["type"] for event in events] == ["error"], events
    assert faulty.swarm.num_calls <= 12, "it asked again and again"


@pytest.mark.parametrize("fault", ["no finish_reason", "no [DONE]"])
def test_codex_ends_its_turn(faulty: Faulty, fault: str, tmp_path: Path) -> None:
    faulty.swarm.reset(fault)
    code, events = Codex(f"{faulty.proxy.url}/v1", tmp_path / "project")("hi")
    if code == 0:
        assert events[-1]["type"] == "turn.completed"
        assert [item["text"] for item in items(events, "agent_message")] == [TEXT]
    else:
        assert events[-1]["type"] == "turn.failed"
        assert fault not in WELL
    assert faulty.num_requests <= CODEX_TRIES
