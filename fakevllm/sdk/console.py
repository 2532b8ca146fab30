"""Console output of a client: its log lines, and a table of the batch that is being collected."""

from __future__ import annotations

import logging
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fakevllm_adapters.protocol.batch_status import PoolInformation

MAX_TASKS = 20


def log_to_stderr() -> None:
    """Print the client's log lines to stderr, unless the script has set up logging itself."""
    logger = logging.getLogger("fakevllm.sdk")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s fakevllm: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)


def print_pool(pool: PoolInformation, console: Console | None = None) -> None:
    """Print the progress of the batch that is being collected, and the batch's MAX_TASKS newest
    tasks with their mean rewards."""
    console = console or Console()
    state = (pool.engine_status or "not known").removeprefix("ENGINE.")
    console.print(
        f"step {pool.global_step or '-'} · {state} · "
        f"tasks {pool.completed_tasks}/{pool.completed_task_target} · "
        f"episodes {pool.completed_episodes}/{pool.completed_episode_target} · "
        f"{len(pool.running_episode_details or {})} running"
    )
    if pool.completed_tasks_rewards:
        console.print(_task_table(pool))


def _task_table(pool: PoolInformation) -> Table:
    table = Table("task", "episodes", "mean reward")
    for task_id, rewards in list(pool.completed_tasks_rewards.items())[-MAX_TASKS:]:
        mean = f"{fmean(rewards):.3g}" if rewards else "-"
        table.add_row(Text(task_id), f"{len(rewards)}/{pool.task_expected_num_repeat}", mean)
    return table
