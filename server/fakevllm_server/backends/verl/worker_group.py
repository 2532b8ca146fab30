"""Call a method on all workers of the trainer at once, and detect lost workers."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

import ray
import torch
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name

from fakevllm_server.backends.torch_forest.attention.registry import (
    first_without_fault,
    sharing_attentions,
)
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.backends.verl.cluster import LOOPBACK
from fakevllm_server.backends.verl.trainer_arguments import COLLECTIVE_TIMEOUT_S, send_timeout_s
from fakevllm_server.backends.verl.worker import PolicyWorker
from fakevllm_server.backends.verl.worker_loss import worker_loss
from fakevllm_server.backends.verl.worker_placement import first_worker
from fakevllm_server.types.backend import BackendError, PolicyName
from fakevllm_server.types.weight_transfer import TransferTarget

DEATH_NOTICE_TIMEOUT_S = 20.0
"""Maximum seconds from a failed call on one worker until Ray notices that another worker is dead. A
connection to a killed process breaks at once. If a machine is lost, Ray takes about 15 seconds to
notice it."""


class WorkersLost(Exception):
    """Error that is raised if a worker has died. The error is also raised if a method call has
    failed on one of several ranks. This rank is then out of step with the other ranks. All workers
    must be started again before training can continue."""


class WorkerGroup:
    """All workers of the trainer. Each method of this class calls a worker method on every rank.

    The method raises WorkersLost if a worker dies. If the call fails on one of several workers, the
    method raises WorkersLost too, because the ranks are then out of step. If the call fails on the
    only worker, the method raises BackendError.
    """

    def __init__(
        self,
        config: Any,
        workers_per_node: list[int],
        *,
        on_loopback: bool,
        lora: LoraSettings | None = None,
        lora_seed: int = 0,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        """Start the workers. `on_loopback` is True if all workers are on this machine. The workers
        then connect to each other through the loopback address. If `lora` is not None, the workers
        train LoRA adapters with these settings, whose initial values depend on `lora_seed`. A
        worker waits at most `collective_timeout_s` seconds for another one."""
        self.num_workers = sum(workers_per_node)
        self._num_nodes = len(workers_per_node)
        self._collective_timeout_s = collective_timeout_s
        self._sender: int | None = None
        """Number of the worker that sends weights to vLLM, or None before the first time."""
        pool = RayResourcePool(
            process_on_nodes=workers_per_node, use_gpu=True, max_colocate_count=1
        )
        self._group: Any = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(
                ray.remote(PolicyWorker),
                config=config,
                lora=lora,
                lora_seed=lora_seed,
                collective_timeout_s=collective_timeout_s,
            ),
            device_name=get_device_name(),
            **(_loopback_rendezvous() if on_loopback else {}),
        )
        self._nodes: list[str] = []
        """Address of each worker's node; empty if there is one node."""
        if self._num_nodes > 1:
            self._nodes = self._call_all("node_address")
        self._call_all("reset")
        self._call_all("set_loss_fn", worker_loss)

    def process_ids(self) -> list[int]:
        return self._call_all("process_id")

    def set_grad_clip(self, grad_clip: float) -> None:
        self._call_all("set_grad_clip", grad_clip)

    def best_sharing_attention(self) -> str:
        """Return the name of the fastest attention method that shares prefixes and that passes the
        check on all workers, or `rows` if there is no such method."""
        device = torch.device(get_device_name())
        return first_without_fault(sharing_attentions(device), self._sharing_fault)

    def _sharing_fault(self, attention: str) -> str | None:
        faults = self._call_all("sharing_fault", attention)
        return next((fault for fault in faults if fault is not None), None)

    def forward_backward(self, rows: Any) -> Any:
        """Run a forward and backward pass over a batch. The gradients are added to the gradients
        that the workers already have.

        Return verl's output. The output contains `log_probs`, and `entropy` if the batch asks for
        it, with the rows in the order of the batch.
        """
        result = self._group.forward_backward(rows)
        self._wait(result.futures)
        return result.get()

    def keep_reference(self) -> None:
        """Keep a copy of the current weights as the reference policy."""
        self._call_all("keep_reference")

    def infer(self, rows: Any, policy: PolicyName) -> Any:
        """Run a forward pass over a batch under `policy`, without a gradient. A row is one token
        sequence. Return the same output as `forward_backward`."""
        group = self._group
        method = group.reference_log_probs if policy == "reference" else group.infer_batch
        result = method(rows)
        self._wait(result.futures)
        return result.get()

    def optimizer_step(self, lr: float, weight_decay: float) -> float:
        """Update the weights. Return the norm of the gradient before clipping.

        If the norm is not finite, verl makes no update.
        """
        settings = {"lr": lr, "weight_decay": weight_decay}
        return self._call_all("optimizer_step", settings)[0]["grad_norm"]

    def drop_gradients(self) -> None:
        self._call_all("optimizer_zero_grad")

    def export_weights(self, folder: Path, dtype: torch.dtype) -> None:
        self._call_all("export_weights", folder, dtype, self._num_nodes > 1)

    def send_weights(self, target: TransferTarget, dtype: torch.dtype, folder: Path) -> str | None:
        """Send the weights to vLLM from the worker on the first GPU, with adapters merged. `folder`
        is the model folder. Return why sending failed, or None. The workers are in step then, too.
        """
        if self._sender is None:
            gpus = self._call_all("gpu")
            self._sender = first_worker(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        arguments = (target, dtype, folder, self._sender)
        futures = self._group.execute_all_async("send_weights", *arguments)
        return self._wait(futures, send_timeout_s(self._collective_timeout_s))[self._sender]

    def free_cache(self) -> None:
        """Give the memory that the workers keep for later back to their GPUs."""
        self._call_all("free_cache")

    def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        self._call_all("export_adapters", folder, policy)

    def save(self, folder: Path) -> None:
        self._call_all("save_state", folder)

    def restore(self, folder: Path) -> str | None:
        """Load a checkpoint. Return None, or why the checkpoint does not fit the model."""
        return self._call_all("restore_state", folder)[0]

    def _call_all(self, method: str, *arguments: object) -> list[Any]:
        return self._wait(self._group.execute_all_async(method, *arguments))

    def _wait(
        self, futures: Sequence[ray.ObjectRef], frozen_after_s: float | None = None
    ) -> list[Any]:
        """Wait for a call on all ranks, and return the results of all ranks. If the call fails on
        one rank, raise the error at once, because the other ranks would wait for this rank. If a
        rank does not return for `frozen_after_s` seconds although another one has, it is frozen,
        and counts as lost. The default is the limit for collective operations."""
        waiting, timeout_s = list(futures), None
        while waiting:
            done, waiting = ray.wait(waiting, timeout=timeout_s)
            if not done:
                raise WorkersLost(
                    f"{len(waiting)} of {self.num_workers} workers have not answered for "
                    f"{timeout_s:g} s"
                )
            failures = _failures(done)
            if failures:
                self._raise_failure(futures, failures, waiting)
            timeout_s = frozen_after_s or self._collective_timeout_s
        return ray.get(list(futures))

    def _raise_failure(
        self,
        futures: Sequence[ray.ObjectRef],
        failures: dict[ray.ObjectRef, RayError],
        waiting: Sequence[ray.ObjectRef],
    ) -> Never:
        """Raise the error for a call that failed on the ranks in `failures`, and that runs on those
        in `waiting`. `futures` has all ranks.

        A rank whose peer died often fails before Ray notices the death. Therefore wait for news
        about the other ranks, and report a death rather than its consequences.
        """
        is_failed_call = all(isinstance(error, RayTaskError) for error in failures.values())
        if waiting and is_failed_call:
            done, _ = ray.wait(
                list(waiting), num_returns=len(waiting), timeout=DEATH_NOTICE_TIMEOUT_S
            )
            failures |= _failures(done)
        for future, error in failures.items():
            if not isinstance(error, RayTaskError):
                raise WorkersLost(
                    f"a Ray worker of the verl trainer has died "
                    f"({self._worker_text(futures.index(future))}): {_describe(error)}"
                ) from error
        error = next(iter(failures.values()))
        if self.num_workers > 1:
            raise WorkersLost(
                f"one of {self.num_workers} workers failed: {_describe(error)}"
            ) from error
        raise BackendError(_describe(error)) from error

    def _worker_text(self, rank: int) -> str:
        """Return the number of a worker as text and, with several nodes, its node."""
        number = f"{rank + 1} of {self.num_workers}"
        return f"{number}, on Ray node {self._nodes[rank]}" if self._nodes else number


def _failures(done: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, RayError]:
    """Return the errors of those calls in `done` that failed."""
    failures: dict[ray.ObjectRef, RayError] = {}
    for future in done:
        # Translated by the caller.
        try:
            ray.get(future)
        except RayError as error:
            failures[future] = error
    return failures


def _describe(error: Exception) -> str:
    """Return the type of an error and the first line of its message. If an exception in the worker
    caused the error, describe that exception instead."""
    if isinstance(error, ActorUnavailableError):
        return "Ray cannot reach it"  # instead of the ids and codes of Ray's message
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"


def _loopback_rendezvous() -> dict[str, Any]:
    with socket.create_server((LOOPBACK, 0)) as free:
        return {"master_addr": LOOPBACK, "master_port": str(free.getsockname()[1])}
