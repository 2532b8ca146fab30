"""The loss function that verl's workers call for each micro-batch.

There are two ways to train a step. The trainer chooses one, and sends the inputs of this way along
with the rows:

    direct      The worker computes its part of the step's loss with `step_loss`. This works if the
                loss of each row depends on no other row. It needs one forward and backward pass.
    two passes  The loss couples several rows. The trainer gets all log-probabilities l_t and
                entropies H_t from a first pass, and computes c_t = ∂loss/∂l_t and e_t = ∂loss/∂H_t
                from them. In the second pass, the worker computes Σ c_t · l_t + Σ e_t · H_t. This
                is not the loss, but it has the gradient of the loss.

The trainer computes the loss that it reports itself, from the workers' log-probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_losses.step_loss import step_loss
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens
from fakevllm_server.types.backend import LossSpec

TENSORS_OF_TOKENS = ("sampled_log_prob", "advantages", "scale", "token_share", "units")
"""Names of the fields of TrainedTokens that are inputs of the direct way."""
LOG_PROBS_OF_OTHER_POLICIES = ("old_log_prob", "reference_log_prob")
"""Names of the fields of TrainedTokens that are inputs of the direct way if the loss needs them."""
COEFFICIENT = "coefficient"
ENTROPY_COEFFICIENT = "entropy_coefficient"
"""Names of the inputs of the second pass: c_t, and e_t if the loss has an entropy bonus."""


def direct_inputs(tokens: TrainedTokens) -> dict[str, Tensor]:
    """Return the inputs of `worker_loss` for the direct way, with a value for each token."""
    inputs = {name: getattr(tokens, name) for name in TENSORS_OF_TOKENS}
    others = {name: getattr(tokens, name) for name in LOG_PROBS_OF_OTHER_POLICIES}
    return inputs | {name: values for name, values in others.items() if values is not None}


def worker_loss(
    model_output: Any, data: Any, dp_group: object = None
) -> tuple[Tensor, dict[str, object]]:
    """Return a scalar whose gradient is this micro-batch's part of the gradient of the step's loss.

    `model_output` has the log-probability of each token, and the entropy if the batch asks for it.
    `data` has the micro-batch. All are jagged tensors [rows, tokens] in the same layout. verl
    averages the gradients of its workers, but the parts must add up. Therefore the scalar is
    multiplied by the number of workers.
    """
    log_prob = model_output["log_probs"].values()
    entropy = model_output["entropy"].values() if "entropy" in model_output else None
    inputs: dict[str, Any] = {
        name: data[name].values()
        for name in (
            *(*TENSORS_OF_TOKENS, *LOG_PROBS_OF_OTHER_POLICIES),
            *(COEFFICIENT, ENTROPY_COEFFICIENT),
        )
        if name in data.keys()  # noqa: SIM118 - TensorDict has no `in` of its own
    }
    if COEFFICIENT in inputs:
        # A prompt's token may have an infinite log-probability. Then this sum is NaN, but its
        # gradient is right, and nobody reads the sum.
        loss = (inputs[COEFFICIENT] * log_prob).sum()
        if ENTROPY_COEFFICIENT in inputs:
            assert entropy is not None, "the second pass needs the entropy"
            loss = loss + (inputs[ENTROPY_COEFFICIENT] * entropy).sum()
    else:
        loss = _part_of_step_loss(log_prob, entropy, inputs, data["loss_spec"])
    return loss * data["dp_size"], {}


def _part_of_step_loss(
    log_prob: Tensor, entropy: Tensor | None, inputs: dict[str, Any], spec: LossSpec
) -> Tensor:
    """Return the micro-batch's part of the step's loss. All tensors have the shape [tokens], with
    the tokens of prompts, whose scale is 0."""
    tokens = TrainedTokens(**inputs, has_whole_units=True, has_whole_step=True)
    counted = tokens.counted
    tokens = tokens.only(counted)
    # The step's units have numbers that are too large for a micro-batch.
    units = torch.unique(tokens.units, return_inverse=True)[1]
    bonus = None if entropy is None else entropy[counted]
    return step_loss(log_prob[counted], replace(tokens, units=units), spec, bonus).loss
