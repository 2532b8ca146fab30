"""A batch of calls in the format of verl's workers: a TensorDict with one unpadded row per call."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode

from fakevllm_server.backends.verl.batch_split import num_tokens
from fakevllm_server.backends.verl.forest_split import ForestLayout, WorkerRows
from fakevllm_server.backends.verl.row_layout import spread_responses
from fakevllm_server.types.backend import Call, LossSpec

FOREST_ATTENTION = "forest_attention"
"""Setting of a batch with a forest layout: the name of the attention method."""
FOREST_ROOT = "forest_root"
"""[rows] Root key of each row. Only rows with equal root keys share tokens."""
NUM_PROMPT_TOKENS = "num_prompt_tokens"
"""[rows] Number of prompt tokens of each row."""


def make_tensordict(
    split: WorkerRows,
    max_tokens: int,
    *,
    with_entropy: bool = False,
    spec: LossSpec | None = None,
    loss_inputs: Mapping[str, Tensor] | None = None,
) -> TensorDict:
    """Return a batch of calls as a TensorDict for verl's workers, with one call per row.

    `max_tokens` is the maximum number of tokens of a micro-batch. If a row is longer, the length of
    the longest row is the maximum instead. The maximum does not count if the rows share prefixes,
    because `split` then has the micro-batches. If `with_entropy` is true, the workers return the
    entropy at each token in addition to the log-probability.

    `spec` and `loss_inputs` are what `worker_loss` reads. `loss_inputs` has flat tensors with a
    value for each response token of all rows. Without them, the batch is only for
    log-probabilities.
    """
    rows = split.rows
    assert all(row.allowed is None for row in rows), "verl's rows cannot hold allowed token sets"
    tensors: dict[str, Any] = {
        "input_ids": _jagged(rows, lambda row: [*row.prompt_ids, *row.response_ids]),
        "position_ids": _jagged(rows, lambda row: range(num_tokens(row))),
        "temperature": torch.tensor([row.temperature for row in rows]),
        # verl sums the mask before each pass. Only verl's own losses use the sum.
        "loss_mask": torch.ones(len(rows)),
    }
    for name, values in (loss_inputs or {}).items():
        tensors[name] = spread_responses(rows, values)
    settings: dict[str, Any] = {
        "max_token_len_per_gpu": max(max_tokens, *map(num_tokens, rows)),
        "use_dynamic_bsz": True,
        "calculate_entropy": with_entropy,
        "compute_loss": False,  # in a pass without gradients
        "pad_mode": DatasetPadMode.NO_PADDING,
    }
    if spec is not None:
        settings["loss_spec"] = spec
    data = tensordict_utils.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)
    if split.forest is not None:
        _set_forest_layout(data, rows, split.forest)
    return data


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


def _jagged(rows: Sequence[Call], ids: Callable[[Call], Sequence[int]]) -> Tensor:
    return torch.nested.as_nested_tensor(
        [torch.tensor(list(ids(row)), dtype=torch.long) for row in rows], layout=torch.jagged
    )
