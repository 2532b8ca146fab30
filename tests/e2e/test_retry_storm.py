"""A stress test of retries: connections are cut at random points, and the proxy is restarted.

Each request must become one group, which is neither lost nor trained twice.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.run_log_reader import read_step_entries
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until

NUM_REQUESTS = 36
NUM_CLIENTS = 6
NUM_RESTARTS = 2
MAX_CUTS = 4
MAX_BYTES = 300
"""Maximum number of bytes that are read before a cut; each answer is longer."""
TIMEOUT_S = 30
ENDED = "trained dropped pooled failed lost"


@dataclass(frozen=True)
class Question:
    number: int
    path: str
    streamed: bool
    is_marked: bool
    """Whether retries have a header with the number of the attempt."""
    pace_s: float = 0.0
    """Seconds that the engine takes for each token."""

    @property
    def body(self) -> bytes:
        text = f"{self.number}: yes or no? [[slow {self.pace_s}]]"
        fields: dict[str, Any] = {"model": "fake", "stream": self.streamed}
        if self.path.endswith("responses"):
            fields["input"] = text
        else:
            fields["messages"] = [{"role": "user", "content": text}]
        if self.path.endswith("messages"):
            fields["max_tokens"] = 64
        return json.dumps(fields).encode()

    def headers(self, attempt: int) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.is_marked and attempt:
            headers["x-stainless-retry-count"] = str(attempt)
        return headers

    def as_bytes(self, attempt: int) -> bytes:
        headers = {"Host": "localhost", "Content-Length": len(self.body), **self.headers(attempt)}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


ENDS = {
    "/v1/chat/completions": b"[DONE]",
    "/v1/responses": b'"response.completed"}',
    "/v1/messages": b'"message_stop"}',
}
PATHS = [*ENDS]


def questions(rng: random.Random) -> list[Question]:
    return [
        Question(
            number,
            rng.choice(PATHS),
            streamed=rng.random() < 0.5,
            is_marked=rng.random() < 0.5,
            pace_s=rng.choice([0.0, 0.01, 0.03]),
        )
        for number in range(NUM_REQUESTS)
    ]


class RestartGate:
    """A lock between restarts of the proxy and clients that will hang up during an answer.

    Restarts wait for these clients, and the clients wait for restarts. A proxy that has ended
    cannot know that a client hung up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_reading = 0
        self._is_restarting = False

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_restarting)
            self._num_reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait while the proxy is restarted."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_restarting)

    @contextlib.contextmanager
    def restarting(self) -> Generator[None]:
        with self._changed:
            self._is_restarting = True
            self._changed.wait_for(lambda: self._num_reading == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_restarting = False
                self._changed.notify_all()


@dataclass
class Storm:
    proxy: Process
    rng: random.Random
    restart_gate: RestartGate = field(default_factory=RestartGate)
    num_cut: int = 0
    num_done: int = 0

    def send_until_answered(self, question: Question) -> bytes:
        """Send a request, cut its connection several times, and return the complete answer."""
        num_cuts = self.rng.randint(1, MAX_CUTS)
        attempt = 0
        while True:
            try:
                if attempt < num_cuts:
                    with self.restart_gate.reading():
                        self.cut(question, attempt)
                else:
                    return self.read(question, attempt)
            except ConnectionError:
                self.restart_gate.wait()
            attempt += 1

    def cut(self, question: Question, attempt: int) -> None:
        num_bytes = self.rng.choice([0, 1, self.rng.randrange(2, MAX_BYTES)])
        with self.connected() as client:
            client.sendall(question.as_bytes(attempt))
            while num_bytes > 0 and (read := client.recv(min(num_bytes, 64))):
                num_bytes -= len(read)
        self.num_cut += 1
        # The answer to this second request shows that the proxy has noticed the closed connection.
        httpx.get(f"{self.proxy.url}/health", timeout=TIMEOUT_S)

    def read(self, question: Question, attempt: int) -> bytes:
        """Send a request and return its answer.

        Raises ConnectionError for an incomplete answer and for an error that a retry may avoid.
        """
        url, headers = self.proxy.url + question.path, question.headers(attempt)
        try:
            answer = httpx.post(url, content=question.body, headers=headers, timeout=TIMEOUT_S)
        except httpx.TransportError as error:
            raise ConnectionError("cut off") from error
        if answer.status_code == 503 or "Try again" in answer.text:
            raise ConnectionError("the proxy is stopping")
        end = ENDS[question.path] if question.streamed else b"}"
        assert answer.status_code == 200 and end in answer.content[-len(end) - 4 :], answer.text
        return answer.content

    @contextlib.contextmanager
    def connected(self) -> Generator[socket.socket]:
        with socket.socket() as client:
            # With a small buffer, the proxy notices that the client closes before reading all.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(TIMEOUT_S)
            client.connect(("127.0.0.1", self.proxy.port))
            yield client

    def restart(self) -> None:
        with self.restart_gate.restarting():
            self.proxy.stop()
            self.proxy.start()
            self.proxy.wait_until_healthy()


def are_done(answers: list[Future[bytes]], num: int) -> bool:
    return sum(answer.done() for answer in answers) >= num


def groups_of(proxy: Process) -> list[Any]:
    return rows(proxy, "select *, cast(question as integer) as number from groups")


def test_a_storm_of_retries_makes_one_group_per_request(
    processes: Processes, yes_hooks: Path
) -> None:
    config = processes.folder / "fakevllm.toml"
    config.write_text("[job]\nbatch_size = 4\nlr = 0.1\n")
    server = processes.server("--backend", "fake")
    shared = ["--config", str(config), "--hooks", str(yes_hooks), "--n", "3", "--alias", "*"]
    storm = Storm(processes.proxy(server, *shared), random.Random(7))
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = [
            clients.submit(storm.send_until_answered, question)
            for question in questions(random.Random(3))
        ]
        for number in range(1, NUM_RESTARTS + 1):
            due = NUM_REQUESTS * number // (NUM_RESTARTS + 1)
            wait_until(partial(are_done, answers, due), 120)
            storm.restart()
        assert all(answer.result() for answer in answers)

    def answered() -> list[Any]:
        return [group for group in groups_of(storm.proxy) if group["state"] != "failed"]

    wait_until(lambda: all(group["state"] in ENDED.split() for group in groups_of(storm.proxy)), 60)
    assert Counter(group["number"] for group in answered()) == dict.fromkeys(range(NUM_REQUESTS), 1)
    assert not [group for group in answered() if group["state"] == "lost"]
    assert {group["status"] for group in answered()} == {200}
    assert sum(group["num_resent"] for group in answered()) >= NUM_REQUESTS // 3
    assert storm.num_cut >= NUM_REQUESTS
    assert_trained_once(server, {group["group_id"] for group in answered()})


def assert_trained_once(server: Process, group_ids: set[str]) -> None:
    steps = read_step_entries(server.folder)
    trained = Counter(group["group_id"] for entry in steps for group in entry["groups"])
    assert trained and set(trained.values()) == {1}
    assert set(trained) <= group_ids


def test_an_answer_that_was_not_read_survives_a_killed_proxy(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "3", "--alias", "*")
    question = Question(1, PATHS[0], streamed=False, is_marked=False, pace_s=0.3)
    storm = Storm(proxy, random.Random(0))
    with storm.connected() as client:
        client.sendall(question.as_bytes(0))
        wait_until(lambda: "siblings_in_flight 2.0" in httpx.get(f"{proxy.url}/metrics").text, 20)
    wait_until(lambda: rows(proxy, "select * from kept_answers") != [], 20)
    proxy.kill()
    proxy.start()
    proxy.wait_until_healthy()
    assert b'"content":"' in storm.read(question, 1)
    (group,) = wait_for_groups(proxy, 1)
    wait_until(lambda: rows(proxy, "select * from kept_answers") == [], 20)
    (group,) = rows(proxy, "select * from groups")
    assert (group["status"], group["num_resent"]) == (200, 1)
