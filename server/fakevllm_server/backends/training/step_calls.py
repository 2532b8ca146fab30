"""The calls that a training step runs through the model: the sampled calls, and the demonstrations
as calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fakevllm_server.algorithms.loss_sequences import CallShare, LossCall, call_shares
from fakevllm_server.algorithms.mismatched_pairs import mismatched_pairs
from fakevllm_server.types.backend import Batch, Call, LossSpec, StepMetrics
from fakevllm_server.types.demonstrations import Demonstration


def step_demonstrations(batch: Batch, spec: LossSpec) -> list[Demonstration]:
    """Return the demonstrations of a batch. For `kto`, its mismatched pairs are added."""
    demonstrations = list(batch.demonstrations)
    if spec.of_demonstrations == "kto":
        demonstrations += mismatched_pairs(demonstrations)
    return demonstrations


def demonstration_calls(demonstrations: Sequence[Demonstration]) -> list[Call]:
    """Return the demonstrations as calls. These calls go through the model together with the
    sampled calls. They have the weight 0, because they do not count in the policy loss."""
    return [
        Call(
            group_id=one.group_id,
            prompt_ids=one.prompt_ids,
            response_ids=one.response_ids,
            logprobs=[0.0] * len(one.response_ids),
            version=0,
            temperature=1.0,
            advantage=0.0,
            weight=0.0,
            unit=one.group_id if one.pair is None else one.pair,
        )
        for one in demonstrations
    ]


def unit_of(call: Call) -> Hashable:
    """Return a key of the call's unit (the calls that the loss treats as one sequence). A call
    without a unit forms a unit of its own."""
    return id(call) if call.unit is None else call.unit


def shares_of(calls: Sequence[Call], spec: LossSpec) -> list[CallShare]:
    """Return the unit and the weights in the loss of each call of a step."""
    counted = [LossCall(unit_of(call), call.weight, call.num_trained) for call in calls]
    return call_shares(counted, spec)


def size_metrics(batch: Batch, spec: LossSpec) -> StepMetrics:
    """Return the metrics `tokens`, `demonstrations` and `demonstration_tokens` of a step. The
    latter two are left out if the job has no demonstration loss."""
    metrics = {"tokens": float(sum(call.num_trained for call in batch.calls))}
    if spec.of_demonstrations is not None:
        lengths = [len(one.response_ids) for one in batch.demonstrations]
        metrics["demonstrations"] = float(len(lengths))
        metrics["demonstration_tokens"] = float(sum(lengths))
    return metrics
