"""The names by which apps may request the served model."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.protocol.errors import unavailable, unknown_model
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.policy_names import is_policy_name

_MODEL_UNKNOWN = "The engine is not ready: the swarm server has not reported which model it serves."


class ModelNames:
    """The aliases of the served model (other names by which apps may request the model)."""

    def __init__(self, aliases: Sequence[str], link: SwarmLink) -> None:
        """Store the aliases. The alias `*` stands for every name. `link` is the connection to the
        server, which reports the name of the served model."""
        self._aliases = aliases
        self._link = link

    def is_alias(self, name: str) -> bool:
        """Return True if `name` is an alias. An alias must be replaced by the served model's
        name."""
        if name == self._link.model:
            return False
        return name in self._aliases or ("*" in self._aliases and name != "")

    def served_name(self, name: str) -> str | None:
        """Return the served model's name if `name` is an alias. Return None if `name` is no alias.
        Raise WireError (503) if `name` is an alias and the server has not reported its model
        yet."""
        if not self.is_alias(name):
            return None
        return self.reported()

    def reported(self) -> str:
        """Return the served model's name. Raise WireError (503) if the server has not reported its
        model yet."""
        if self._link.model is None:
            raise unavailable(_MODEL_UNKNOWN, OutageReason.ENGINE_NOT_READY)
        return self._link.model

    def refuse_policy(self, name: str) -> None:
        """Raise WireError if `name` is the name of a policy (a loaded version of the weights). Only
        evaluations may sample policies by name.

        The status is 404, as for an unknown model. The status is 503 if the server has not reported
        its model yet. The served model itself may have a name that looks like a policy's name.
        """
        if not is_policy_name(name) or name == self._link.model or self.is_alias(name):
            return
        raise unknown_model(name, self.reported())
