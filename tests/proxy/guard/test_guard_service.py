"""The guard follows the run log, raises each alarm once, and carries out its action once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fakevllm.config.guard import GuardAction
from fakevllm.guard.guard_service import Guard, GuardOutlets, GuardSettings
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.releases import (
    Decision,
    ReleaseReply,
    ReleaseRequest,
    RollbackRequest,
)
from fakevllm_adapters.protocol.swarm import (
    EngineStatus,
    EngineStatusReply,
    LogEntry,
)
from tests.proxy.gate.gate_rig import REQUEST
from tests.proxy.guard.made_up_series import NUM_STEPS, ONSET, RULES, healthy, with_trouble
from tests.proxy.scripted_swarm import until

DETECTOR = "entropy_collapse"


def step_entry(step: int, figures: dict[str, float], **fields: Any) -> LogEntry:
    return LogEntry(
        seq=step + 1, kind="step", step=step, version=step + 1, metrics=figures, **fields
    )


def entries(
    figures: Callable[[int, random.Random], dict[str, float]], num_steps: int = NUM_STEPS
) -> list[LogEntry]:
    noise = random.Random(0)
    return [step_entry(step, figures(step, noise)) for step in range(num_steps)]


COLLAPSE = entries(with_trouble(DETECTOR))


@dataclass
class FakeServer:
    """A server with a run log, which records the decisions of the guard."""

    log: list[LogEntry] = field(default_factory=list[LogEntry])
    run_id: str = "run"
    status_code: int = 200
    """Status with which decisions are answered."""
    refusal: str | None = None
    decisions: dict[str, ReleaseRequest | RollbackRequest] = field(
        default_factory=dict[str, ReleaseRequest | RollbackRequest]
    )
    num_requests: int = 0
    num_reads: int = 0

    @property
    def status(self) -> EngineStatusReply | None:
        return EngineStatusReply(engine_status=EngineStatus.ROLLING, run_id=self.run_id)

    async def run_log(self, after: int) -> list[LogEntry]:
        self.num_reads += 1
        return [entry for entry in self.log if entry.seq > after][:50]

    async def decide(self, request: ReleaseRequest) -> ReleaseReply:
        return self._answer(request)

    async def roll_back(self, request: RollbackRequest) -> ReleaseReply:
        return self._answer(request)

    def _answer(self, request: ReleaseRequest | RollbackRequest) -> ReleaseReply:
        self.num_requests += 1
        if self.status_code != 200:
            raise aiohttp.ClientResponseError(REQUEST, (), status=self.status_code)
        if self.refusal is not None:
            return ReleaseReply(success=False, failure_reason=self.refusal)
        self.decisions[request.id] = request
        return ReleaseReply(success=True)


@dataclass
class Rig:
    """A guard with what it calls."""

    guard: Guard
    server: FakeServer
    alerts: list[Mapping[str, Any]]
    pauses: list[str]

    async def read_all(self) -> None:
        """Wait until the guard has seen the whole run log, and has nothing left to do."""
        num_reads = self.server.num_reads
        await until(lambda: self.server.num_reads > num_reads + len(self.server.log) // 50 + 2)


@asynccontextmanager
async def guarded(
    folder: Path,
    server: FakeServer,
    action: GuardAction = "warn",
    *,
    pauses_training: bool = False,
) -> AsyncGenerator[Rig]:
    alerts: list[Mapping[str, Any]] = []
    pauses: list[str] = []

    def pause() -> str | None:
        pauses.append("paused")
        return None

    ledger = Ledger.open(folder / "ledger.sqlite")
    guard = Guard(
        GuardSettings(RULES, dict.fromkeys(RULES.thresholds, action)),
        server,
        ledger.guard,
        GuardOutlets(pause if pauses_training else None, alerts.append),
        clock=lambda: 1000.0,
        check_every_s=0.005,
        retry_every_s=0.005,
    )
    task = asyncio.create_task(guard.run())
    try:
        yield Rig(guard, server, alerts, pauses)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ledger.close()


async def test_a_warning_is_logged_sent_and_shown_and_decides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(tmp_path, FakeServer(COLLAPSE)) as rig:
        await until(lambda: rig.alerts != [])
        await rig.read_all()
        (alarm,) = rig.guard.view().alarms
        shown = rig.guard.detectors_on
    (sent,) = rig.alerts
    assert ONSET <= sent["step"] < ONSET + 20
    assert sent["id"] == f"guard-run-{sent['version']}-{sent['step']}-{DETECTOR}"
    assert (sent["at"], sent["action"], sent["event"]) == (1000.0, "warn", "guard_alarm")
    assert sent["message"] in sent["text"]
    assert (alarm.detector, alarm.step, alarm.is_pending) == (DETECTOR, sent["step"], False)
    assert shown[DETECTOR] == 1
    assert sum(shown.values()) == 1
    assert rig.server.num_requests == 0
    (line,) = [text for text in caplog.messages if DETECTOR in text]
    assert "(action: warn)" in line


async def test_an_honest_run_raises_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path, FakeServer(entries(healthy)), "rollback") as rig:
        await rig.read_all()
        assert (rig.alerts, rig.server.num_requests, rig.guard.view().alarms) == ([], 0, [])


async def test_the_action_hold_holds_releases_once_with_its_evidence(tmp_path: Path) -> None:
    async with guarded(tmp_path, FakeServer(COLLAPSE), "hold") as rig:
        await until(lambda: rig.server.decisions != {})
        await rig.read_all()
    ((id, request),) = rig.server.decisions.items()
    assert isinstance(request, ReleaseRequest)
    assert (request.decision, request.run_id) == (Decision.HOLD, "run")
    assert id == rig.alerts[0]["id"]
    assert request.evidence["source"] == "guard"
    assert request.evidence["detector"] == DETECTOR
    assert request.evidence["value"] < request.evidence["threshold"] == 0.1
    assert (rig.server.num_requests, rig.pauses) == (1, [])


async def test_the_action_rollback_goes_back_to_the_released_version(tmp_path: Path) -> None:
    async with guarded(tmp_path, FakeServer(COLLAPSE), "rollback") as rig:
        await until(lambda: rig.server.decisions != {})
    (request,) = rig.server.decisions.values()
    assert isinstance(request, RollbackRequest)
    assert request.version is None


async def test_alarms_that_begin_together_go_back_once(tmp_path: Path) -> None:
    def both(step: int, noise: random.Random) -> dict[str, float]:
        refusals = with_trouble("refusals")(step, noise)["refusals"]
        return with_trouble("tool_errors")(step, noise) | {"refusals": refusals}

    async with guarded(tmp_path, FakeServer(entries(both)), "rollback") as rig:
        await rig.read_all()
        assert len(rig.alerts) == 2
        assert [one.is_pending for one in rig.guard.view().alarms] == [False, False]
    assert rig.server.num_requests == 1


async def test_without_releases_the_action_hold_pauses_training(tmp_path: Path) -> None:
    async with guarded(tmp_path, FakeServer(COLLAPSE), "hold", pauses_training=True) as rig:
        await until(lambda: rig.pauses != [])
        await rig.read_all()
    assert (rig.pauses, rig.server.num_requests) == (["paused"], 0)


async def test_a_restarted_guard_raises_no_alarm_again_and_still_sees_the_trouble(
    tmp_path: Path,
) -> None:
    server = FakeServer(COLLAPSE[:90])
    async with guarded(tmp_path, server, "hold") as rig:
        await until(lambda: server.decisions != {})
        await rig.read_all()
    server.log = COLLAPSE
    async with guarded(tmp_path, server, "hold") as rig:
        await rig.read_all()
        assert (rig.alerts, server.num_requests) == ([], 1)
        assert [alarm.detector for alarm in rig.guard.view().alarms] == [DETECTOR]


async def test_a_decision_is_repeated_until_the_server_has_it_also_after_a_restart(
    tmp_path: Path,
) -> None:
    server = FakeServer(COLLAPSE, status_code=503)
    async with guarded(tmp_path, server, "hold") as rig:
        await until(lambda: server.num_requests > 1)
        assert [alarm.is_pending for alarm in rig.guard.view().alarms] == [True]
        assert rig.guard.view().trouble is not None
    server.status_code = 200
    async with guarded(tmp_path, server, "hold") as rig:
        await until(lambda: len(server.decisions) == 1)
        await until(lambda: rig.guard.view().trouble is None)
        assert [alarm.is_pending for alarm in rig.guard.view().alarms] == [False]


async def test_a_key_without_the_right_to_decide_is_named_with_its_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeServer(COLLAPSE, status_code=403)
    async with guarded(tmp_path, server, "rollback") as rig:
        await until(lambda: server.num_requests > 2)
        assert "give an admin's key with --swarm-key" in str(rig.guard.view().trouble)
    assert caplog.text.count("the guard waits") == 1


@pytest.mark.parametrize("is_conflict", [True, False])
async def test_a_decision_that_the_server_refuses_is_not_sent_again(
    tmp_path: Path, is_conflict: bool
) -> None:
    server = FakeServer(COLLAPSE, status_code=409 if is_conflict else 200, refusal="no")
    async with guarded(tmp_path, server, "rollback") as rig:
        await until(lambda: server.num_requests > 0)
        await rig.read_all()
        assert server.num_requests == 1
        assert [alarm.is_pending for alarm in rig.guard.view().alarms] == [False]


async def test_trouble_that_was_over_before_the_guard_was_switched_on_is_not_reported(
    tmp_path: Path,
) -> None:
    def over(step: int, noise: random.Random) -> dict[str, float]:
        return with_trouble(DETECTOR)(step, noise) if step < 90 else healthy(step, noise)

    async with guarded(tmp_path, FakeServer(entries(over)), "rollback") as rig:
        await rig.read_all()
        assert (rig.alerts, rig.server.num_requests) == ([], 0)


async def test_a_return_ends_the_alarm_and_cancels_a_rollback_that_waits(tmp_path: Path) -> None:
    server = FakeServer(COLLAPSE, status_code=503)
    async with guarded(tmp_path, server, "rollback") as rig:
        await until(lambda: server.num_requests > 0)
        seq = COLLAPSE[-1].seq + 1
        restored = LogEntry(seq=seq, kind="restored", step=40, version=200, reason="rejected")
        server.log = [*COLLAPSE, restored]
        await until(lambda: not rig.guard.view().alarms)
        server.status_code = 200
        await rig.read_all()
        assert server.decisions == {}


async def test_the_same_trouble_after_a_return_has_another_decision_with_another_id(
    tmp_path: Path,
) -> None:
    server = FakeServer(COLLAPSE)
    async with guarded(tmp_path, server, "rollback") as rig:
        await until(lambda: len(server.decisions) == 1)
        seq = COLLAPSE[-1].seq + 1
        restored = LogEntry(seq=seq, kind="restored", step=0, version=200, reason="rejected")
        again = [
            entry.model_copy(update={"seq": seq + entry.seq, "version": 200 + entry.version})
            for entry in COLLAPSE
        ]
        server.log = [*COLLAPSE, restored, *again]
        await until(lambda: len(server.decisions) == 2)
    assert [alert["id"] for alert in rig.alerts] == list(server.decisions)


async def test_a_change_of_the_hooks_begins_the_comparison_anew(tmp_path: Path) -> None:
    log = [*COLLAPSE[:ONSET], COLLAPSE[ONSET].model_copy(update={"changed": "the hooks changed"})]
    server = FakeServer([*log, *COLLAPSE[ONSET + 1 :]])
    async with guarded(tmp_path, server) as rig:
        await rig.read_all()
        assert rig.alerts == []


async def test_another_run_has_a_memory_of_its_own(tmp_path: Path) -> None:
    server = FakeServer(COLLAPSE)
    async with guarded(tmp_path, server) as rig:
        await until(lambda: rig.alerts != [])
        server.log, server.run_id = entries(healthy), "other"
        await until(lambda: not rig.guard.view().alarms)
        await rig.read_all()
        assert len(rig.alerts) == 1


async def test_a_memory_of_another_form_is_left_out(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.guard.put_state(json.dumps({"run_id": "run", "seq": "many"}))
    ledger.close()
    async with guarded(tmp_path, FakeServer(COLLAPSE)) as rig:
        await until(lambda: len(rig.alerts) == 1)


async def test_a_server_that_sends_all_entries_each_time_is_asked_no_more_often(
    tmp_path: Path,
) -> None:
    class Forgetful(FakeServer):
        async def run_log(self, after: int) -> list[LogEntry]:
            self.num_reads += 1
            return self.log

    async with guarded(tmp_path, Forgetful(COLLAPSE)) as rig:
        await until(lambda: rig.server.num_reads > 5)
        assert len(rig.alerts) == 1
