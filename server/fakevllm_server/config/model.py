"""The server's settings, checked when made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fakevllm_adapters.http.guard import LOOPBACK, is_loopback
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import KeyRing
from fakevllm_runtime.errors import ConfigError as ConfigError
from fakevllm_runtime.key_file import follow_key_file
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.engine_table import PAIRS, ROLLOUTS, TRAINERS
from fakevllm_server.backends.vllm.command import REFUSED, parse_flags

DEFAULT_PORT = 10086
MAX_PORT = 65535

log = logging.getLogger("fakevllm.server.config")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    backend: str
    """A pair of engines by name."""
    run_dir: Path
    rollout: str | None = None
    """Instead of the pair's."""
    trainer: str | None = None
    """Instead of the pair's."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    model: str | None = None
    """Model folder, or `demo` for the shipped one; wins over the job's."""
    served_model_name: str | None = None
    key_file: Path | None = None
    """API keys, one a line. Without it everybody on this machine is served."""
    allowed_hosts: Sequence[str] = ()
    allow_hub: bool = False
    allow_train_code: bool = False
    """Whether the server keeps training code that clients upload. The code is never run."""
    keep_latest_call: bool = False
    """Whether the server keeps the latest call for `/replay_latest_llm_call`."""
    seed: int = 0
    engine_args: Sequence[str] = ()
    """Passed to the rollout engine's process as they are."""
    trainer_args: Sequence[str] = ()
    """Passed to the trainer's process, where it has one of its own."""
    rollout_url: str | None = None
    """Of a vLLM that somebody else runs."""
    rollout_key: str | None = field(default=None, repr=False)
    weights_dir: Path | None = None
    """Through which trained weights reach the rollout engine; in memory where none is named."""
    keys: KeyRing = field(default_factory=KeyRing)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"--port must be 0 to {MAX_PORT}, got {self.port}.")
        _one_of("--backend", self.backend, PAIRS)
        _one_of("--rollout", self.rollout or self.rollout_name, ROLLOUTS)
        _one_of("--trainer", self.trainer or self.trainer_name, TRAINERS)
        names = {self.rollout_name, self.trainer_name}
        if "fake" in names and len(names) > 1:
            raise ConfigError("The fake engine has no tokens in common with any other: use both.")
        self._refuse_idle_settings()
        if self.rollout_url is not None:
            check_url("--rollout-url", self.rollout_url)
        elif self.rollout_name == "vllm":
            self._refuse_vllm_arguments()
        if not is_loopback(self.host) and not self.keys:
            raise ConfigError(
                f"--host {self.host} is reachable from outside: add --key-file FILE with one API "
                "key a line, made with `fakevllm keys add NAME --key-file FILE`."
            )
        if self.model is not None:
            find_model(self.model, self.allow_hub)

    def _refuse_vllm_arguments(self) -> None:
        for flag in parse_flags(self.engine_args):
            if flag in REFUSED:
                raise ConfigError(f"--engine-arg=--{flag}: {REFUSED[flag]}.")

    def _refuse_idle_settings(self) -> None:
        """A setting that would do nothing is a mistake about what runs."""
        is_one_process = self.rollout_name == self.trainer_name
        idle = {
            "--rollout-url is for --rollout vllm": self.rollout_url and self.rollout_name != "vllm",
            "--rollout-key-file is for --rollout-url": self.rollout_key and not self.rollout_url,
            "--engine-arg is for an engine started here, not for --rollout-url": (
                self.engine_args and self.rollout_url
            ),
            "--trainer-arg is for a trainer apart: give --engine-arg, for there is one process": (
                self.trainer_args and is_one_process
            ),
            "--weights-dir is for a trainer apart, and there is one process": (
                self.weights_dir and is_one_process
            ),
        }
        for told, is_idle in idle.items():
            if is_idle:
                raise ConfigError(f"{told}.")

    def engine_args_for(self, job: TrainJob) -> Sequence[str]:
        """Raises ConfigError for a job in lockstep where these engines do not keep to it."""
        if not job.lockstep:
            return self.engine_args
        if {self.rollout_name, self.trainer_name} != {"embedded"}:
            raise ConfigError(
                "lockstep is for the embedded engine, which decodes every answer alone: start the "
                "server with --backend embedded, or take job.lockstep out."
            )
        return [*self.engine_args, "--lockstep"]

    def trainer_args_for(self, job: TrainJob) -> Sequence[str]:
        """The verl trainer keeps what it was given at its start, or could not find it again."""
        keeps = job.needs_reference and self.trainer_name == "verl"
        return [*self.trainer_args, "--keep-reference"] if keeps else self.trainer_args

    @property
    def rollout_name(self) -> str:
        return self.rollout or PAIRS[self.backend][0]

    @property
    def trainer_name(self) -> str:
        return self.trainer or PAIRS[self.backend][1]

    def model_for(self, named: str | None) -> str | None:
        """`named` by the job, which counts where no flag does. The fake engine has no weights: a
        job may name any model there."""
        return self.model or (None if self.trainer_name == "fake" else named)

    def served_name_of(self, model: str | None) -> str:
        return self.served_model_name or (
            Path(model).resolve().name if model else self.rollout_name
        )

    @property
    def hosts(self) -> frozenset[str]:
        return LOOPBACK | {self.host} | set(self.allowed_hosts)


def _one_of(flag: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}, got {name!r}.")


def check_url(flag: str, url: str) -> None:
    """Raises ConfigError for anything but http://HOST:PORT, with or without /v1."""
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
        raise ConfigError(f"{flag} must read http://HOST:PORT, without user, path or query.")


def find_model(model: str, allow_hub: bool) -> str:
    """What the engine is to load. Raises ConfigError for what cannot be a model."""
    if model == "demo":
        return str(DEMO_MODEL_DIR)
    if Path(model).is_dir():
        _check_folder(Path(model))
        return model
    if allow_hub:
        return model
    raise ConfigError(
        f"The model folder {model!r} does not exist. "
        "Give --model a local folder, or --allow-hub to load by name."
    )


def _check_folder(model: Path) -> None:
    """No engine's start has to be waited for to see that it cannot load this."""
    for pattern in ("config.json", "*.safetensors"):
        if not any(model.glob(pattern)):
            raise ConfigError(
                f"{model} holds no {pattern}: give --model a folder in Hugging Face form."
            )


def read_keys(key_file: Path | None, clock: Callable[[], float] = time.monotonic) -> KeyRing:
    """The keys that count now and, from the file's later changes, then. Raises ConfigError."""
    if key_file is None:
        return KeyRing()
    ring = follow_key_file(key_file, log, clock)
    if ring.num_valid == 0:
        raise ConfigError(
            f"The key file {key_file} holds no key that is good: "
            f"make one with `fakevllm keys add NAME --key-file {key_file}`."
        )
    return ring


def read_key(key_file: Path | None) -> str | None:
    """The one key in a file, to be sent and not to be compared with."""
    if key_file is None:
        return None
    try:
        return key_file.read_text().strip() or None
    except OSError as error:
        raise ConfigError(f"The key file {key_file} cannot be read: {error.strerror}.") from None
