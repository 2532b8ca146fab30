"""Steps that stop before they have trained all of their mini-batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.backends.training.mini_batches import mini_batches
from fakevllm_server.backends.training.mismatch_limit import NO_UPDATE
from fakevllm_server.backends.training.step_updates import UPDATES_MADE
from fakevllm_server.types.backend import Batch, LossSpec, StepMetrics

TWO_MINI_BATCHES = JOB.model_copy(update={"batch_size": 2, "mini_batch_num": 2})


class StoppingBackend(LocalBackend):
    """A backend whose steps end after a given number of updates."""

    def __init__(self, num_updates: int, *, is_stopped: bool = True) -> None:
        super().__init__()
        self.outcome: StepMetrics = {UPDATES_MADE: float(num_updates)}
        if is_stopped:
            self.outcome |= {"loss": math.nan, "skipped": 1.0}
        self.first_groups: set[str] = set()
        """Ids of the groups in the first mini-batch of the latest step."""

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        first, *_ = mini_batches(batch, 2)
        self.first_groups = {call.group_id for call in first.batch.calls}
        metrics = await super().step(batch, loss)
        return metrics | self.outcome


async def one_step(run: Run[StoppingBackend]) -> LogEntry:
    """Train the groups a and b in one step, and return its entry in the run log."""
    await run.finish_group("a")
    await run.finish_group("b")
    await run.trained("a")
    (step,) = [entry for entry in run.log.entries_after(0) if entry.kind == "step"]
    await run.stop()
    return step


async def test_groups_whose_mini_batch_got_no_update_are_recorded_as_untrained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, StoppingBackend(num_updates=1), TWO_MINI_BATCHES)
    step = await one_step(run)

    trained = {group.group_id for group in step.groups if group.siblings}
    assert trained == run.backend.first_groups and len(trained) == 1
    assert {group.group_id for group in step.groups} == {"a", "b"}
    assert step.metrics["tokens_trained"] == step.metrics["untrained_tokens_not_finite"] == 4
    assert step.metrics["sample_coverage"] == 0.5
    assert "step 1 made not all of its updates" in caplog.text


async def test_groups_are_trained_by_a_step_that_stops_after_its_first_epoch(
    tmp_path: Path,
) -> None:
    job = TWO_MINI_BATCHES.model_copy(update={"ppo_epochs": 2})
    run = Run(tmp_path, StoppingBackend(num_updates=3), job)
    step = await one_step(run)

    assert [group.siblings for group in step.groups] == [[0, 1], [0, 1]]
    assert step.metrics["tokens_trained"] == 8
    assert "untrained_tokens_not_finite" not in step.metrics


async def test_a_step_without_any_update_counts_its_tokens_once(tmp_path: Path) -> None:
    backend = StoppingBackend(num_updates=0)
    backend.outcome |= NO_UPDATE
    step = await one_step(Run(tmp_path, backend, TWO_MINI_BATCHES))

    assert [group.siblings for group in step.groups] == [[], []]
    assert step.metrics["tokens_trained"] == 0
    assert step.metrics["untrained_tokens_not_finite"] == 8


async def test_a_step_with_all_of_its_updates_trains_all_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch with one group less than `mini_batch_num` makes one update less, too."""
    caplog.set_level("INFO", logger="fakevllm.server")
    job = TWO_MINI_BATCHES.model_copy(update={"mini_batch_num": 3})
    run = Run(tmp_path, StoppingBackend(num_updates=2, is_stopped=False), job)
    step = await one_step(run)

    assert [group.siblings for group in step.groups] == [[0, 1], [0, 1]]
    assert step.metrics[UPDATES_MADE] == 2 and step.metrics["tokens_trained"] == 8
    assert "2 updates" in caplog.text and "not all of its updates" not in caplog.text


async def test_a_step_that_was_not_stopped_trains_all_groups_however_few_updates_it_makes(
    tmp_path: Path,
) -> None:
    """A trainer may make one update for a whole batch, whatever `mini_batch_num` is."""
    run = Run(tmp_path, StoppingBackend(num_updates=1, is_stopped=False), TWO_MINI_BATCHES)
    step = await one_step(run)

    assert [group.siblings for group in step.groups] == [[0, 1], [0, 1]]
    assert step.metrics["tokens_trained"] == 8
    assert "untrained_tokens_not_finite" not in step.metrics
