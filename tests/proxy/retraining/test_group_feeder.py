"""The feeder counts each step once, waits for the right step, and skips groups that are too large.
The server's replies are given, because no test can crash a server at a chosen step."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm.errors import FakevllmError
from fakevllm.retraining import server_calls
from fakevllm.retraining.group_feeder import GroupFeeder
from fakevllm.retraining.group_reader import TrainableGroup
from fakevllm.retraining.report import RetrainReport, Staleness
from fakevllm.retraining.sample_size_limit import SampleSizeLimit
from fakevllm.sdk.http_driver import AsyncHttpDriver
from fakevllm.sdk.protocol import ServerReply, ServerRequest
from fakevllm_adapters.protocol.swarm import LogEntry
from tests.proxy.ledger.ledger_cases import call, group


class ScriptedServer(AsyncHttpDriver):
    """A server that answers each path with the next of its replies, and then with the last one."""

    def __init__(self, **replies: list[tuple[int, Any]]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.replies = replies
        self.num_requests = 0

    async def _send(self, request: ServerRequest) -> ServerReply:
        self.num_requests += 1
        left = self.replies[request.path.removeprefix("/").partition("?")[0]]
        status, content = left.pop(0) if len(left) > 1 else left[0]
        return ServerReply(status, content)


def feeder(server: AsyncHttpDriver) -> GroupFeeder:
    def read(group_id: str) -> TrainableGroup:
        return TrainableGroup(group(group_id), [0.0, 1.0], [[call()], [call()]])

    report = RetrainReport(Staleness(0, "run"), num_selected=1)
    return GroupFeeder(server, read, report, "hash", SampleSizeLimit(0.5), lambda: None)


def step(number: int, ess: float = 0.9) -> LogEntry:
    metrics = {"logged_tokens": 4.0, "logged_weight": 1.0, "logged_ess": ess, "reward_mean": number}
    return LogEntry(seq=0, kind="step", step=number, metrics=metrics)


def test_steps_that_are_trained_again_after_a_crash_count_once() -> None:
    one = feeder(ScriptedServer())
    for entry in (*map(step, (1, 2, 3)), LogEntry(seq=0, kind="restored", step=1), step(2)):
        one.read_entry(entry)
    assert (one.report.num_steps, one.report.last_step) == (2, 2)
    one.read_entry(step(3))
    assert (one.report.num_steps, one.report.last_step, one.report.reward_mean) == (3, 3, 2.0)


def test_a_low_step_that_is_trained_again_counts_once_for_the_limit() -> None:
    one = feeder(ScriptedServer())
    restored = LogEntry(seq=0, kind="restored", step=1)
    for entry in (step(1), step(2, 0.1), step(3, 0.1), restored, step(2, 0.1), step(3, 0.1)):
        one.read_entry(entry)
    assert one.report.ess.lowest == 0.1


async def test_the_feeder_waits_for_its_own_step_while_earlier_ones_are_trained_again() -> None:
    def status(global_step: int, backlog: float, waiting: int = 0) -> tuple[int, Any]:
        return 200, {
            "engine_status": "ENGINE.ROLLING",
            "global_step": global_step,
            "backlog": backlog,
            "waiting": {"finished_groups": waiting},
        }

    entries = [step(number).model_copy(update={"seq": number}) for number in range(1, 16)]
    server = ScriptedServer(
        add_logged_group=[(200, {"success": True, "pooled": True, "step": 12, "is_due": True})],
        get_engine_status=[status(13, 1.0), status(15, 1.0), status(16, 0.0, 1)],
        get_run_log=[
            (200, {"entries": [entries[14].model_dump()]}),
            (200, {"entries": [step(16).model_copy(update={"seq": 17}).model_dump()]}),
            (200, {"entries": []}),
        ],
    )
    one = feeder(server)
    for entry in entries[:14]:
        one.read_entry(entry)
    await one.feed(["g"], 1)
    assert server.replies["get_engine_status"] == [status(16, 0.0, 1)]
    assert (one.report.num_steps, one.report.num_left) == (16, 1)


async def test_a_group_that_is_too_large_is_left_out_and_the_others_are_sent() -> None:
    sent = [(413, {"detail": "too large"}), (200, {"success": True, "pooled": True})]
    one = feeder(ScriptedServer(add_logged_group=sent))
    await one.feed(["large", "g"], 1)
    assert (one.report.skipped, one.report.num_sent) == ({"too_large": 1}, 1)


def test_a_group_that_the_server_drops_later_is_not_counted_in_steps() -> None:
    one = feeder(ScriptedServer())
    one.report.num_sent = 4
    failed = LogEntry(
        seq=0, kind="dropped", reasons={"a#1": "step_failed: x", "a#2": "step_failed"}
    )
    lost = LogEntry(seq=0, kind="restored", step=0, reason="changed", lost=["b#1"])
    for entry in (failed, failed, lost, lost):
        one.read_entry(entry)
    assert one.report.skipped == {"step_failed": 2, "lost": 1}
    assert one.report.as_json()["groups_in_steps"] == 1


async def test_a_problem_that_passes_does_not_end_the_wait_for_a_step_and_the_end_of_training_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rolling = {"engine_status": "ENGINE.ROLLING", "global_step": 1, "backlog": 1.0}
    full = (200, {**rolling, "engine_status_detail": "the journal cannot be written: full"})
    done = (200, {**rolling, "global_step": 2})
    server = ScriptedServer(get_engine_status=[full, full, done])
    assert await server.run(server_calls.end_of_step(1)) == 0

    stopped = (200, {**rolling, "engine_status_detail": "too far", "closed": "training_stopped"})
    with pytest.raises(FakevllmError, match="Training has stopped: too far"):
        await ScriptedServer(get_engine_status=[stopped]).run(server_calls.end_of_step(1))

    monkeypatch.setattr(server_calls, "RETRY_FOR_S", 0.1)
    with pytest.raises(FakevllmError, match="the journal cannot be written"):
        await ScriptedServer(get_engine_status=[full]).run(server_calls.end_of_step(1))
