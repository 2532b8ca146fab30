"""Two stock clients that fill one batch after another, and checks that the batches were trained.

A batch is two tasks of two episodes. `leave_one_waiting` ends the first of these episodes, and
`complete_batch` ends the others. All runs use the same task ids, so a server that mixed two runs
would compare their episodes with each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from fakevllm_adapters.protocol.swarm import LogEntry
from tests.e2e import fast_agreement_server
from tests.e2e.journal_checks import rows
from tests.e2e.processes import Process, Processes, free_port, wait_until
from tests.e2e.stock_client import StockClient
from tests.e2e.swarm_wire import ROLLING, Json, small_job

BATCH, NUM_REPEAT = 2, 2
STEP_S = 60.0
ANY, ALL = "any_client_agree_sync_weight", "all_clients_agree_sync_weight"
METHODS = (
    "finish_enough_episodes",
    "finish_enough_tasks",
    "finish_enough_non_dummy_tasks",
    ANY,
    ALL,
)
"""All collection methods, without `rollout_until_`, with which each name begins."""
OTHER_JOB = "other_job"


@dataclass(slots=True)
class Run:
    """The clients' records of one run."""

    folder: str = ""
    """Path of the run's folder, relative to the server's run directory."""
    waiting: list[str] = field(default_factory=list[str])
    """Uuids of ended episodes that wait for a step."""
    steps: list[set[str]] = field(default_factory=list[set[str]])
    """Uuids of the episodes of each step."""
    dropped: list[str] = field(default_factory=list[str])
    """Uuids of episodes that waited when another job of the same run was started."""
    logprob: float | None = None
    """Log-probability of a fixed answer with the run's latest weights; None before its first stop.
    """

    @property
    def ended(self) -> list[str]:
        return [*self.waiting, *self.dropped, *(uuid for step in self.steps for uuid in step)]


