"""One worker of the verl trainer that trains the same batches as rows and with shared prefixes.

    python -m swarm_server.backends.verl.forest_pass MODEL_FOLDER MAX_LOGITS

The environment variables RANK and WORLD_SIZE say which worker this is. Worker 0 prints a JSON list
with a dict for each batch: the relative differences between the two ways, and the number of
micro-batches with shared prefixes.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.utils.tensordict_utils import chunk_tensordict

from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.verl import forest_engine
from fakevllm_server.backends.verl.batch_split import PADDING, num_tokens
from fakevllm_server.backends.verl.forest_split import WorkerRows
from fakevllm_server.backends.verl.tensordict_batch import make_tensordict
from fakevllm_server.backends.verl.worker import PolicyWorker
from fakevllm_server.backends.verl.worker_config import worker_config
from fakevllm_server.types.backend import Call

MAX_TOKENS = 80
LEARNING_RATE = 1e-4


def batches() -> dict[str, list[Call]]:
    """Return batches of calls that share prefixes, by name."""
    rng = random.Random(0)

    def ids(number: int) -> list[int]:
        return [rng.randrange(7, 300) for _ in range(number)]

    def call(prompt: list[int], response: list[int], temperature: float = 1.0) -> Call:
        weight = rng.choice([0.5, 1.0, 2.0])
        return Call("g", prompt, response, [0.0] * len(response), 0, temperature, 1.0, weight)

    siblings = [
        call(prompt, ids(rng.randrange(1, 12)), temperature)
        for prompt, count, temperature in ((ids(30), 7, 1.0), (ids(5), 2, 0.7), (ids(17), 4, 1.3))
        for _ in range(count)
    ]
    session, turns = ids(20), []
    for _ in range(5):
        answer = ids(6)
        turns += [call(session, answer), call(session, [*answer[:2], *ids(3)])]
        session = [*session, *answer, *ids(4)]
    twin = call(ids(12), ids(8))
    return {
        "siblings and turns": [*siblings, *turns],
        "a chain": turns[::2],
        # One piece, so that all other workers have only padding.
        "two equal calls": [twin, replace(twin, weight=0.25)],
    }


def loss(model_output: Any, data: Any, dp_group: object = None) -> tuple[Tensor, dict[str, object]]:
    """Return a loss that is not linear in the log-probability and the entropy of each token."""
    weights = data["token_weight"].values()
    log_probs, entropies = (model_output[name].values() for name in ("log_probs", "entropy"))
    per_token = torch.tanh(log_probs + 5) + 0.1 * entropies.square()
    counted = weights != 0
    return (weights * per_token)[counted].sum() * data["dp_size"] / 50, {}


class Comparison:
    def __init__(self, folder: str) -> None:
        self.worker = PolicyWorker(worker_config(Path(folder), is_cpu=True, seed=0))
        self.worker.reset()
        self.worker.set_loss_fn(loss)
        self.engine: Any = self.worker.engine
        self.start = [shard.clone() for shard in self.worker._shards()]
        fault = self.worker.sharing_fault("chains")
        assert fault is None, fault
        assert all(weight.grad is None for weight in self.engine.module.parameters())

    def differences(self, calls: list[Call]) -> dict[str, float]:
        as_rows, shared = self._train(calls, ROWS), self._train(calls, "chains")
        return {name: (difference(shared[name], as_rows[name])) for name in as_rows} | self._layout(
            calls
        )

    def _layout(self, calls: list[Call]) -> dict[str, float]:
        split = WorkerRows.of(calls, self.worker.world_size, MAX_TOKENS, "chains")
        assert split.forest is not None
        num_padding = sum(row is PADDING for row in split.rows)
        return {
            "pieces": len(split.rows) // split.forest.rows_per_piece,
            "padding": num_padding,
            "rho": split.metrics["rho"],
        }

    def _train(self, calls: list[Call], attention: str) -> dict[str, Tensor]:
        """Make one update from the starting weights. Return its results, with gradients and weights
        as one vector each."""
        with torch.no_grad():
            for shard, start in zip(self.worker._shards(), self.start, strict=True):
                shard.copy_(start)
        self.engine.optimizer.state.clear()
        self.worker.optimizer_zero_grad()
        num_workers = self.worker.world_size
        split = WorkerRows.of(calls, num_workers, MAX_TOKENS, attention)
        data = make_tensordict(split, MAX_TOKENS, with_entropy=True)
        data["token_weight"] = torch.nested.as_nested_tensor(
            [token_weights(row) for row in split.rows], layout=torch.jagged
        )
        part = chunk_tensordict(data, num_workers)[self.worker.rank]
        inferred = self._per_call(calls, split, self.worker.infer_batch(part.clone()))
        output = self.worker.forward_backward(part)
        gradient = flat([one.grad.full_tensor() for one in self.engine.module.parameters()])
        settings = {"lr": LEARNING_RATE, "weight_decay": 0.0}
        norm = self.worker.optimizer_step(settings)["grad_norm"]
        return {
            "loss": torch.tensor(output["metrics"]["loss"]),
            "log_probs": self._per_call(calls, split, output),
            "log_probs without gradient": inferred,
            "gradient": gradient,
            "gradient norm": torch.tensor(float(norm)),
            "weights": flat([one.full_tensor() for one in self.engine.module.parameters()]),
        }

    def _per_call(self, calls: list[Call], split: WorkerRows, output: Any) -> Tensor:
        """Gather the log-probabilities of all workers. Return those of the responses, in the order
        of `calls`."""
        of_workers: list[Any] = [None] * self.worker.world_size
        own = [values.tolist() for values in output["log_probs"].unbind()]
        torch.distributed.all_gather_object(of_workers, own)
        rows = [values for one in of_workers for values in one]
        of_call = {id(row): values for row, values in zip(split.rows, rows, strict=True)}
        return torch.tensor(
            [
                value
                for call in calls
                for value in of_call[id(call)][len(call.prompt_ids) - 1 : num_tokens(call) - 1]
            ]
        )


def token_weights(row: Call) -> Tensor:
    """Return the loss weights of a row at the positions of verl's log-probabilities."""
    weights = torch.zeros(num_tokens(row))
    weights[len(row.prompt_ids) - 1 : num_tokens(row) - 1] = row.weight
    return weights


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def difference(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def main(folder: str, max_logits: str) -> None:
    forest_engine.MAX_LOGITS = int(max_logits)
    comparison = Comparison(folder)
    results = {name: comparison.differences(calls) for name, calls in batches().items()}
    if comparison.worker.rank == 0:
        print(json.dumps(results))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
