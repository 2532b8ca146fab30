"""The demo with the mode `gated`: its settings, its results, and the claims about planted steps."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.config.model import Config
from fakevllm.demo.command import run_demo
from fakevllm.demo.gate_settings import PlantedSteps, release_section
from fakevllm.demo.gated_outcome import NUM_COMPARED, GatedOutcome, arm_change, gated_outcome
from fakevllm.demo.gated_report import show_gated
from fakevllm.demo.release_watch import PausingPlayer, PlantedTimes, ReleaseWatch
from fakevllm.demo.run_state import DemoSettings
from fakevllm.demo.tasks import all_tasks, held_out_rows, training_tasks
from fakevllm.errors import UserError
from fakevllm.release.arm_gains import GroupOutcome
from fakevllm.release.arms import Arm
from fakevllm.runtime.local_engines import EngineChoice
from fakevllm_adapters.protocol.releases import Decision, ReleaseRecord, ReleasesReply
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_server.types.planted_steps import VARIABLE, planted_versions

FAKE = EngineChoice.resolve("fake")
PLANTED = PlantedSteps(40)
BEGAN_AT = 1000.0


def settings(folder: Path, steps: int = 60) -> DemoSettings:
    return DemoSettings(steps, 0, "none", folder, None, FAKE)


def record(
    number: int, decision: Decision, version: int, time_s: float, **evidence: object
) -> ReleaseRecord:
    return ReleaseRecord(
        number=number,
        id=f"gate-{number}",
        decision=decision,
        version=version,
        parent=0,
        time_s=time_s,
        decided_by="gate",
        evidence=dict(evidence),
    )


def history(*records: ReleaseRecord, released: int, rejected: list[int]) -> ReleasesReply:
    return ReleasesReply(
        records=list(records), released=released, candidate=None, rejected=rejected, is_held=False
    )


GOOD = (
    record(1, Decision.CANDIDATE, 20, 900.0),
    record(2, Decision.RELEASED, 20, 950.0, difference=0.2, low=0.1, high=0.3, pairs=50),
    record(3, Decision.CANDIDATE, 45, 1010.0),
    record(
        4, Decision.REJECTED, 45, 1050.0, difference=-0.4, low=-0.6, high=-0.2, restored=20, pairs=9
    ),
)
WENT_BACK = history(*GOOD, released=20, rejected=[45, 46])


def sessions(released_since: float = 0.9) -> list[GroupOutcome]:
    """Return sessions of all arms, one per second, before and since the planted steps."""
    arms = itertools.cycle((Arm.RELEASED, Arm.TRAINING, Arm.BASELINE))
    groups: list[GroupOutcome] = []
    for second in range(900, 1100):
        arm = next(arms)
        mean = {Arm.RELEASED: 0.9, Arm.TRAINING: 0.8, Arm.BASELINE: 0.5}[arm]
        if arm is Arm.RELEASED and second >= BEGAN_AT:
            mean = released_since
        mean += 0.01 * (second % 2)
        groups.append(GroupOutcome(f"s{second}", arm, float(second), mean, 1.0, 0.0, 1.0))
    return groups


def outcome(
    released_since: float = 0.9, probe: float = 0.9, shown: ReleasesReply = WENT_BACK
) -> GatedOutcome:
    return gated_outcome(
        shown, sessions(released_since), probe, PLANTED, PlantedTimes(BEGAN_AT, 1060.0)
    )


def failed(result: GatedOutcome) -> list[str]:
    assert result.planted is not None
    return [claim for claim, holds in result.planted.claims.items() if not holds]


def test_no_trained_sum_is_held_out() -> None:
    rows = [json.loads(line) for line in held_out_rows().splitlines()]
    held_out = HeldOutRows([Task(task_id="", main_query=row["question"]) for row in rows])
    assert not held_out.short
    assert held_out.overlapping(training_tasks()) == []
    assert len(rows) + len(training_tasks()) == len(all_tasks())
    assert {row["question"]: row["sum"] for row in rows} == {
        task.main_query: task.metadata["sum"] for task in held_out.overlapping(all_tasks())
    }


def test_the_proxy_accepts_the_settings_of_the_gate(tmp_path: Path) -> None:
    config = Config.model_validate({"release": release_section(tmp_path)})
    assert config.release.is_gated
    assert config.release.baseline_share > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planted": PLANTED}, "--plant-bad-step tests the release gate: add --gated"),
        ({"is_gated": True, "planted": PlantedSteps(61)}, "after the last step: choose a step up"),
        ({"is_gated": True, "planted": PLANTED, "control": "frozen"}, "does not go with --control"),
        ({"is_gated": True, "engines": EngineChoice.resolve("vllm")}, "is for the embedded engine"),
    ],
)
def test_settings_that_do_not_go_together_get_one_line(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_demo(replace(settings(tmp_path), **change))


def test_lockstep_and_gated_get_one_line(tmp_path: Path) -> None:
    embedded = DemoSettings(2, 0, "none", tmp_path, None, lockstep=True, is_gated=True)
    with pytest.raises(UserError, match="--gated does not go with --lockstep"):
        run_demo(embedded)


def test_a_gated_run_cannot_be_resumed_without_the_gate(tmp_path: Path) -> None:
    (tmp_path / "fakevllm.toml").write_text(
        '[release]\nmode = "gated"\neval_dataset = "held_out.jsonl"\n'
    )
    with pytest.raises(UserError, match="is a run with --control none --gated: resume it"):
        run_demo(settings(tmp_path))


def test_the_server_plants_the_steps_that_the_demo_names() -> None:
    versions = planted_versions(PLANTED.environment[VARIABLE])
    assert list(versions) == list(range(PLANTED.begins_at, PLANTED.ends_at))


def test_a_run_that_went_back_meets_all_claims() -> None:
    result = outcome()
    assert failed(result) == []
    planted = result.planted
    assert planted is not None
    assert (planted.rejected, planted.restored) == (45, 20)
    assert planted.sessions_until_return == 50
    assert result.policy_gain is not None and result.choice_gain is not None
    assert result.policy_gain.mean == pytest.approx(0.3, abs=0.01)
    assert result.choice_gain.mean == pytest.approx(0.2, abs=0.01)


def test_each_claim_can_fail() -> None:
    assert failed(outcome(released_since=0.7)) == ["the released arm's answers did not fall"]
    assert failed(outcome(probe=0.8)) == ["the released version's probe is at least 0.85"]
    never = history(*GOOD[:3], released=20, rejected=[])
    assert failed(outcome(shown=never)) == ["training went back"]
    bad = record(5, Decision.RELEASED, 47, 1055.0)
    kept = history(*GOOD, bad, released=47, rejected=[45])
    assert failed(outcome(shown=kept)) == ["no version after 5 to 10 planted steps was released"]


def test_the_change_of_the_released_arm_needs_sessions_on_both_sides() -> None:
    groups = sessions()
    assert arm_change(groups, 0.0) is None
    change = arm_change(groups, BEGAN_AT)
    assert change is not None and change.low < change.difference < change.high


def test_sessions_long_after_the_return_do_not_hide_a_fall() -> None:
    fallen = sessions(released_since=0.5)
    late = [
        GroupOutcome(f"late{second}", Arm.RELEASED, float(second), 0.95, 1.0, 0.0, 1.0)
        for second in range(1100, 3100)
    ]
    whole = arm_change([*fallen, *late], BEGAN_AT)
    near = arm_change([*fallen, *late], BEGAN_AT, returned_at=1090.0)

    assert whole is not None and whole.difference > 0
    assert near is not None and near.num_since == 30 + NUM_COMPARED
    assert near.difference < whole.difference


def test_the_watch_names_each_verdict_once_and_the_planted_steps() -> None:
    watch = ReleaseWatch(PLANTED)
    assert watch.history_read(history(released=0, rejected=[])) == []
    lines = watch.history_read(WENT_BACK)
    assert lines == [
        "version 20 is released: +0.200 (+0.100 to +0.300)",
        "version 45 is rejected, training goes back to version 20: -0.400 (-0.600 to -0.200)",
    ]
    assert watch.history_read(WENT_BACK) == []
    assert watch.line() == "version 20 answers the app"
    assert watch.version_seen(38, 1.0) == []
    assert watch.version_seen(39, 2.0) == ["step 40: rewards train with the opposite sign now"]
    assert watch.version_seen(48, 3.0) == []
    assert watch.version_seen(49, 4.0) == ["rewards train with the right sign again"]
    assert watch.times == PlantedTimes(2.0, 4.0)


class Recorder:
    """A Player that records the questions."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    async def play(self, task: Task, key: str) -> str:
        self.questions.append(task.main_query)
        return key


