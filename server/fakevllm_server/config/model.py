"""The settings of the server, which are checked when ServerConfig is created."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fakevllm_adapters.http.access_guard import LOOPBACK, is_loopback
from fakevllm_adapters.http.media_urls import is_host_name
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.keys import KeyRing
from fakevllm_runtime.errors import ConfigError as ConfigError
from fakevllm_runtime.key_file import follow_key_file
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.engine_registry import PAIRS, ROLLOUTS, TRAINERS
from fakevllm_server.backends.process.weight_transports import FOLDER, WEIGHT_TRANSPORTS
from fakevllm_server.backends.verl.trainer_arguments import arguments_for_job
from fakevllm_server.backends.vllm.command import REFUSED, job_arguments, parse_flags
from fakevllm_server.config.cluster_check import check_engines
from fakevllm_server.config.job_model import choose_model
from fakevllm_server.config.replicas_check import check_replicas
from fakevllm_server.config.sample_tables import SampleTableSettings
from fakevllm_server.config.weight_transport_check import check_transport
from fakevllm_server.placement.cluster_section import ClusterSection

DEFAULT_PORT = 10086
MAX_PORT = 65535
DEFAULT_TRACKERS = ("tensorboard",)

log = logging.getLogger("fakevllm.server.config")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of one server. The constructor raises ConfigError for invalid settings and invalid
    combinations of settings."""

    backend: str
    """Name of a pair of engines. The pair is a rollout engine and a trainer."""
    run_dir: Path
    rollout: str | None = None
    """Name of the rollout engine. None means the rollout engine of `backend`."""
    trainer: str | None = None
    """Name of the trainer. None means the trainer of `backend`."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = DEFAULT_PORT
    model: str | None = None
    """Model folder, or `demo` for the shipped model. Without `models_dir`, this model overrides the
    job's model. With `models_dir`, this model is used for jobs that name no model."""
    models_dir: Path | None = None
    """Folder with the models that a job may name. If this is None and `model` is set, every job
    gets the model `model`."""
    served_model_name: str | None = None
    """Name of the model for apps. None means the name of the model folder."""
    key_file: Path | None = None
    """File with one API key per line. Without a key file, every client on this machine is
    served."""
    allowed_hosts: Sequence[str] = ()
    """Additional names that the `Host` header of a request may have."""
    allow_hub: bool = False
    """Whether a model may be loaded by name from the Hugging Face hub."""
    allow_train_code: bool = False
    """Whether the server keeps training code that clients upload. The code is never run."""
    keep_latest_call: bool = False
    """Whether the server keeps the latest call for `/replay_latest_llm_call`."""
    media_domains: Sequence[str] = ()
    """Hosts from which vLLM may fetch the images, audio and video that a request names by URL."""
    seed: int = 0
    engine_args: Sequence[str] = ()
    """Additional command-line arguments for the rollout engine."""
    trainer_args: Sequence[str] = ()
    """Additional command-line arguments for a trainer with a process of its own."""
    rollout_url: str | None = None
    """URL of a vLLM that the user runs. The server then starts no rollout engine."""
    more_rollout_urls: Sequence[str] = ()
    """URLs of further vLLMs that the user runs. All of them are replicas of one fleet."""
    replicas: int = 1
    """Number of rollout engines that the server starts. `num_replicas` also counts other
    settings."""
    rollout_key: str | None = field(default=None, repr=False)
    """API key for the vLLM at `rollout_url`."""
    cluster: ClusterSection | None = None
    """How the GPUs are divided. None leaves the division to vLLM and the trainer."""
    weights_dir: Path | None = None
    """Folder in which the trainer writes the weights for the rollout engine. None means a folder in
    memory."""
    weight_transport: str = FOLDER
    """Name of the way in which new weights get from the trainer to the rollout engine."""
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    """What the server redacts, and how long calls are kept, in addition to what its job says."""
    trackers: Sequence[str] = DEFAULT_TRACKERS
    """Names of the trackers to which the curves of training are written."""
    samples: SampleTableSettings = field(default_factory=SampleTableSettings)
    """The tables of sampled answers in these trackers."""
    keys: KeyRing = field(default_factory=KeyRing)
    """The API keys that may call the server."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"--port must be 0 to {MAX_PORT}, got {self.port}.")
        _check_name("--backend", self.backend, PAIRS)
        _check_name("--rollout", self.rollout or self.rollout_name, ROLLOUTS)
        _check_name("--trainer", self.trainer or self.trainer_name, TRAINERS)
        names = {self.rollout_name, self.trainer_name}
        if "fake" in names and len(names) > 1:
            raise ConfigError(
                "The fake engine's tokens are not those of other engines: use it as --rollout and "
                "as --trainer, or not at all."
            )
        self._refuse_unused_settings()
        _check_name("--weight-transport", self.weight_transport, WEIGHT_TRANSPORTS)
        if self.weight_transport != FOLDER:
            check_transport(self)
        _check_media_domains(self.media_domains)
        for url in self.rollout_urls:
            check_url("--rollout-url", url)
        check_replicas(self)
        if self.rollout_url is None and self.rollout_name == "vllm":
            self._refuse_vllm_arguments()
        if self.cluster is not None:
            check_engines(self, self.cluster)
        if not is_loopback(self.host) and not self.keys:
            raise ConfigError(
                f"--host {self.host} is reachable from outside: add --key-file FILE with one API "
                "key per line, created with `fakevllm keys add NAME --key-file FILE`."
            )
        if self.model is not None:
            find_model(self.model, self.allow_hub)
        if self.models_dir is not None and not self.models_dir.is_dir():
            raise ConfigError(
                f"--models-dir {self.models_dir} does not exist: give it a folder with models."
            )

    def _refuse_vllm_arguments(self) -> None:
        for flag in parse_flags(self.engine_args):
            if flag in REFUSED:
                raise ConfigError(f"--engine-arg=--{flag}: {REFUSED[flag]}.")

    def _refuse_unused_settings(self) -> None:
        """Raise ConfigError for flags that have no effect on this server, such as `--engine-arg`
        with `--rollout-url`.

        A user who sets such a flag usually expects other engines than the server would run. If the
        server ignored the flag, the user would not notice the mistake.
        """
        is_one_process = self.rollout_name == self.trainer_name and self.num_replicas == 1
        unused = {
            "--rollout-url is for --rollout vllm: add this, or leave the URL out": (
                self.rollout_url and self.rollout_name != "vllm"
            ),
            "--models-dir is for an engine that this server starts, and the vLLM at --rollout-url "
            "has its model already: leave the folder out": self.models_dir and self.rollout_url,
            "--rollout-key-file is for --rollout-url: add the URL, or leave the key out": (
                self.rollout_key and not self.rollout_url
            ),
            "--engine-arg is for an engine that this server starts, not for --rollout-url": (
                self.engine_args and self.rollout_url
            ),
            "--media-domain is for --rollout vllm, because the other engines take only text: add "
            "this, or leave the domain out": self.media_domains and self.rollout_name != "vllm",
            "--trainer-arg is for a trainer in a process of its own; here one process samples and "
            "trains: give --engine-arg": self.trainer_args and is_one_process,
            "--weights-dir is for a trainer in a process of its own; here one process samples and "
            "trains: leave it out": self.weights_dir and is_one_process,
        }
        for message, is_unused in unused.items():
            if is_unused:
                raise ConfigError(f"{message}.")

    def engine_args_for(self, job: TrainJob) -> Sequence[str]:
        """Return the additional command-line arguments of the rollout engine for a job. The job's
        setting `lockstep` makes two runs with the same seed bit-identical. Only the embedded engine
        has an argument for it (`check_job`)."""
        return [*self.engine_args, "--lockstep"] if job.lockstep else self.engine_args

    def engine_settings_for(self, job: TrainJob) -> dict[str, str]:
        """Return the arguments of vLLM that a job and the section `cluster` set, by name. The
        section overrides the job."""
        if self.rollout_name != "vllm":
            return {}
        arguments = job_arguments(job)
        if self.cluster is not None:
            arguments["tensor-parallel-size"] = str(self.cluster.tensor_parallel)
            if self.cluster.data_parallel > 1:
                arguments["data-parallel-size"] = str(self.cluster.data_parallel)
        return arguments

    def trainer_args_for(self, job: TrainJob) -> Sequence[str]:
        """Return the additional command-line arguments of the trainer for a job. With a section
        `cluster`, the verl trainer starts one worker for each GPU that trains.

        The workers of the verl trainer build their models before they know the job. Therefore the
        trainer gets the job's settings of the model as arguments. The user's arguments override
        them.
        """
        if self.trainer_name != "verl":
            return [*self.trainer_args]
        workers = [] if self.cluster is None else self.cluster.trainer_arguments()
        return [*workers, *arguments_for_job(job), *self.trainer_args]

    @property
    def rollout_name(self) -> str:
        """Name of the rollout engine that this server uses."""
        return self.rollout or PAIRS[self.backend][0]

    @property
    def trainer_name(self) -> str:
        """Name of the trainer that this server uses."""
        return self.trainer or PAIRS[self.backend][1]

    @property
    def rollout_urls(self) -> Sequence[str]:
        """URLs of all vLLMs that the user runs; empty if the server starts the rollout engines."""
        return () if self.rollout_url is None else (self.rollout_url, *self.more_rollout_urls)

    @property
    def num_replicas(self) -> int:
        """Number of rollout engines that sample with the same weights."""
        placed = 1 if self.cluster is None else self.cluster.replicas
        return len(self.rollout_urls) or max(self.replicas, placed)

    @property
    def local_engines(self) -> tuple[str, ...]:
        """Names of the engines that run as processes of this server, without duplicates. A vLLM at
        `rollout_url` is not included."""
        rollout = () if self.rollout_url is not None else (self.rollout_name,)
        return tuple(dict.fromkeys((*rollout, self.trainer_name)))

    def model_for(self, job: TrainJob) -> str | None:
        """Return the folder or name of the model that the engine loads for a job.

        The fake engine ignores the job's model, because it loads no model. Raises ConfigError if
        the job may not use the model that it names.
        """
        job_model = None if self.trainer_name == "fake" else job.model
        return choose_model(job_model, self.model, self.models_dir, has_keys=bool(self.keys))

    def served_name_of(self, model: str | None) -> str:
        """Return the model name that apps must send in requests if the engine loads `model`."""
        return self.served_model_name or (
            Path(model).resolve().name if model else self.rollout_name
        )

    @property
    def hosts(self) -> frozenset[str]:
        """The host names that the server accepts in the `Host` header of a request."""
        return LOOPBACK | {name.lower() for name in (self.host, *self.allowed_hosts)}


def _check_name(flag: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}, got {name!r}.")


def _check_media_domains(hosts: Sequence[str]) -> None:
    for host in hosts:
        if not is_host_name(host):
            raise ConfigError(
                f"--media-domain takes a host name such as images.example.com, got {host!r}."
            )


def check_url(flag: str, url: str) -> None:
    """Raise ConfigError unless `url` is http://HOST:PORT or https://HOST:PORT, optionally with
    /v1."""
    try:
        parts = urlsplit(url)
        is_good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and "@" not in parts.netloc
            and parts.port != 0
            and parts.path.rstrip("/") in ("", "/v1")
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"{flag} must be http://HOST:PORT, without user, path or query.")


def find_model(model: str, allow_hub: bool) -> str:
    """Return the folder or hub name from which the engine loads a model.

    `model` is `demo` or a folder. If `allow_hub` is true, `model` may also be a name on the Hugging
    Face hub. Raises ConfigError for any other value, and for a folder without a model.
    """
    if model == "demo":
        return str(DEMO_MODEL_DIR)
    if Path(model).is_dir():
        _check_folder(Path(model))
        return model
    if allow_hub:
        return model
    raise ConfigError(
        f"The model folder {model!r} does not exist. "
        "Name a local folder with --model (`model` in a file), or add --allow-hub "
        "(`allow-hub = true`) to load the model from the hub."
    )


def _check_folder(model: Path) -> None:
    """Raise ConfigError if the folder `model` contains no model.

    Without this check, the user would see the error only after the engine was started.
    """
    for pattern in ("config.json", "*.safetensors"):
        if not any(model.glob(pattern)):
            raise ConfigError(
                f"{model} has no {pattern}: give --model a folder in Hugging Face format."
            )


def read_keys(key_file: Path | None, clock: Callable[[], float] = time.monotonic) -> KeyRing:
    """Return the API keys in a key file. The returned KeyRing reloads the keys when the file
    changes. Without a key file, the KeyRing is empty.

    Raises ConfigError if the file cannot be read or has no valid key.
    """
    if key_file is None:
        return KeyRing()
    ring = follow_key_file(key_file, log, clock)
    if ring.num_valid == 0:
        raise ConfigError(
            f"The key file {key_file} has no valid key: "
            f"create one with `fakevllm keys add NAME --key-file {key_file}`."
        )
    return ring


def read_key(key_file: Path | None) -> str | None:
    """Return the API key in a file that contains exactly one key. Return None if `key_file` is None
    or the file is empty.

    The server sends this key to the vLLM at `--rollout-url`.
    """
    if key_file is None:
        return None
    try:
        return key_file.read_text().strip() or None
    except OSError as error:
        raise ConfigError(f"The key file {key_file} cannot be read: {error.strerror}.") from None
