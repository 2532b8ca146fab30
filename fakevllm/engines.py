"""The engines a command may bring: what they are called, need and take to start. Decides only: the
server starts them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.errors import UserError

PAIRS = {
    "fake": ("fake", "fake"),
    "embedded": ("embedded", "embedded"),
    "vllm": ("vllm", "embedded"),
    "verl": ("vllm", "verl"),
}
"""The server's `--backend NAME` -> its rollout and its trainer."""

MODULES = {
    "fake": (),
    "embedded": ("torch", "transformers"),
    "vllm": ("vllm",),
    "verl": ("verl", "ray"),
}
"""What must be installed for an engine."""

OWN_READY_TIMEOUT_S = 120.0
REAL_READY_TIMEOUT_S = 600.0
"""Libraries of gigabytes are loaded, and kernels compiled on a first start."""


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True, slots=True)
class Engines:
    """
    >>> Engines.named("vllm")
    Engines(rollout='vllm', trainer='embedded')
    >>> Engines.named("vllm", trainer="verl").title
    'vllm samples, verl trains'
    """

    rollout: str
    trainer: str

    @staticmethod
    def named(backend: str, rollout: str | None = None, trainer: str | None = None) -> Engines:
        """A pair, and what is to stand in the place of its halves. Raises UserError."""
        rollouts, trainers = (sorted(set(column)) for column in zip(*PAIRS.values(), strict=True))
        for flag, name, known in (
            ("--backend", backend, sorted(PAIRS)),
            ("--rollout", rollout, rollouts),
            ("--trainer", trainer, trainers),
        ):
            if name is not None and name not in known:
                raise UserError(f"{flag} must be one of {', '.join(known)}, got {name!r}.")
        own = PAIRS[backend]
        engines = Engines(rollout or own[0], trainer or own[1])
        if (engines.rollout == "fake") != (engines.trainer == "fake"):
            raise UserError(
                "The fake engine has no tokens in common with any other: --backend fake is both."
            )
        return engines

    @property
    def names(self) -> tuple[str, ...]:
        """Each engine once, as each is one process."""
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
        is_real = {"vllm", "verl"} & set(self.names)
        return REAL_READY_TIMEOUT_S if is_real else OWN_READY_TIMEOUT_S

    @property
    def flags(self) -> list[str]:
        """That choose these engines, for the server and for the demo alike."""
        for pair, both in PAIRS.items():
            if both == (self.rollout, self.trainer):
                return [] if pair == "embedded" else ["--backend", pair]
        return ["--rollout", self.rollout, "--trainer", self.trainer]

    def need_installed(self, is_installed: Callable[[str], bool] = _is_installed) -> None:
        """Raises UserError, before anything is started, where a package is missing."""
        for name in self.names:
            missing = [module for module in MODULES[name] if not is_installed(module)]
            if missing:
                raise UserError(
                    f"The {name} engine needs {' and '.join(missing)}, not installed in this "
                    f"Python: {_mend(name)}"
                )


def _mend(engine: str) -> str:
    command = f"pip install -e '.[{engine}]'"
    if engine == "embedded":
        return command
    return f"{command} where there is a GPU, else server/cpu/make_environment.sh FOLDER"
