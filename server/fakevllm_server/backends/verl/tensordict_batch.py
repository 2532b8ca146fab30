"""A batch of calls in the format of verl's workers: a TensorDict with one unpadded row per call."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode

from fakevllm_server.backends.verl.batch_split import PADDING, num_tokens, total_weight
from fakevllm_server.backends.verl.forest_split import ForestLayout, WorkerRows
from fakevllm_server.types.backend import Call

FOREST_ATTENTION = "forest_attention"
"""Setting of a batch with a forest layout: the name of the attention method."""
FOREST_ROOT = "forest_root"
"""[rows] Root key of each row. Only rows with equal root keys share tokens."""
NUM_PROMPT_TOKENS = "num_prompt_tokens"
"""[rows] Number of prompt tokens of each row."""


def make_tensordict(
    split: WorkerRows,
    max_tokens: int,
    reference: Sequence[Tensor] | None = None,
    *,
    is_trained: bool = True,
) -> TensorDict:
    """Return a batch of calls as a TensorDict for verl's workers, with one call per row.

    With this batch, verl computes its loss as a weighted mean over response tokens. The weight of a
    token is the loss weight of its call. verl multiplies the loss of each token by
    `rollout_is_weights`, and divides the sum by the sum of `loss_mask` over all workers. Therefore
    `rollout_is_weights` and `loss_mask` both contain the loss weights.

    `max_tokens` is the maximum number of tokens of a micro-batch. If a row is longer, the length of
    the longest row is the maximum instead. The maximum does not count if the rows share prefixes,
    because `split` then has the micro-batches. `reference` has the reference policy's
    log-probabilities, one tensor [response tokens] for each row. If `is_trained` is false, the
    workers compute only log-probabilities.
    """
    rows = split.rows
    assert all(row.allowed is None for row in rows), "verl's rows cannot hold allowed token sets"
    tensors: dict[str, Any] = {
        "input_ids": _jagged(rows, lambda row: [*row.prompt_ids, *row.response_ids]),
        "position_ids": _jagged(rows, lambda row: range(num_tokens(row))),
        "prompts": _jagged(rows, lambda row: row.prompt_ids),
        "responses": _jagged(rows, lambda row: row.response_ids),
        "old_log_probs": _jagged(rows, lambda row: row.logprobs, torch.float32),
        "advantages": _jagged(rows, lambda row: row.advantages, torch.float32),
        "response_mask": _jagged(
            rows, _repeat(lambda row: float(row is not PADDING)), torch.float32
        ),
        "loss_mask": _jagged(rows, _repeat(lambda row: row.weight), torch.float32),
        "rollout_is_weights": _jagged(rows, _repeat(lambda row: row.weight), torch.float32),
        "temperature": torch.tensor([row.temperature for row in rows]),
    }
    if reference is not None:
        tensors["ref_log_prob"] = torch.nested.as_nested_tensor(
            list(reference), layout=torch.jagged
        )
    settings: dict[str, Any] = {
        "global_batch_size": len(rows),
        "batch_num_tokens": total_weight(rows),
        "max_token_len_per_gpu": max(max_tokens, *map(num_tokens, rows)),
        "use_dynamic_bsz": True,
        "calculate_entropy": is_trained,
        "compute_loss": is_trained,
        "pad_mode": DatasetPadMode.NO_PADDING,
    }
    data = tensordict_utils.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)
    if split.forest is not None:
        _set_forest_layout(data, rows, split.forest)
    return data


def select_responses(rows: Sequence[Call], per_token: Tensor) -> list[Tensor]:
    """Return the part of a worker's output that belongs to response tokens, as one tensor [response
    tokens] for each row.

    `per_token` is a jagged tensor, [rows, tokens]. In a row, the value for token i + 1 is at
    position i, where the model predicts this token.
    """
    return [
        values[len(row.prompt_ids) - 1 : num_tokens(row) - 1].float()
        for row, values in zip(rows, per_token.unbind(), strict=True)
    ]


def _set_forest_layout(data: TensorDict, rows: Sequence[Call], layout: ForestLayout) -> None:
    """Make the workers compute the rows of the batch `data` with shared prefixes."""
    data[FOREST_ROOT] = torch.tensor(list(layout.roots))
    data[NUM_PROMPT_TOKENS] = torch.tensor([len(row.prompt_ids) for row in rows])
    tensordict_utils.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=layout.rows_per_piece,
        **{FOREST_ATTENTION: layout.attention},
    )


def _repeat(value: Callable[[Call], float]) -> Callable[[Call], Sequence[float]]:
    """Return a function that repeats `value(row)` once for each response token of the row."""
    return lambda row: [value(row)] * len(row.response_ids)


def _jagged(
    rows: Sequence[Call],
    values: Callable[[Call], Sequence[float]],
    dtype: torch.dtype = torch.long,
) -> Tensor:
    return torch.nested.as_nested_tensor(
        [torch.tensor(list(values(row)), dtype=dtype) for row in rows], layout=torch.jagged
    )