class StockPair:
    """Two stock clients of one server. The first client starts and stops the engine."""

    def __init__(self, processes: Processes, *flags: str) -> None:
        """Start a server, and two clients that wait for agreed steps ten times as fast as
        AgentJet's."""
        self.folder = processes.folder / "server"
        port = free_port()
        command = [fast_agreement_server.__file__, "start", *flags]
        command += ["--port", str(port), "--run-dir", str(self.folder)]
        self.server = processes.adopt(Process("server", command, port, self.folder))
        url = self.server.wait_until_healthy().url
        speed = fast_agreement_server.SPEED
        self.first, self.second = StockClient(url, speed), StockClient(url, speed)
        self.runs: defaultdict[str, Run] = defaultdict(Run)
        """The clients' records of each run, by the pattern of the run's folder."""
        self._run = Run()
        self._method = ""
        self._fresh_logprob: float | None = None
        self._abandoned: list[Json] = []
        """Claims that were open when the engine was stopped."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.first.close()
        self.second.close()

    def start(self, folder: str, method: str, **changes: Any) -> None:
        """Start the engine with a job of the run whose folder matches the pattern `folder`. Check
        that the run has the step, the weights and the waiting episodes with which the clients left
        the run."""
        self._method, self._run = method, self.runs[folder]
        job = small_job(
            BATCH,
            NUM_REPEAT,
            ajet__swarm_mode_sample_collection_method=f"rollout_until_{method}",
            ajet__trainer_common__optim__lr=1e-3,
            **changes,
        )
        self.first.start(job)
        status = self.status
        (current,) = [run for run in self.listed_runs if run["is_current"]]
        assert fnmatch(current["folder"], folder)
        self._run.folder = self._run.folder or current["folder"]
        assert current["folder"] == self._run.folder
        assert current["last_step"] == len(self._run.steps)
        assert status["global_step"] == len(self._run.steps) + 1
        assert self._waiting() == self._run.waiting
        assert status["dropped"].get(OTHER_JOB, 0) == len(self._run.dropped)
        self._check_weights()
        self._check_abandoned()

    def start_other_job(self, folder: str, method: str, **changes: Any) -> None:
        """Start the engine with a job that drops the episodes that wait in the run."""
        run = self.runs[folder]
        run.dropped += run.waiting
        run.waiting = []
        self.start(folder, method, **changes)

    def leave_one_waiting(self) -> None:
        """End the first episode of a batch."""
        self._play(self.first, "0", 0.0)
        assert self._waiting() == self._run.waiting

    def complete_batch(self) -> None:
        """End the other episodes of a batch, and wait until its step is made."""
        self.end_others()
        self.make_step()

    def end_others(self) -> None:
        """End all episodes of a batch but the first."""
        self._play(self.second, "0", 1.0)
        self._play(self.first, "1", 0.0)
        self._play(self.second, "1", 1.0)

    def make_step(self, *, is_one_enough: bool = False) -> None:
        """Agree to the step of a batch if the method needs agreement, and wait until the step is
        made. With `is_one_enough`, only the first client agrees."""
        if is_one_enough:
            assert self.first.agree_sync_weight()
        elif self._method in (ANY, ALL):
            self._agree()
        self._run.steps.append(set(self._run.waiting))
        self._run.waiting = []
        next_step = len(self._run.steps) + 1
        wait_until(
            lambda: self.status["global_step"] == next_step,
            STEP_S,
            lambda: f"step {next_step} to be collected: {self.status}",
        )

    def stop(self) -> None:
        """Stop the engine while an episode is claimed."""
        claimed = self.second.begin_episode()
        assert self.second.wire.chat(claimed).status_code == 200
        self._abandoned.append(claimed)
        self._run.logprob = self._logprob()
        self.first.stop()

    @property
    def status(self) -> Json:
        return self.first.wire.get("/get_engine_status")

    @property
    def listed_runs(self) -> list[Json]:
        return self.first.wire.get("/get_runs")["runs"]

    def check_journals(self) -> None:
        """Check that each run has the episodes that were ended in it and no others, and that each
        batch was trained once, in the step for which it was collected."""
        folders = [run.folder for run in self.runs.values()]
        assert sorted(run["folder"] for run in self.listed_runs) == sorted(folders)
        for run in self.runs.values():
            check_journal(self.folder / run.folder, run)

    def _play(self, client: StockClient, task: str, reward: float) -> None:
        """Run one episode. Its answer depends on its reward, so that the step changes the
        weights."""
        claimed = client.begin_episode()
        answer = client.wire.chat(claimed, "[[say yes]]" if reward else "[[say no]]")
        assert answer.status_code == 200, answer.text
        assert client.end_episode(claimed["episode_uuid"], task, reward)
        self._run.waiting.append(claimed["episode_uuid"])

    def _agree(self) -> None:
        """Let both clients agree. If the method requires the agreement of all clients, also check
        that the agreement of one client is not enough."""
        with ThreadPoolExecutor(2) as threads:
            agreed = [threads.submit(self.first.agree_sync_weight)]
            if self._method == ALL:
                wait_until(lambda: self._have_agreed == [True, False], STEP_S)
                assert self.first.wire.pool()["engine_status"] == ROLLING
            agreed.append(threads.submit(self.second.agree_sync_weight))
            results = [one.result() for one in agreed]
        # The agreement of either client may begin the step before the other client agrees.
        assert any(results) if self._method == ANY else all(results)

    @property
    def _have_agreed(self) -> list[bool]:
        """Whether the first and the second client have agreed to the next step."""
        clients = self.first.wire.pool()["swarm_client_instruction"]["active_clients"]
        agreed = {client["client_uuid"]: client["allowed_sync_weight"] for client in clients}
        return [agreed.get(one.wire.client_uuid, False) for one in (self.first, self.second)]

    def _waiting(self) -> list[str]:
        """Return the uuids of the ended episodes that wait for a step."""
        tasks = self.first.wire.pool()["completed_tasks_details"]
        return [uuid for uuids in tasks.values() for uuid in uuids]

    def _logprob(self) -> float:
        """Return the log-probability of the first token of an answer with a fixed seed."""
        (model,) = self.first.wire.get("/v1/models")["data"]
        question = {"role": "user", "content": "What is 1 plus 1?"}
        body = {"model": model["id"], "messages": [question], "seed": 0, "max_tokens": 1}
        answer = self.first.wire.post("/v1/chat/completions", body | {"logprobs": True})
        return answer["choices"][0]["logprobs"]["content"][0]["logprob"]

    def _check_weights(self) -> None:
        """Check that the engine has the run's own weights. A new run has the model's weights."""
        logprob = self._logprob()
        if self._fresh_logprob is None:
            self._fresh_logprob = logprob
        expected = self._fresh_logprob if self._run.logprob is None else self._run.logprob
        assert logprob == expected
        assert (logprob == self._fresh_logprob) == (not self._run.steps)

    def _check_abandoned(self) -> None:
        """Check that claims from before the stop are refused, whichever run is current."""
        wire = self.second.wire
        for claimed in self._abandoned:
            uuid = claimed["episode_uuid"]
            assert not wire.can_continue(uuid)
            assert wire.chat(claimed).status_code == 404
            assert wire.refused("/end_episode", wire.end_body(uuid, "0", 1.0))[0] == 400


def check_journal(folder: Path, run: Run) -> None:
    """Compare a run's journal with the clients' records of the run."""
    samples: dict[str, str | None] = dict(rows(folder, "SELECT owner, group_id FROM samples"))
    assert sorted(samples) == sorted(run.ended)
    groups: dict[str, Sequence[Any]] = {
        name: row for name, *row in rows(folder, "SELECT group_id, state, reason, step FROM groups")
    }
    trained: defaultdict[int, set[str]] = defaultdict(set)
    dropped: list[str] = []
    for uuid, group_id in samples.items():
        if group_id is None:
            continue
        state, reason, step = groups[group_id]
        if state == "consumed":
            trained[step].add(uuid)
        elif state == "dropped":
            assert reason == OTHER_JOB
            dropped.append(uuid)
    assert [trained[step] for step in sorted(trained)] == run.steps
    assert sorted(trained) == list(range(1, len(run.steps) + 1))
    assert sorted(dropped) == sorted(run.dropped)
    _check_log(
        folder, {name: step for name, (state, _, step) in groups.items() if state == "consumed"}
    )


def _check_log(folder: Path, consumed: dict[str, int]) -> None:
    """Check that the run log has each trained group once, in its step."""
    query = "SELECT entry_json FROM entries ORDER BY seq"
    entries = [LogEntry.model_validate_json(text) for (text,) in rows(folder, query)]
    logged = [(group.group_id, entry.step) for entry in entries for group in entry.groups]
    assert Counter(logged) == Counter(consumed.items())
    calls = [entry.metrics["calls"] for entry in entries if entry.kind == "step"]
    assert calls == [BATCH * NUM_REPEAT] * len(calls)
