"""The known prompt. With it, the server checks that an engine samples with the right weights.

The engine returns the log-probabilities of the prompt's own tokens, and so does the trainer. With
equal weights, the numbers are nearly equal (see `training/weight_probe.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KNOWN_PROMPT = (
    "The 7 boats left at 6:45, and 12 of the crew said: 'Où est le port?' "
    "def area(r): return 3.14 * r ** 2 # answer below"
)
"""Text of the known prompt. Words, numbers, code and another language use different parts of the
weights. Otherwise its contents do not matter."""
PROBE_ID = "known_prompt"
"""Id of the group of the call with which the trainer computes the log-probabilities."""
MAX_TOKENS = 33
"""Maximum number of tokens of the prompt that are used. The first token has no log-probability, so
32 are compared."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """The log-probabilities of the known prompt under the weights with which an engine samples."""

    ids: Sequence[int]
    """Token ids of the prompt."""
    log_probs: Sequence[float]
    """Log-probability of each token after the first, at temperature 1, from the whole
    vocabulary."""
    dtype: str
    """Type in which the engine computes, such as `bfloat16`."""
    num_layers: int
    """Number of layers of the model."""
