"""Reinforcement learning in plain Python: from rewards to advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fakevllm_server.algorithms.advantages import grpo

Advantages = Callable[[Sequence[float], float], list[float]]

ADVANTAGES: dict[str, Advantages] = {"grpo": grpo}
"""TrainJob.algorithm -> (rewards of one group, std floor) -> advantages."""
