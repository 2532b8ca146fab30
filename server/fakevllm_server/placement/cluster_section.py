"""The section `cluster` of the server's settings: how many GPUs there are, and which of them sample
and train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.verl.worker_placement import place_workers
from fakevllm_server.placement.memory_parts import GIB
from fakevllm_server.types.backend import BackendRefused

MAX_GPU_MEMORY_GIB = 4096
COLOCATIONS = ("none", "shared", "sleep")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable that lists the GPUs which a process may use."""


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """The section `cluster`. The constructor raises ConfigError for a division that the GPUs do not
    allow.

    The rollout engine gets the first GPUs, in the order in which the machine counts them. The
    training workers get the following GPUs or, with `colocate`, the first ones too.
    """

    gpus_per_node: int
    """Number of GPUs of each machine that the server may use."""
    training_gpus: int
    """Number of GPUs that train. verl starts one worker on each of them."""
    nodes: int = 1
    """Number of machines. The server and the rollout engine run on the first machine."""
    ray_address: str | None = None
    """Address of the Ray cluster of these machines, as `host:port`. Only for several machines."""
    min_training_gpus: int | None = None
    """Smallest number of GPUs with which training goes on after a machine was lost. By default,
    training stops with fewer than `training_gpus` GPUs, until the server is started again."""
    tensor_parallel: int = 1
    """Number of GPUs among which vLLM divides each layer."""
    data_parallel: int = 1
    """Number of copies of the model in one vLLM. Each copy has `tensor_parallel` GPUs."""
    replicas: int = 1
    """Number of rollout engines with the same weights. Each has `tensor_parallel` x
    `data_parallel` GPUs."""
    colocate: str = "none"
    """Whether the same GPUs sample and train. `none`: each GPU does one of them. `shared`: both are
    in memory at the same time. `sleep`: vLLM frees its memory during each training step."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU in GiB. If it is set, the server checks that the model fits."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.name != "gpu_memory_gib" and value < 1:
                raise ConfigError(f"cluster.{field.name} must be 1 or more, got {value}.")
        memory = self.gpu_memory_gib
        if memory is not None and not 0 < memory <= MAX_GPU_MEMORY_GIB:
            raise ConfigError(
                f"cluster.gpu_memory_gib must be above 0 and at most {MAX_GPU_MEMORY_GIB}, got "
                f"{memory:g}: write the memory of one GPU in GiB."
            )
        if self.colocate not in COLOCATIONS:
            raise ConfigError(
                f"cluster.colocate must be one of {', '.join(COLOCATIONS)}, got {self.colocate!r}."
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        if self.tensor_parallel > self.gpus_per_node:
            raise ConfigError(
                f"cluster.tensor_parallel is {self.tensor_parallel}, and a node has "
                f"{self.gpus_per_node} GPUs: vLLM divides a layer within one node, so lower it."
            )
        if (self.min_training_gpus or 1) > self.training_gpus:
            raise ConfigError(
                f"cluster.min_training_gpus is {self.min_training_gpus}, and training_gpus is "
                f"{self.training_gpus}: lower it."
            )
        wanted = self.num_used_gpus
        if wanted > self.num_gpus:
            raise ConfigError(
                f"cluster needs {wanted} GPUs ({self.division}), and "
                f"{self.nodes} x {self.gpus_per_node} = {self.num_gpus} exist: lower "
                "training_gpus, tensor_parallel, data_parallel or replicas."
            )
        try:
            place_workers(self._free_gpus_per_node(), self.training_gpus)
        except BackendRefused as refused:
            raise ConfigError(
                f"cluster.training_gpus cannot be placed beside the rollout engine: {refused}."
            ) from None

    def _free_gpus_per_node(self) -> list[int]:
        """Return the number of GPUs of each node that may train."""
        num_taken = 0 if self.is_colocated else self.rollout_gpus
        firsts = range(0, self.num_gpus, self.gpus_per_node)
        return [
            min(max(first + self.gpus_per_node - num_taken, 0), self.gpus_per_node)
            for first in firsts
        ]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the server may use."""
        return self.nodes * self.gpus_per_node

    @property
    def rollout_gpus(self) -> int:
        """Number of GPUs of all rollout replicas."""
        return self.replica_gpus * self.replicas

    @property
    def replica_gpus(self) -> int:
        """Number of GPUs of each rollout replica."""
        return self.tensor_parallel * self.data_parallel

    @property
    def num_used_gpus(self) -> int:
        """Number of GPUs that sample or train."""
        if self.is_colocated:
            return max(self.rollout_gpus, self.training_gpus)
        return self.rollout_gpus + self.training_gpus

    @property
    def is_colocated(self) -> bool:
        return self.colocate != "none"

    @property
    def shares_gpu(self) -> bool:
        """Whether the rollout engine uses a single GPU, on which also a worker trains."""
        return self.is_colocated and self.rollout_gpus == 1

    @property
    def num_free_local_gpus(self) -> int:
        """Number of GPUs of the first machine on which training workers may be placed."""
        return self._free_gpus_per_node()[0]

    @property
    def division(self) -> str:
        """The numbers of GPUs as text."""
        joint = "to train on the same GPUs" if self.is_colocated else "to train"
        factors = f"{self.tensor_parallel} x {self.data_parallel} x {self.replicas}"
        return f"{factors} = {self.rollout_gpus} to sample, {self.training_gpus} {joint}"

    @property
    def rollout_range(self) -> range:
        """Numbers of the GPUs of all rollout replicas."""
        return range(self.rollout_gpus)

    def replica_range(self, number: int) -> range:
        """Return the numbers of the GPUs of a rollout replica. GPUs are counted from 0 through all
        nodes, and replicas from 0."""
        return range(number * self.replica_gpus, (number + 1) * self.replica_gpus)

    @property
    def training_range(self) -> range:
        """Numbers of the GPUs that train."""
        first = 0 if self.is_colocated else self.rollout_gpus
        return range(first, first + self.training_gpus)

    @property
    def gpu_memory_bytes(self) -> int | None:
        return None if self.gpu_memory_gib is None else int(self.gpu_memory_gib * GIB)

    def check_startable(self, environ: Mapping[str, str]) -> None:
        """Raise ConfigError if this version of the server cannot start the engines as the section
        says. `environ` are the environment variables of the server."""
        if self.nodes > 1 and self.rollout_gpus > self.gpus_per_node:
            raise ConfigError(
                f"{self.rollout_gpus} GPUs of the rollout engine on {self.nodes} nodes are "
                "calculated by `fakevllm-server plan`, but this version does not start them: use "
                "at most the GPUs of one node."
            )
        self._check_ray(environ)
        listed = _listed_gpus(environ)
        # On several machines, Ray decides which GPUs train.
        needed = self.num_used_gpus if self.nodes == 1 else self.rollout_gpus
        if listed is not None and len(listed) < needed:
            raise ConfigError(
                f"{VISIBLE_GPUS} lists {len(listed)} GPUs, and cluster needs {needed} "
                f"({self.division}): list more GPUs, or change the division."
            )

    def _check_ray(self, environ: Mapping[str, str]) -> None:
        if environ.get("RAY_ADDRESS"):
            raise ConfigError(
                "RAY_ADDRESS is set, and workers in that cluster may land on the GPUs of the "
                "rollout engine: unset it, or remove the section cluster."
            )
        if self.nodes > 1 and self.ray_address is None:
            raise ConfigError(
                f"cluster.nodes = {self.nodes} needs a Ray cluster of these machines: start it "
                "with `ray start`, and set cluster.ray_address to its address."
            )
        if self.nodes == 1 and self.ray_address is not None:
            raise ConfigError(
                "cluster.ray_address is for several machines, and cluster.nodes is 1: remove it, "
                "or raise nodes."
            )

    def trainer_arguments(self) -> list[str]:
        """Return the arguments with which the verl trainer starts the workers of the section."""
        arguments = [f"--num-workers={self.training_gpus}"]
        if self.min_training_gpus is not None:
            arguments.append(f"--min-workers={self.min_training_gpus}")
        if self.ray_address is not None:
            arguments.append(f"--ray-address={self.ray_address}")
            arguments.append(f"--max-local-gpus={self.num_free_local_gpus}")
        return arguments

    def visible_training_gpus(self, environ: Mapping[str, str]) -> str | None:
        """Return the value of CUDA_VISIBLE_DEVICES for the trainer, or None to leave the server's
        value. On several machines, each machine's Ray decides which GPUs its workers use."""
        return self.visible_gpus(self.training_range, environ) if self.nodes == 1 else None

    def visible_gpus(self, gpus: range, environ: Mapping[str, str]) -> str:
        """Return the value of CUDA_VISIBLE_DEVICES for a process that uses the GPUs with the
        numbers `gpus`. If the server's own environment lists GPUs, the numbers are places in that
        list.

        >>> section = ClusterSection(gpus_per_node=4, training_gpus=3)
        >>> section.visible_gpus(section.training_range, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
        '5,6,7'
        """
        listed = _listed_gpus(environ)
        return ",".join(str(gpu) if listed is None else listed[gpu] for gpu in gpus)


def _listed_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that the environment lists. Return None if the variable is not set, so that
    all GPUs are used. An empty variable lists no GPU."""
    text = environ.get(VISIBLE_GPUS)
    if text is None:
        return None
    return [part.strip() for part in text.split(",") if part.strip()]
