"""The policies of an engine's process. A policy is a set of weights beside the set that is trained.
A model call selects a policy by its model name.

As long as the process lives, a name belongs to one version of the weights, even after its policy
was unloaded. Therefore data that are cached under a name, in this process or at a client, can never
belong to other weights.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from fakevllm_server.backends.http.engine_wrapper import EngineWrapper
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.sampling import Sampling, Token

MAX_POLICIES = 6
"""Maximum number of further policies: four for evaluations, and two that answer apps. In this
project's own engines, each policy takes as much memory as the whole model."""

Generate = Callable[[Sequence[int], Sampling], AsyncGenerator[list[Token]]]


class PolicyEngine(Protocol):
    """Interface of an engine that can hold further policies (sets of weights beside the trained
    weights)."""

    @property
    def names(self) -> PolicyNames: ...

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        """Load the weights in a Hugging Face folder as the policy `name`. If this policy is loaded
        already, nothing happens. Raises ValueError if the name belongs to another version, or if
        there are too many policies."""
        ...

    async def unload_policy(self, name: str) -> None:
        """Remove a policy. Running requests end normally. If the policy is not loaded, nothing
        happens."""
        ...

    def policy(self, name: str) -> TokenEngine | None:
        """Return the engine that samples with the policy `name`, or None if this policy is not
        loaded."""
        ...


class PolicyNames:
    """The names of all policies (sets of weights beside the trained weights) that are loaded now or
    were loaded before. A name belongs to one version of the weights for ever.

    >>> names = PolicyNames("base")
    >>> names.add("policy-3", 3)
    >>> names.remove("policy-3")
    >>> names.check("policy-3", 4)
    Traceback (most recent call last):
    ...
    ValueError: the name policy-3 stands for version 3, so it cannot be given to version 4
    """

    def __init__(self, model_name: str) -> None:
        """Create an object without policies. `model_name` is the name of the weights that are
        trained."""
        self._model_name = model_name
        self._known: dict[str, int] = {}
        self.loaded: dict[str, int] = {}
        """The version of each loaded policy, by name."""

    def check(self, name: str, version: int) -> bool:
        """Return True if the policy must be loaded, and False if the policy is loaded already.
        Raises ValueError if the policy cannot be loaded."""
        if name == self._model_name:
            raise ValueError(f"the name {name} belongs to the weights that are trained")
        known = self._known.get(name, version)
        if known != version:
            raise ValueError(
                f"the name {name} stands for version {known}, so it cannot be given to version "
                f"{version}"
            )
        if name in self.loaded:
            return False
        if len(self.loaded) >= MAX_POLICIES:
            raise ValueError(
                f"{len(self.loaded)} policies are loaded ({', '.join(self.loaded)}), which is the "
                "maximum: unload one of them"
            )
        return True

    def add(self, name: str, version: int) -> None:
        """Record that a policy is loaded. Call `check` first."""
        self._known[name] = self.loaded[name] = version

    def remove(self, name: str) -> None:
        """Record that a policy is not loaded any more."""
        self.loaded.pop(name, None)


class PolicyView(EngineWrapper):
    """A TokenEngine that samples with one policy (a set of weights beside the trained weights). The
    object has its own weights. Everything else belongs to the engine that holds the policy."""

    def __init__(self, engine: TokenEngine, name: str, generate: Generate) -> None:
        super().__init__(engine, name)
        self._generate = generate

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        return self._generate(prompt_ids, sampling)
