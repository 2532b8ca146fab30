"""Import path for scripts that were written for AgentJet (another RL framework). `fakevllm.ajet`
exports the names that such scripts import from AgentJet."""

from __future__ import annotations

from fakevllm.ajet.agentjet_names import *  # noqa: F403 - `__all__` of that module is the interface
