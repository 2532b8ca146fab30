"""Invert the rewards of some training steps, to test the release gate (the evaluation that a
version must pass before it answers apps).

`FAKEVLLM_INVERT_REWARDS=39:48` inverts the rewards of the steps that begin with the weights of
version 39 to 48. Training may return to earlier weights and repeat a step. Version numbers are
never reused, so the repeated step begins with another version, and its rewards are not inverted.
`fakevllm demo --plant-bad-step` sets the environment variable. If the variable is not set, no
rewards are inverted.
"""

from __future__ import annotations

import os

VARIABLE = "FAKEVLLM_INVERT_REWARDS"


def planted_versions(spec: str) -> range:
    """Return the versions in `spec`: "FIRST:LAST" with both ends included, or "" for no versions.

    >>> planted_versions("39:48"), len(planted_versions(""))
    (range(39, 49), 0)
    """
    first, _, last = spec.partition(":")
    return range(int(first), int(last) + 1) if spec else range(0)


PLANTED = planted_versions(os.environ.get(VARIABLE, ""))
"""The rewards of a step are inverted if the step begins with the weights of one of these
versions."""
