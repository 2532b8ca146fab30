"""A run that is started again after its last step."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run


async def test_the_last_step_is_logged_as_the_last_also_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fakevllm.server")
    job = JOB.model_copy(update={"total_training_steps": 1})
    for num_starts in (1, 2):
        run = Run(tmp_path, LocalBackend(), job)
        if num_starts == 1:
            await run.finish_group("a")
            await run.trained("a")
        await run.rolling()
        messages = [line for line in caplog.messages if "was the last" in line]
        assert (
            messages
            == [
                "step 1 was the last (total_training_steps 1): calls are served, and "
                "nothing is trained any more"
            ]
            * num_starts
        )
        await run.stop()


async def test_groups_that_wait_after_the_last_step_are_dropped_at_the_next_start(
    tmp_path: Path,
) -> None:
    job = JOB.model_copy(update={"batch_size": 2})
    run = Run(tmp_path, LocalBackend(), job)
    for name in "abc":
        await run.finish_group(name)
    await run.trained("b")
    await (
        run.stop()
    )  # a crash after the last step, before the other groups are dropped, has the same effect
    again = Run(tmp_path, LocalBackend(), job.model_copy(update={"total_training_steps": 1}))
    await again.rolling()
    assert again.trained_groups == {"a": 1, "b": 1}
    await again.until(lambda: again.dropped_groups == {"c": "training_finished"})
    assert again.log.entries_after(0)[-1].reasons == {"c": "training_finished"}
    assert again.pool.num_finished == 0
    await again.stop()
