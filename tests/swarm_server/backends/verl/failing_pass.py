"""A reference pass that fails in the middle: one rank, in this process, with the demo model.

python -m backends.verl.failing_pass LAYER

Prints as JSON which weights training had changed before, how the pass ended, how far it moved what
the next pass says, and which weights it changed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from typing import Any

import torch
from swarm_server.backends.verl.reference import on_policy_calls
from torch import Tensor

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.verl.policy import Policy
from fakevllm_server.backends.verl.rows import as_tensordict
from fakevllm_server.backends.verl.settings import worker_config
from fakevllm_server.backends.verl.worker import PolicyWorker
from fakevllm_server.types.backend import Call, LossSpec


def main(layer: str) -> None:
    worker = PolicyWorker(worker_config(DEMO_MODEL_DIR, is_cpu=True, seed=0))
    worker.reset()
    worker.keep_reference()
    worker.set_loss_fn(Policy(LossSpec.of(TrainJob())).worker_loss())
    calls = on_policy_calls()
    first = weights_of(worker)
    worker.forward_backward(as_tensordict(calls, 10_000))
    worker.optimizer_step({"lr": 1e-2, "weight_decay": 0.0})
    trained, told = weights_of(worker), log_probs_of(worker, calls)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("of the test")

    engine: Any = worker.engine
    hook = engine.module.get_submodule(layer).register_forward_pre_hook(fail)
    ended = "as if nothing was wrong"
    try:
        worker.reference_log_probs(as_tensordict(calls, 10_000, is_trained=False))
    except torch.OutOfMemoryError:
        ended = "with its error"
    hook.remove()
    moved = (log_probs_of(worker, calls) - told).abs().max().item()  # first: a look at the weights
    after = weights_of(worker)  # lets go of what a pass has gathered
    print(json.dumps([changed(first, trained), ended, moved, changed(trained, after)]))


def log_probs_of(worker: PolicyWorker, calls: list[Call]) -> Tensor:
    rows = as_tensordict(calls, 10_000, is_trained=False)
    return worker.infer_batch(rows)["log_probs"].values()


def weights_of(worker: PolicyWorker) -> dict[str, Tensor]:
    engine: Any = worker.engine
    return {
        name: weights.full_tensor().clone() for name, weights in engine.module.state_dict().items()
    }


def changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


if __name__ == "__main__":
    main(sys.argv[1])
