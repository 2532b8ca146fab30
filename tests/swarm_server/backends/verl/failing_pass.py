"""A reference pass that fails in the middle, with one rank, in this process, with the demo model.

    python -m swarm_server.backends.verl.failing_pass LAYER

Prints a JSON list: the weights that training changed before the pass, whether the pass raised its
error, the largest change of the next pass's log-probabilities, and the weights that the pass
changed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from swarm_server.backends.verl.reference import on_policy_calls
from torch import Tensor

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.verl.forest_split import WorkerRows
from fakevllm_server.backends.verl.step_rows import StepRows
from fakevllm_server.backends.verl.tensordict_batch import make_tensordict
from fakevllm_server.backends.verl.worker import PolicyWorker
from fakevllm_server.backends.verl.worker_config import worker_config
from fakevllm_server.backends.verl.worker_loss import direct_inputs, worker_loss
from fakevllm_server.types.backend import Call, LossSpec


def main(layer: str) -> None:
    worker = PolicyWorker(worker_config(DEMO_MODEL_DIR, is_cpu=True, seed=0))
    worker.reset()
    worker.keep_reference()
    worker.set_loss_fn(worker_loss)
    calls = on_policy_calls()
    first = weights_of(worker)
    spec = LossSpec()
    step = StepRows.of(calls, [], spec, split_of, None)
    inputs = direct_inputs(step.tokens)
    worker.forward_backward(make_tensordict(step.split, 10_000, spec=spec, loss_inputs=inputs))
    worker.optimizer_step({"lr": 1e-2, "weight_decay": 0.0})
    trained, log_probs = weights_of(worker), log_probs_of(worker, calls)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("raised by the test")

    engine: Any = worker.engine
    hook = engine.module.get_submodule(layer).register_forward_pre_hook(fail)
    has_failed = False
    try:
        worker.reference_log_probs(make_tensordict(split_of(calls), 10_000))
    except torch.OutOfMemoryError:
        has_failed = True
    hook.remove()
    # Before weights_of, which frees what a failed pass has gathered.
    change = (log_probs_of(worker, calls) - log_probs).abs().max().item()
    after = weights_of(worker)
    print(json.dumps([changed(first, trained), has_failed, change, changed(trained, after)]))


def split_of(calls: Sequence[Call]) -> WorkerRows:
    return WorkerRows.of(calls, 1, 10_000, ROWS)


def log_probs_of(worker: PolicyWorker, calls: list[Call]) -> Tensor:
    rows = make_tensordict(split_of(calls), 10_000)
    return worker.infer_batch(rows)["log_probs"].values()


def weights_of(worker: PolicyWorker) -> dict[str, Tensor]:
    engine: Any = worker.engine
    return {
        name: weights.full_tensor().clone() for name, weights in engine.module.state_dict().items()
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


if __name__ == "__main__":
    main(sys.argv[1])
