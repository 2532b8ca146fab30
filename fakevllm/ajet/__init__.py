"""Import path for scripts that were written for AgentJet: `fakevllm.ajet` has the names that such
scripts import."""

from __future__ import annotations

from fakevllm.ajet.agentjet_names import *  # noqa: F403 - `__all__` of that module is the interface