async def test_questions_wait_while_a_version_is_evaluated() -> None:
    watch, recorder = ReleaseWatch(), Recorder()
    player = PausingPlayer(recorder, watch.no_candidate)
    evaluating = history(*GOOD[:1], released=0, rejected=[]).model_copy(update={"candidate": 20})
    watch.history_read(evaluating)
    assert watch.line() == "version 0 answers the app, version 20 is evaluated"
    waiting = asyncio.create_task(player.play(Task(main_query="What is 1 plus 1?"), "key"))
    await asyncio.sleep(0)
    assert recorder.questions == []
    watch.history_read(history(*GOOD[:2], released=20, rejected=[]))
    assert await waiting == "key"
    assert recorder.questions == ["What is 1 plus 1?"]


def test_an_evaluation_is_due_some_versions_after_the_latest_verdict() -> None:
    watch = ReleaseWatch()
    assert watch.is_due(0, 5)  # the history is unknown
    watch.history_read(WENT_BACK)
    assert not watch.is_due(50, 5)
    assert watch.is_due(51, 5)


def test_the_report_shows_gains_releases_and_claims() -> None:
    console = Console(file=io.StringIO(), width=100)
    show_gated(console, outcome(released_since=0.7))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "90.0% right after training" in text
    assert "gain of the policy" in text and "gain of choosing" in text
    assert "-0.400 (-0.600 to -0.200)" in text and "candidate" not in text
    assert "training went back to version" in text
    assert "the released arm's answers did not fall: NO" in text
    assert "training went back: yes" in text
