"""The known prompt, with which the server checks that an engine samples with the right weights.

The engine and the trainer each return the log-probabilities of the prompt's tokens. If they have
equal weights, the log-probabilities are nearly equal (see `training/weight_probe.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KNOWN_PROMPT = (
    "The 7 boats left at 6:45, and 12 of the crew said: 'Où est le port?' "
    "def area(r): return 3.14 * r ** 2 # answer below"
)
"""Text of the known prompt. It contains words, numbers, code and another language, because these
use different parts of the weights."""
PROBE_ID = "known_prompt"
"""Group id of the call that the server sends to the trainer to get the log-probabilities."""
MAX_TOKENS = 33
"""Maximum number of tokens of the prompt that are used. The first token has no log-probability, so
32 are compared."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """The log-probabilities of the known prompt, under the weights with which an engine samples."""

    ids: Sequence[int]
    """Token ids of the prompt."""
    log_probs: Sequence[float]
    """Log-probability of each token after the first, at temperature 1, under the distribution over
    the whole vocabulary."""
    dtype: str
    """Data type in which the engine computes, or is assumed to compute, such as `bfloat16`."""
    num_layers: int
    """Number of layers of the model."""
    repeated: Sequence[Sequence[float]] = ()
    """Log-probabilities in further answers to the same prompt. An engine that others run is asked
    several times: behind a load balancer, its answers alternate."""
    replicas: Mapping[str, ProbeReply] = field(default_factory=dict[str, "ProbeReply"])
    """The reply of each replica by its name, if a fleet of replicas was asked. The other fields are
    then those of the first replica."""

    @property
    def by_replica(self) -> Mapping[str, ProbeReply]:
        """The reply of each replica by its name. A single engine has the name ""."""
        return self.replicas or {"": self}
