"""The engines that `demo` and `train` start: names, required packages, flags and startup time.

This module chooses the engines and checks that their packages are installed. The swarm server
starts the engines.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.errors import UserError

ENGINE_PAIRS = {
    "fake": ("fake", "fake"),
    "embedded": ("embedded", "embedded"),
    "vllm": ("vllm", "embedded"),
    "verl": ("vllm", "verl"),
}
"""The server's `--backend` -> the names of its rollout engine and of its trainer."""

REQUIRED_MODULES = {
    "fake": (),
    "embedded": ("torch", "transformers"),
    "vllm": ("vllm",),
    "verl": ("verl", "ray"),
}
"""Engine -> Python modules that must be installed."""

EMBEDDED_READY_TIMEOUT_S = 120.0
"""Seconds the fake and embedded engines may take to start."""
GPU_READY_TIMEOUT_S = 600.0
"""Seconds that vLLM and verl may take: they load gigabytes of libraries, and compile kernels at the
first start."""


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The names of a rollout engine and of a trainer that are used together.

    >>> EngineChoice.resolve("vllm")
    EngineChoice(rollout='vllm', trainer='embedded')
    >>> EngineChoice.resolve("vllm", trainer="verl").title
    'vllm samples, verl trains'
    """

    rollout: str
    trainer: str

    @staticmethod
    def resolve(
        backend: str, rollout: str | None = None, trainer: str | None = None
    ) -> EngineChoice:
        """Return the engines of the backend named `backend`.

        If `rollout` is not None, it replaces the backend's rollout engine. If `trainer` is not
        None, it replaces the backend's trainer.

        Raises UserError for an unknown name, and for the fake engine in combination with another
        engine.
        """
        rollouts, trainers = (
            sorted(set(column)) for column in zip(*ENGINE_PAIRS.values(), strict=True)
        )
        for flag, name, known in (
            ("--backend", backend, sorted(ENGINE_PAIRS)),
            ("--rollout", rollout, rollouts),
            ("--trainer", trainer, trainers),
        ):
            if name is not None and name not in known:
                raise UserError(f"{flag} must be one of {', '.join(known)}, got {name!r}.")
        pair = ENGINE_PAIRS[backend]
        engines = EngineChoice(rollout or pair[0], trainer or pair[1])
        if (engines.rollout == "fake") != (engines.trainer == "fake"):
            raise UserError(
                "The fake engine shares no tokens with any other engine: use --backend fake, "
                "which samples and trains with it."
            )
        return engines

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rollout engine and of the trainer. The result has only one name if the
        same engine samples and trains."""
        return tuple(dict.fromkeys((self.rollout, self.trainer)))

    @property
    def title(self) -> str:
        if self.rollout == self.trainer:
            return f"{self.rollout} samples and trains"
        return f"{self.rollout} samples, {self.trainer} trains"

    @property
    def has_model(self) -> bool:
        return self.rollout != "fake"

    @property
    def ready_timeout_s(self) -> float:
        needs_gpu = {"vllm", "verl"} & set(self.names)
        return GPU_READY_TIMEOUT_S if needs_gpu else EMBEDDED_READY_TIMEOUT_S

    @property
    def flags(self) -> list[str]:
        """The command-line flags that choose these engines, for `fakevllm-server` and for `fakevllm
        demo`."""
        for name, pair in ENGINE_PAIRS.items():
            if pair == (self.rollout, self.trainer):
                return [] if name == "embedded" else ["--backend", name]
        return ["--rollout", self.rollout, "--trainer", self.trainer]

    def check_installed(self, is_installed: Callable[[str], bool] = _is_installed) -> None:
        """Raise UserError if a package of one of the engines is missing. Call this method before
        any process is started, so that no process must be stopped after the error."""
        for name in self.names:
            missing = [module for module in REQUIRED_MODULES[name] if not is_installed(module)]
            if missing:
                raise UserError(
                    f"The {name} engine needs {' and '.join(missing)}, not installed in this "
                    f"Python: {_install_hint(name)}"
                )


def _install_hint(engine: str) -> str:
    command = f"pip install -e '.[{engine}]'"
    if engine == "embedded":
        return command
    return f"{command} where there is a GPU, else server/cpu/make_environment.sh FOLDER"
