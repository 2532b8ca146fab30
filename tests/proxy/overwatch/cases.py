"""Replies of a server, and the snapshots that are built from them."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console

from fakevllm.overwatch.history import History
from fakevllm.overwatch.render import render_snapshot
from fakevllm.overwatch.snapshot import Notice, Snapshot, away_snapshot, build_snapshot
from fakevllm_adapters.protocol.batch_status import PoolInformation
from fakevllm_adapters.protocol.swarm import EngineStatusReply, LogEntry

URL = "http://gpu-box:10086"
NOW = 1_000_000.0
STEP: dict[str, float] = {
    "groups": 4.0,
    "reward_mean": 0.3125,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "loss": -0.012,
    "grad_norm": 1.75,
    "mismatch_k3": 0.00021,
    "ess": 0.998,
    "token_fidelity": 1.0,
    "rho": 2.4,
    "drift_rate": 0.25,
    "branch_rate": 0.125,
    "tokens_trained": 53.0,
    "tokens_sampled": 690.0,
    "sample_coverage": 0.768,
    "step_seconds": 2.0,
    "train_tool_calls": 1.5,
}


def status(state: str = "ROLLING", **changes: Any) -> EngineStatusReply:
    fields: dict[str, Any] = {
        "engine_status": f"ENGINE.{state}",
        "global_step": 13,
        "run_id": "c9143c58c970e212",
        "weight_version": 12,
        "model": "my_model",
        "totals": {"branch_first": 96.0, "branch_extends": 80.0, "branch_retokenized": 14.0},
        "dropped": {"stale": 3},
        "waiting": {"finished_groups": 2, "open_groups": 0, "tokens": 2600},
    }
    return EngineStatusReply.model_validate(fields | changes)


def running_details(task: str, idle_s: float, client: str = "f383a582b2af9eea") -> dict[str, str]:
    return {
        "episode_status": "claimed",
        "time_since_last_activity": f"{idle_s:.1f}s",
        "discard_episode_timeout": "240.0s",
        "llm_call_count": "3",
        "client_uuid": client,
        "optional_task_id": task,
    }


def pool(**changes: Any) -> PoolInformation:
    fields: dict[str, Any] = {
        "sample_collection_method": "rollout_until_finish_enough_tasks",
        "completed_episodes": 10,
        "completed_episode_target": 16,
        "completed_tasks": 2,
        "completed_task_target": 4,
        "completed_non_dummy_tasks": 1,
        "task_expected_num_repeat": 4,
        "completed_tasks_details": {"sum-1": ["a"] * 4, "sum-2": ["b"] * 4, "sum-3": ["c"] * 2},
        "completed_tasks_rewards": {
            "sum-1": [1.0, 0.0, 0.0, 1.0],
            "sum-2": [1.0] * 4,
            "sum-3": [0.5, 0.25],
        },
        "running_episode_details": {
            "11112222aaaa": running_details("sum-3", 4.0),
            "33334444bbbb": running_details("sum-4", 200.0, "0badc0de"),
        },
        "swarm_client_instruction": {
            "active_clients": [
                {
                    "client_uuid": "f383a582b2af9eea",
                    "last_activity_at": NOW - 4,
                    "allowed_sync_weight": True,
                }
            ]
        },
    }
    return PoolInformation.model_validate(fields | changes)


def log_entry(seq: int, kind: str = "step", **fields: Any) -> LogEntry:
    return LogEntry.model_validate({"seq": seq, "kind": kind, "step": seq} | fields)


def step_entries(rewards: list[float]) -> list[LogEntry]:
    return [
        log_entry(number, version=number, metrics=STEP | {"reward_mean": reward})
        for number, reward in enumerate(rewards, 1)
    ]


def evaluation_entry(seq: int, step: int, reward: float) -> LogEntry:
    return log_entry(seq, "evaluated", step=step, version=step, metrics={"reward": reward}, at=NOW)


def snapshot(
    status_reply: EngineStatusReply | None = None,
    pool_reply: PoolInformation | None = None,
    log: list[LogEntry] | None = None,
    notices: tuple[Notice, ...] = (),
) -> Snapshot:
    history = History().for_run("c9143c58c970e212").with_entries(log or [])
    return build_snapshot(
        URL, NOW, status_reply or status(), pool_reply or pool(), history, notices
    )


def snapshot_at_work() -> Snapshot:
    log = [
        *step_entries([0.1, 0.15, 0.12, 0.3, 0.28, 0.4, 0.55, 0.5, 0.62, 0.8, 0.78, 0.9]),
        log_entry(
            13, "dropped", step=12, reasons={"a": "stale: 4 steps", "b": "stale", "c": "shut"}
        ),
        *(
            evaluation_entry(14 + place, step, reward)
            for place, (step, reward) in enumerate(
                [(0, 0.0), (0, 0.25), (5, 0.5), (5, 0.25), (10, 1.0), (10, 0.5)]
            )
        ),
    ]
    return snapshot(log=log, notices=(Notice(NOW - 3, "math", "half of my tasks are done"),))


EMPTY = PoolInformation(task_expected_num_repeat=4, completed_task_target=4)
CASES: dict[str, Snapshot] = {
    "at_work": snapshot_at_work(),
    "never_seen": away_snapshot(URL, NOW, f"No swarm server answers at {URL} (refused)", None),
    "gone": away_snapshot(
        URL, NOW + 90, f"No swarm server answers at {URL} (refused)", snapshot_at_work()
    ),
    "offline": snapshot(
        status("OFFLINE", engine_status_detail="the trainer refuses the job"), EMPTY
    ),
    "booting_for_long": snapshot(
        status("BOOTING"), EMPTY.model_copy(update={"booting_start_time": NOW - 900})
    ),
    "finished": snapshot(status(closed="training_finished"), EMPTY),
    "paused": snapshot(status(claims_paused=True), EMPTY),
    "a_hundred_running": snapshot(
        pool_reply=pool(
            running_episode_details={
                f"{number:08d}": running_details(f"task-{number % 25}", float(number))
                for number in range(100)
            }
        )
    ),
    "no_numbers": snapshot(
        log=[
            *step_entries([0.5, math.nan, 0.75]),
            log_entry(
                4, metrics=STEP | {"reward_mean": math.nan, "loss": math.inf, "skipped": 1.0}
            ),
            log_entry(5, "stopped", step=4, reason="mismatch is too large"),
        ]
    ),
}
WIDTHS = {"at_work": (30, 80, 130), "a_hundred_running": (50, 80)}


def rendered_text(shown: Snapshot, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_snapshot(shown, width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
