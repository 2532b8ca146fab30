"""A training step that stopped before it had trained all of its groups.

A step with several mini-batches makes an update for each of them. If the loss or the gradient of an
update is not finite, the step makes no further update. The groups of the mini-batches whose turn
did not come are not trained, although other groups of the step are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fakevllm_adapters.protocol.swarm import TrainedGroup
from fakevllm_server.backends.training.mini_batches import mini_batches
from fakevllm_server.backends.training.step_updates import UPDATES_MADE
from fakevllm_server.run.trained_token_share import without_calls
from fakevllm_server.training.step_plan import PlannedStep
from fakevllm_server.types.backend import Batch, StepMetrics
from fakevllm_server.types.calls import FinishedGroup


def untrained_groups(
    batch: Batch, num_mini_batches: int, metrics: Mapping[str, float]
) -> frozenset[str]:
    """Return the ids of the groups that a step has not trained, because it stopped before their
    first update. `metrics` are those that the trainer has returned for the batch. The metric
    `skipped` is above 0 only if the step has stopped. A step that made no update at all counts in
    another way."""
    if not (metrics.get("skipped") and metrics.get(UPDATES_MADE)):
        return frozenset()
    # The trainer divides the batch with the same function.
    left = mini_batches(batch, num_mini_batches)[int(metrics[UPDATES_MADE]) :]
    return frozenset(
        one.group_id for part in left for one in (*part.batch.calls, *part.batch.demonstrations)
    )


def without_groups(
    plan: PlannedStep,
    coverage: StepMetrics,
    untrained: frozenset[str],
    groups: Sequence[FinishedGroup],
) -> tuple[PlannedStep, StepMetrics]:
    """Return the plan and the coverage metrics of a step of `groups` that has not trained the
    groups `untrained`. These groups keep their place in the step, without siblings in the loss."""
    trained = [
        TrainedGroup(group_id=one.group_id, siblings=[]) if one.group_id in untrained else one
        for one in plan.trained
    ]
    lost = [call for call in plan.calls if call.group_id in untrained]
    return replace(plan, trained=trained), without_calls(coverage, lost, groups)
