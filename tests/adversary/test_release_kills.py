"""SIGKILL of each process at each bad moment of a release, a rejection and a rollback.

What the server does at each place in its own code is tested in tests/crash.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adversary.decision_relay import ROLLBACK, DecisionRelay, Side
from tests.adversary.stack_processes import LIMIT_S, engine_pid, kill
from tests.e2e.ledgers import rows
from tests.e2e.processes import Processes, wait_until
from tests.e2e.release_stack import history, proxy_flags, release, stats, write_held_out

pytestmark = pytest.mark.slow

GATED = """
[release]
mode = "gated"
canary_share = 0.5
eval_dataset = "{rows}"
evaluate_every = 4
eval_samples = 2
margin = 0.1
alpha = 0.4
"""
"""Settings with which a verdict needs few rows."""
HOOK = """
from pathlib import Path

def on_compute_relative_reward(siblings, answers):
    is_held_out = "held-out" in siblings[0].messages[-1]["content"]
    wanted = Path({wanted!r}).read_text() if is_held_out else "yes"
    return [float((answer["content"] or "").startswith(wanted)) for answer in answers]
"""
"""A hook. For apps' requests, it rewards answers that begin with "yes". For held-out rows, it
rewards answers that begin with the text in a file."""
NUM_TURNS = 2
PAUSE_S = 0.05
"""Seconds between two requests of the app. The pause leaves CPU time to processes that are
starting."""
VERDICTS = ("released", "rejected", "undecided")


class Victim(StrEnum):
    """A process that is killed."""

    PROXY = "the proxy"
    SERVER = "the server"
    ENGINE = "the engine"


@dataclass(frozen=True)
class Kill:
    """A kill of a process, at a moment of a decision or while a candidate is evaluated."""

    victim: Victim
    decision: str
    side: Side | None
    """None for an evaluation."""

    def __str__(self) -> str:
        moment = "in an evaluation" if self.side is None else f"at {self.decision}, {self.side}"
        return f"{self.victim} was killed {moment}"


EVALUATION = ("", None)
REJECTIONS = [
    Kill(Victim.PROXY, "candidate", Side.AFTER),
    Kill(Victim.ENGINE, *EVALUATION),
    Kill(Victim.SERVER, "rejected", Side.BEFORE),
    Kill(Victim.SERVER, "candidate", Side.AFTER),
    Kill(Victim.PROXY, *EVALUATION),
    Kill(Victim.SERVER, "rejected", Side.DURING),
    Kill(Victim.ENGINE, "candidate", Side.AFTER),
    Kill(Victim.SERVER, *EVALUATION),
    Kill(Victim.PROXY, "rejected", Side.AFTER),
]
"""Kills while each candidate is worse, so that training goes back again and again."""
RELEASES = [
    Kill(Victim.PROXY, "released", Side.BEFORE),
    Kill(Victim.SERVER, "released", Side.AFTER),
]
"""Kills while each candidate is better."""


@dataclass
class App:
    """An app that talks without a pause: sessions of two turns, one after another."""

    url: str
    num_answers: int = 0
    num_lost: int = 0
    """Number of requests that were cut off by a kill of the proxy."""
    failures: list[str] = field(default_factory=list[str])
    """Errors of requests while the proxy ran."""
    proxy_runs: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    groups: list[list[str]] = field(default_factory=list[list[str]])
    """Ids of the groups of each session whose turns were all answered."""

    def run(self) -> None:
        number = 0
        with httpx.Client(timeout=LIMIT_S) as http:
            while not self.is_over.is_set():
                number += 1
                if self.proxy_runs.wait(0.1):
                    self._talk(http, number)

    def _talk(self, http: httpx.Client, number: int) -> None:
        messages = [{"role": "user", "content": f"Question {number}?"}]
        groups: list[str] = []
        for turn in range(NUM_TURNS):
            self.is_over.wait(PAUSE_S)
            try:
                body = {"model": "fake", "messages": messages}
                reply = http.post(f"{self.url}/v1/chat/completions", json=body)
                if reply.status_code != 200:
                    self.failures.append(f"{reply.status_code}: {reply.text}")
                    return
                groups.append(reply.headers["x-fakevllm-group"])
                # The receipt waits until the ledger has the group, so the next turn finds it.
                receipt = http.get(f"{self.url}/fakevllm/groups/{groups[-1]}")
            except httpx.TransportError as error:
                if self.proxy_runs.is_set():
                    self.failures.append(repr(error))
                self.num_lost += 1
                return
            self.num_answers += 1
            if receipt.status_code != 200:
                return
            messages = [
                *messages,
                reply.json()["choices"][0]["message"],
                {"role": "user", "content": f"And {turn}?"},
            ]
        self.groups.append(groups)


class Stack:
    """A server and a proxy with a relay between them, and an app that never stops."""

    def __init__(self, processes: Processes, folder: Path, threads: ThreadPoolExecutor) -> None:
        self._wanted = folder / "wanted"
        self.want("no")
        sections = GATED.format(rows=write_held_out(folder))
        flags = proxy_flags(folder, sections, HOOK.format(wanted=str(self._wanted)))
        self.server = processes.server("--backend", "fake")
        self.relay = DecisionRelay(self.server.port)
        self.relay.__enter__()
        self.proxy = processes.proxy(self.relay.url, *flags)
        self.app = App(self.proxy.url)
        self.app.proxy_runs.set()
        self._talking = threads.submit(self.app.run)
        self.records: list[dict[str, Any]] = []
        """The history of releases at the time of the last check."""

    def close(self) -> None:
        self.app.is_over.set()
        self._talking.result(LIMIT_S)
        self.relay.__exit__(None, None, None)

    def want(self, answer: str) -> None:
        """Let answers to held-out rows be rewarded if they begin with this text. With `no`, each
        version is worse than the one before, and with `yes`, it is better."""
        part = self._wanted.with_suffix(".part")
        part.write_text(answer)
        part.rename(self._wanted)

    def kill(self, victim: Victim) -> None:
        if victim is Victim.ENGINE:
            return kill(engine_pid(self.server))
        if victim is Victim.PROXY:
            self.app.proxy_runs.clear()
            self.proxy.kill()
        else:
            self.relay.refuse()
            self.server.kill()

    def restart(self, victim: Victim) -> None:
        """Start the victim again. The server starts an engine by itself."""
        if victim is Victim.SERVER:
            self.server.start()
            self.server.wait_until_healthy()
            self.relay.accept()
        elif victim is Victim.PROXY:
            self.proxy.start()
        self.proxy.wait_until_healthy()
        self.app.proxy_runs.set()

    def carry_out(self, kill: Kill) -> None:
        """Kill a process at the next moment that `kill` describes, start the process again, and
        check the history."""
        start = time.monotonic()
        if kill.side is None:
            self._kill_in_evaluation(kill.victim)
        else:
            self._kill_at(kill.decision, kill.side, kill.victim)
        print(f"{kill} after {time.monotonic() - start:.1f} s: {self.records[-1]}")

    def _kill_at(self, decision: str, side: Side, victim: Victim) -> None:
        num_before = len(history(self.server))
        stop = self.relay.stop_at(decision, side)
        stop.wait()
        if side is not Side.DURING:
            self.check_history()
            is_made = bool(self.records) and self.records[-1]["decision"] == decision
            assert is_made == (side is Side.AFTER)
        self.kill(victim)
        stop.release(drop=side is Side.BEFORE and victim is Victim.PROXY)
        self.restart(victim)
        self.await_decision(decision, num_before)

    def _kill_in_evaluation(self, victim: Victim) -> None:
        query = "SELECT COUNT(*) FROM groups WHERE eval_id LIKE ?"

        def is_sampled() -> bool:
            candidate = stats(self.proxy)["release"]["candidate"]
            return (
                candidate is not None and rows(self.proxy, query, f"gate-{candidate}-%")[0][0] > 2
            )

        wait_until(is_sampled, LIMIT_S, "rows of a candidate")
        self.kill(victim)
        self.restart(victim)
        self.check_history()

    def check_history(self) -> None:
        """Check that the history begins with the history of the previous check, and that no
        decision appears twice."""
        records = history(self.server)
        assert records[: len(self.records)] == self.records
        assert [one["number"] for one in records] == list(range(1, len(records) + 1))
        assert len({one["id"] for one in records}) == len(records)
        made = Counter(
            (one["decision"], one["version"]) for one in records if one["decided_by"] == "gate"
        )
        assert set(made.values()) <= {1}, made
        self.records = records

    def check_evaluations(self) -> None:
        """Check that each verdict is based on rows that each of the two versions answered exactly
        once."""
        query = "SELECT COUNT(*) FROM groups WHERE eval_id LIKE ? AND eval_version = ?"
        for record in self.records:
            evidence = record["evidence"]
            if record["decision"] not in VERDICTS or evidence.get("source") != "held_out":
                continue
            candidate = record["version"]
            sampled = [
                rows(self.proxy, query, f"gate-{candidate}-%", version)[0][0]
                for version in (candidate, evidence["released"])
            ]
            assert sampled == [evidence["draws"]] * 2, record

    def check_arms(self) -> None:
        """Check that all turns of a session have the same arm. Turns without a propensity are not
        checked. A request has no propensity if the engine did not hold the arm's version."""
        query = "SELECT group_id, session_id, arm, arm_propensity, reason FROM groups"
        found = {row["group_id"]: row for row in rows(self.proxy, query)}
        arms: defaultdict[str, set[str]] = defaultdict(set)
        for groups in self.app.groups:
            turns = [found[group_id] for group_id in groups]
            assert len({turn["session_id"] for turn in turns}) == 1
            for turn in turns:
                if turn["arm_propensity"] is not None:
                    arms[turn["session_id"]].add(turn["arm"])
        assert {len(one) for one in arms.values()} == {1}, arms
        assert {arm for one in arms.values() for arm in one} == {"training", "released"}

    def await_decision(self, decision: str, num: int) -> None:
        """Wait until the history has a decision of this kind after the first `num` ones."""

        def is_made() -> bool:
            return any(one["decision"] == decision for one in history(self.server)[num:])

        wait_until(is_made, LIMIT_S, f"a version that is {decision}")
        self.check_history()


