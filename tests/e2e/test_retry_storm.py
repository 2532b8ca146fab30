"""Every answer is cut at random points and asked for again, and the proxy is started anew in
between: each request is one group, none is trained twice, none is lost."""

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
MOST_BYTES = 300
"""That are read before a cut: no answer is as short."""
TIMEOUT_S = 30
ENDED = "trained dropped pooled failed lost"


@dataclass(frozen=True)
class Question:
    number: int
    path: str
    streamed: bool
    is_marked: bool
    """Its client's library says which try it is."""
    pace_s: float = 0.0
    """Of each token."""

    @property
    def body(self) -> bytes:
        text = f"{self.number}: yes or no? [[slow {self.pace_s}]]"
        asked: dict[str, Any] = {"model": "fake", "stream": self.streamed}
        if self.path.endswith("responses"):
            asked["input"] = text
        else:
            asked["messages"] = [{"role": "user", "content": text}]
        if self.path.endswith("messages"):
            asked["max_tokens"] = 64
        return json.dumps(asked).encode()

    def headers(self, attempt: int) -> dict[str, str]:
        told = {"Content-Type": "application/json"}
        if self.is_marked and attempt:
            told["x-stainless-retry-count"] = str(attempt)
        return told

    def sent(self, attempt: int) -> bytes:
        told = {"Host": "localhost", "Content-Length": len(self.body), **self.headers(attempt)}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {told[name]}" for name in told)]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


ENDS = {
    "/v1/chat/completions": b"[DONE]",
    "/v1/responses": b'"response.completed"}',
    "/v1/messages": b'"message_stop"}',
}
PATHS = [*ENDS]


def questions(chance: random.Random) -> list[Question]:
    return [
        Question(
            number,
            chance.choice(PATHS),
            streamed=chance.random() < 0.5,
            is_marked=chance.random() < 0.5,
            pace_s=chance.choice([0.0, 0.01, 0.03]),
        )
        for number in range(NUM_REQUESTS)
    ]


class Calm:
    """Held by those who have read some of an answer and will hang up: nobody can know of that once
    the proxy has ended. Restarts wait for them, and they for restarts."""

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
        """While the proxy is started anew."""
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
    chance: random.Random
    calm: Calm = field(default_factory=Calm)
    num_cut: int = 0
    num_done: int = 0

    def ask(self, question: Question) -> bytes:
        """The whole answer, at last."""
        num_cuts = self.chance.randint(1, MAX_CUTS)
        attempt = 0
        while True:
            try:
                if attempt < num_cuts:
                    with self.calm.reading():
                        self.cut(question, attempt)
                else:
                    return self.read(question, attempt)
            except ConnectionError:
                self.calm.wait()
            attempt += 1

    def cut(self, question: Question, attempt: int) -> None:
        num_bytes = self.chance.choice([0, 1, self.chance.randrange(2, MOST_BYTES)])
        with self.connected() as client:
            client.sendall(question.sent(attempt))
            while num_bytes > 0 and (read := client.recv(min(num_bytes, 64))):
                num_bytes -= len(read)
        self.num_cut += 1
        # An answer to another connection: the proxy knows by then that this one was closed.
        httpx.get(f"{self.proxy.url}/health", timeout=TIMEOUT_S)

    def read(self, question: Question, attempt: int) -> bytes:
        """Raises ConnectionError where the answer is not whole, or an error that may heal."""
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
            # What is not read stays with the kernel, and is missed by who closes.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(TIMEOUT_S)
            client.connect(("127.0.0.1", self.proxy.port))
            yield client

    def restart(self) -> None:
        with self.calm.restarting():
            self.proxy.stop()
            self.proxy.start()
            self.proxy.wait_until_healthy()


def are_done(answers: list[Future[bytes]], num: int) -> bool:
    return sum(one.done() for one in answers) >= num


def groups_of(proxy: Process) -> list[Any]:
    return rows(proxy, "select *, cast(question as integer) as number from groups")


def test_a_storm_of_retries_makes_one_group_of_each_request(
    processes: Processes, yes_hooks: Path
) -> None:
    config = processes.folder / "fakevllm.toml"
    config.write_text("[job]\nbatch_size = 4\nlr = 0.1\n")
    server = processes.server("--backend", "fake")
    shared = ["--config", str(config), "--hooks", str(yes_hooks), "--n", "3", "--alias", "*"]
    storm = Storm(processes.proxy(server, *shared), random.Random(7))
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = [clients.submit(storm.ask, one) for one in questions(random.Random(3))]
        for number in range(1, NUM_RESTARTS + 1):
            due = NUM_REQUESTS * number // (NUM_RESTARTS + 1)
            wait_until(partial(are_done, answers, due), 120)
            storm.restart()
        assert all(one.result() for one in answers)

    def answered() -> list[Any]:
        return [group for group in groups_of(storm.proxy) if group["state"] != "failed"]

    wait_until(lambda: all(one["state"] in ENDED.split() for one in groups_of(storm.proxy)), 60)
    assert Counter(one["number"] for one in answered()) == dict.fromkeys(range(NUM_REQUESTS), 1)
    assert not [one for one in answered() if one["state"] == "lost"]
    assert {one["status"] for one in answered()} == {200}
    assert sum(one["num_resent"] for one in answered()) >= NUM_REQUESTS // 3
    assert storm.num_cut >= NUM_REQUESTS
    assert_trained_once(server, {one["group_id"] for one in answered()})


def assert_trained_once(server: Process, group_ids: set[str]) -> None:
    steps = read_step_entries(server.folder)
    trained = Counter(group["group_id"] for entry in steps for group in entry["groups"])
    assert trained and set(trained.values()) == {1}
    assert set(trained) <= group_ids


def test_what_was_not_read_outlives_a_killed_proxy(processes: Processes, yes_hooks: Path) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "3", "--alias", "*")
    question = Question(1, PATHS[0], streamed=False, is_marked=False, pace_s=0.3)
    storm = Storm(proxy, random.Random(0))
    with storm.connected() as client:
        client.sendall(question.sent(0))
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
