"""The choice of the engines that `fakevllm demo` and `fakevllm train` use: names, flags and startup
time. These commands start a swarm server, and the server starts the engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.errors import UserError
from fakevllm_runtime.engines import boot_timeout_s, check_installed, is_installed

ENGINE_PAIRS = {
    "fake": ("fake", "fake"),
    "embedded": ("embedded", "embedded"),
    "vllm": ("vllm", "embedded"),
    "verl": ("vllm", "verl"),
}
"""For each value of the server's flag `--backend`: the name of the rollout engine and the name of
the trainer that this value selects."""

READY_MARGIN_S = 60.0
"""Number of seconds by which a client waits longer than the server for an engine to start. If the
start takes too long, the client can then show the server's error message."""


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

        Raises UserError for an unknown name. Also raises UserError if only one of the two engines
        is the fake engine, because the fake engine cannot be combined with other engines.
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
        """The names of the rollout engine and of the trainer. If one engine both samples and
        trains, its name occurs only once."""
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
        """Maximum number of seconds for which a client waits until the server's engines are ready.
        This is READY_MARGIN_S longer than the server itself waits for its engines."""
        return boot_timeout_s(self.names) + READY_MARGIN_S

    @property
    def flags(self) -> list[str]:
        """The command-line flags that choose these engines, for `fakevllm-server` and for `fakevllm
        demo`."""
        for name, pair in ENGINE_PAIRS.items():
            if pair == (self.rollout, self.trainer):
                return [] if name == "embedded" else ["--backend", name]
        return ["--rollout", self.rollout, "--trainer", self.trainer]

    def check_installed(self, is_installed: Callable[[str], bool] = is_installed) -> None:
        """Raise UserError if a package of one of the engines is missing."""
        check_installed(self.names, is_installed)