def test_decisions_are_made_once_and_apps_are_answered_whatever_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    with ThreadPoolExecutor() as threads:
        stack = Stack(processes, tmp_path, threads)
        try:
            for kill in REJECTIONS:
                stack.carry_out(kill)
            stack.want("yes")
            for kill in RELEASES:
                stack.carry_out(kill)
            roll_back_with_kills(stack, threads)
        finally:
            stack.close()
    assert stack.app.failures == []
    assert stack.app.num_answers > 50
    stack.check_evaluations()
    stack.check_arms()


def roll_back_with_kills(stack: Stack, threads: ThreadPoolExecutor) -> None:
    """Kill the engine and then the server while an operator's rollback is carried out."""
    stop = stack.relay.stop_at(ROLLBACK, Side.DURING)
    command = threads.submit(release, stack.relay.url, "rollback")
    stop.wait()
    stack.kill(Victim.ENGINE)
    stack.kill(Victim.SERVER)
    stack.restart(Victim.SERVER)
    code, output = command.result(LIMIT_S)
    assert code == 0, output
    stack.check_history()
    (made,) = [one for one in stack.records if one["decided_by"] == "operator"]
    assert "restored" in made["evidence"]

    def is_followed() -> bool:
        state = httpx.get(f"{stack.server.url}/releases").json()
        return stats(stack.proxy)["release"]["released"] == state["released"]

    wait_until(is_followed, LIMIT_S, "the gate to follow the server")
