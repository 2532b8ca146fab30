"""All workers at once: each call goes to every rank, and none may be lost on the way."""

# pyright: reportMissingImports=false
from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name

from fakevllm_server.backends.verl.cluster import LOOPBACK
from fakevllm_server.backends.verl.worker import PolicyWorker
from fakevllm_server.types.backend import BackendError, PolicyName


class WorkersLost(Exception):
    """A worker has died, or its rank is out of step with the others: nothing mends that but a new
    start."""


class Workers:
    """Raises BackendError for what a worker could not do, WorkersLost where it is gone."""

    def __init__(self, config: Any, workers_per_node: list[int], *, on_loopback: bool) -> None:
        """`on_loopback`: all on this machine, so that they need not meet on its network."""
        self.num_workers = sum(workers_per_node)
        pool = RayResourcePool(
            process_on_nodes=workers_per_node, use_gpu=True, max_colocate_count=1
        )
        self._group: Any = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(PolicyWorker), config=config),
            device_name=get_device_name(),
            **(_loopback_meeting_point() if on_loopback else {}),
        )
        self._on_all("reset")

    def process_ids(self) -> list[int]:
        return self._on_all("process_id")

    def set_loss(self, loss: Callable[..., Any]) -> None:
        self._on_all("set_loss_fn", loss)

    def set_grad_clip(self, grad_clip: float) -> None:
        self._on_all("set_grad_clip", grad_clip)

    def forward_backward(self, rows: Any) -> tuple[float, Any]:
        """The batch's loss, and `log_probs` and `entropy` of every row in order. The workers hold
        the gradients."""
        answer = self._group.forward_backward(rows)
        self._all(answer.futures)
        told = answer.get()
        return float(told["metrics"]["loss"]), told

    def keep_reference(self) -> None:
        self._on_all("keep_reference")

    def log_probs(self, rows: Any, policy: PolicyName) -> Any:
        """Of every row in order, as `forward_backward` tells them, without a gradient."""
        group = self._group
        asked = group.reference_log_probs if policy == "reference" else group.infer_batch
        answer = asked(rows)
        self._all(answer.futures)
        return answer.get()["log_probs"]

    def optimizer_step(self, lr: float, weight_decay: float) -> float:
        """The gradient's norm before it was clipped. Where that is not finite, verl makes no
        update."""
        settings = {"lr": lr, "weight_decay": weight_decay}
        return self._on_all("optimizer_step", settings)[0]["grad_norm"]

    def drop_gradients(self) -> None:
        self._on_all("optimizer_zero_grad")

    def export_weights(self, folder: Path, dtype: torch.dtype) -> None:
        self._on_all("export_weights", folder, dtype)

    def save(self, folder: Path) -> None:
        self._on_all("save_checkpoint", str(folder))

    def load(self, folder: Path) -> None:
        self._on_all("load_checkpoint", str(folder))

    def _on_all(self, method: str, *arguments: object) -> list[Any]:
        return self._all(self._group.execute_all_async(method, *arguments))

    def _all(self, answers: Sequence[ray.ObjectRef]) -> list[Any]:
        """Looks at each as it comes: while one rank fails, the others wait for it for ever."""
        waiting = list(answers)
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
            return ray.get(list(answers))
        except RayTaskError as error:
            if self.num_workers > 1:
                raise WorkersLost(
                    f"one of {self.num_workers} workers failed: {_said(error)}"
                ) from error
            raise BackendError(_said(error)) from error
        except RayError as error:
            raise WorkersLost(
                f"a Ray worker of the verl trainer is gone: {_said(error)}"
            ) from error


def _said(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"


def _loopback_meeting_point() -> dict[str, Any]:
    with socket.create_server((LOOPBACK, 0)) as free:
        return {"master_addr": LOOPBACK, "master_port": str(free.getsockname()[1])}
