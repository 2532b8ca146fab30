"""The batch that is being collected, for a terminal."""

from __future__ import annotations

from statistics import fmean

from rich.console import Console
from rich.table import Table

from fakevllm_adapters.protocol.pool import PoolInformation

MOST_TASKS = 20


def show_pool(pool: PoolInformation, console: Console | None = None) -> None:
    """Progress, and the newest tasks with their rewards."""
    console = console or Console()
    state = (pool.engine_status or "not known").removeprefix("ENGINE.")
    console.print(
        f"step {pool.global_step or '-'} · {state} · "
        f"tasks {pool.completed_tasks}/{pool.completed_task_target} · "
        f"episodes {pool.completed_episodes}/{pool.completed_episode_target} · "
        f"{len(pool.running_episode_details or {})} running"
    )
    if pool.completed_tasks_rewards:
        console.print(_tasks(pool))


def _tasks(pool: PoolInformation) -> Table:
    table = Table("task", "episodes", "mean reward")
    for task_id, rewards in list(pool.completed_tasks_rewards.items())[-MOST_TASKS:]:
        told = f"{fmean(rewards):.3g}" if rewards else "-"
        table.add_row(task_id, f"{len(rewards)}/{pool.task_expected_num_repeat}", told)
    return table
