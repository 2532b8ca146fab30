"""verl's FSDP engine with shared prefixes: tokens that calls share go through the model once.

Only the forward step differs from verl's engine. If a batch has a forest layout, a micro-batch is a
piece (a set of calls that go through the model together), and the model computes the forest of the
piece. The output has the same form as verl's: log-probabilities and entropies for each row. The
loss function does not know about the forest. A batch without a forest layout goes through verl's
own forward step.

verl selects this engine because the environment variable VERL_ENGINE_VENDOR is VENDOR. The function
`workers_environment` sets the variable.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree

from fakevllm_server.backends.embedded.train.forward_backward import MAX_LOGITS
from fakevllm_server.backends.torch_forest.attention.transformers_hook import (
    IMPLEMENTATION,
    causal_model,
)
from fakevllm_server.backends.torch_forest.attention_check import (
    CheckPasses,
    check_sharing_attention,
)
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.gathered_weights import enable_gathering
from fakevllm_server.backends.verl.forest_split import PADDING_ROOT
from fakevllm_server.backends.verl.tensordict_batch import (
    FOREST_ATTENTION,
    FOREST_ROOT,
    NUM_PROMPT_TOKENS,
)
from fakevllm_server.forest import CallTokens, build_forest

VENDOR = "fakevllm"
"""Name under which this engine is registered with verl."""


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp2"], device=["cuda", "npu"], vendor=VENDOR
)
class ForestEngine(FSDPEngineWithLMHead):
    module: Any
    _autocast_dtype: torch.dtype
    _rows_attention: str | None = None
    """Name of transformers' attention implementation with which verl computes rows; None as long as
    the model still has this implementation."""

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute a micro-batch. Return (loss, output), as verl's forward step does."""
        attention = tensordict_utils.get_non_tensor_data(micro_batch, FOREST_ATTENTION, None)
        if attention is None:
            self._use_rows_attention()
            return super().forward_step(micro_batch, loss_function, forward_only)
        rows = ForestRows.of(micro_batch, get_device_id())
        micro_batch = micro_batch.to(get_device_id())
        with_entropy = bool(
            tensordict_utils.get_non_tensor_data(micro_batch, "calculate_entropy", False)
        )
        with self._autocast():
            model_output = self._forest_output(rows, attention, with_entropy=with_entropy)
            if loss_function is None:
                loss, metrics = torch.tensor(1.0, device=get_device_name()), {}
            else:
                loss, metrics = loss_function(
                    model_output=model_output,
                    data=micro_batch,
                    dp_group=self.get_data_parallel_group(),
                )
        output = {
            # Without the gradient graph, which would stay in memory until the end of the batch.
            "model_output": detach_tree(model_output),
            "loss": loss.detach().item(),
            "metrics": metrics,
        }
        return loss, output

    def sharing_fault(self, attention: str) -> str | None:
        """Check an attention method that shares prefixes, on the model as it is trained. Return why
        the method must not be used, or None. All workers must call this method at the same time.
        The gradients of the model are dropped."""
        self._prepare_for_forest()
        with self.train_mode(zero_grad_on_exit=True), self._autocast():
            return check_sharing_attention(self.module, attention, ShardedPasses(self)).fault

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._autocast_dtype

    def _forest_output(
        self, rows: ForestRows, attention: str, *, with_entropy: bool
    ) -> dict[str, Tensor]:
        self._prepare_for_forest()
        values = edge_values(
            self.module,
            rows.plan,
            attention,
            with_entropy=with_entropy,
            max_logits=MAX_LOGITS,
        )
        output = {"log_probs": rows.per_row(values.log_prob)}
        if values.entropy is not None:
            output["entropy"] = rows.per_row(values.entropy)
        return output

    def _prepare_for_forest(self) -> None:
        enable_gathering(self.module)
        current: str = causal_model(self.module).config._attn_implementation
        if current != IMPLEMENTATION:
            self._rows_attention = current

    def _use_rows_attention(self) -> None:
        """Undo what a forest pass changed in the model. verl's rows may be packed, which only
        verl's own attention implementation supports."""
        if self._rows_attention is not None:
            causal_model(self.module).set_attn_implementation(self._rows_attention)
            self._rows_attention = None

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(get_device_name(), self._autocast_dtype)


@dataclass(frozen=True, slots=True)
class ForestRows:
    """The rows of a micro-batch, and the plan of the forest of these rows."""

    plan: Plan
    positions: Tensor
    """[trained tokens] Position of each trained token's log-probability among the tokens of all
    rows, in the order of `plan.flat`. The log-probability is at the preceding token's position."""
    offsets: Tensor
    """[rows + 1] Position of the first token of each row among the tokens of all rows."""

    @staticmethod
    def of(micro_batch: TensorDict, device: torch.device | str | int) -> ForestRows:
        """Build the forest of a micro-batch, with the tensors of the result on `device`. Padding
        rows are left out of the forest, unless there are no other rows."""
        rows = [row.tolist() for row in micro_batch["input_ids"].cpu().unbind()]
        roots = micro_batch[FOREST_ROOT].tolist()
        prompts = micro_batch[NUM_PROMPT_TOKENS].tolist()
        temperatures = micro_batch["temperature"].tolist()
        lengths = torch.tensor([len(row) for row in rows])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        chosen = [index for index, root in enumerate(roots) if root != PADDING_ROOT]
        chosen = chosen or [0]  # FSDP needs a pass of each worker.
        calls = [
            CallTokens(
                rows[index],
                [(prompts[index], len(rows[index]))],
                root=roots[index],
                temperature=temperatures[index],
            )
            for index in chosen
        ]
        positions = [
            torch.arange(prompts[index], len(rows[index])) + offsets[index] - 1 for index in chosen
        ]
        return ForestRows(
            Plan.of(build_forest(calls), device),
            torch.cat(positions).to(device),
            offsets.to(device),
        )

    def per_row(self, edge_values: Tensor) -> Tensor:
        """Convert values of shape [edges] to a jagged tensor [rows, tokens]. An edge is a predicted
        token that several rows may share. In a row, the value for token i + 1 is at position i.
        Tokens of prompts, and the tokens of padding rows, have the value 0."""
        flat = edge_values.new_zeros(int(self.offsets[-1]))
        flat = flat.index_copy(0, self.positions, self.plan.flat(edge_values))
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets)


class ShardedPasses(CheckPasses):
    """The passes of the attention check through a model whose weights FSDP2 divides among several
    workers. Each worker compares its own part of the gradients."""

    def __init__(self, engine: ForestEngine) -> None:
        self._engine = engine

    def compute_dtype(self, model: Any) -> torch.dtype:
        return self._engine.compute_dtype

    def logits(self, model: Any, ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits[0]

    def gradients(self, total: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        total.backward()
        gradients = [_part_of_this_worker(weight).clone() for weight in weights]
        self._engine.optimizer_zero_grad()
        return gradients


def _part_of_this_worker(weight: Tensor) -> Tensor:
    """Return this worker's part of the gradient of `weight`, which is 0 if there is none."""
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
