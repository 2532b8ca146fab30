"""AgentJet's import path: `fakevllm.ajet` has the names that scripts for AgentJet import."""

from __future__ import annotations

from fakevllm.ajet.agentjet_names import *  # noqa: F403 - `__all__` of that module is the interface
