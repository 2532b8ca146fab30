"""Check after each publish of new weights that the rollout engine samples with them.

The engine and the trainer compute the log-probabilities of one known prompt. With equal weights,
the two results differ only by rounding. A larger difference means that the engine has old weights,
or only a part of the new weights. A difference that is as small as rounding does no harm, so the
probe ignores it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fakevllm_server.types.backend import ActionFailed, Backend, Call
from fakevllm_server.types.known_prompt import PROBE_ID, ProbeReply

log = logging.getLogger("fakevllm.server")

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Largest relative error of one rounding, by the type in which an engine computes."""
SUM_LENGTH = 2**14
"""Number of products that a matrix multiplication adds up, for the widest layers of open models.
Sums are kept in float32, whatever the type of the factors."""
ROUNDINGS_PER_LAYER = 10
"""Number of roundings of the hidden state in one layer: two norms, seven projections, attention."""
LOGIT_SCALE = 2.0
"""Standard deviation of a model's logits over its vocabulary, in nats. Measured values of language
models are 1 to 3."""

PROBE_WITHIN_S = 60.0
"""Seconds after which a probe is given up. Training waits for the probe. A probe takes two forward
passes of a short prompt."""
MARGIN = 3.0
"""Maximum of the mean difference, in standard deviations of a single token's error. The mean over
32 tokens is well below one such standard deviation, unless the errors of all tokens are alike."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The comparison of an engine's log-probabilities of one known prompt with the trainer's."""

    difference: float
    """Mean absolute difference over the tokens of the known prompt, in nats."""
    limit: float

    @property
    def is_same(self) -> bool:
        """True if rounding alone explains the difference between the engine's log-probabilities and
        the trainer's."""
        return self.difference <= self.limit

    def __str__(self) -> str:
        return (
            f"the log-probabilities of a known prompt differ from the trainer's by "
            f"{self.difference:.2g} nats per token (rounding explains {self.limit:.2g})"
        )


def limit_of(dtype: str, num_layers: int) -> float:
    """Return the largest mean difference that rounding explains, in nats per token.

    Let u be the unit roundoff of `dtype`. One operation has a relative error of about u. A sum of n
    products adds √n times the unit roundoff of float32 to this error. Errors of different
    operations have different signs, so the error of N operations is √N times the error of one
    operation. The limit also contains the factor √2 twice: once because engine and trainer round
    independently, and once because a log-probability is the difference of two rounded numbers (a
    logit, and a mean of logits). The second factor √2 is an upper bound.

    >>> [round(limit_of("bfloat16", layers), 2) for layers in (4, 28)]
    [0.3, 0.79]
    >>> f"{limit_of('float32', 4):.1e}"
    '5.8e-04'
    """
    error = UNIT_ROUNDOFF[dtype] + math.sqrt(SUM_LENGTH) * UNIT_ROUNDOFF["float32"]
    num_roundings = ROUNDINGS_PER_LAYER * max(num_layers, 1)
    return MARGIN * 2.0 * error * math.sqrt(num_roundings) * LOGIT_SCALE


def compare(reply: ProbeReply, expected: Sequence[float]) -> ProbeResult | None:
    """Compare an engine's reply with the trainer's log-probabilities of the same tokens.

    Return None if nothing can be compared. This is the case if the numbers of tokens differ, if
    there is no token, or if the trainer's own log-probabilities are not finite.
    """
    is_comparable = len(reply.log_probs) == len(expected) > 0
    if not is_comparable or not all(map(math.isfinite, expected)):
        return None
    pairs = zip(reply.log_probs, expected, strict=True)
    difference = sum(abs(own - other) for own, other in pairs) / len(expected)
    # NaN compares as equal to nothing, so it must not stay.
    difference = difference if math.isfinite(difference) else math.inf
    return ProbeResult(difference, limit_of(reply.dtype, reply.num_layers))


class MixedWeights(Exception):
    """Error for an engine whose answers to the same prompt differ by more than rounding. The
    message says what to do."""


MIXED = (
    "the rollout engine answers a known prompt in different ways, so several engines with "
    "different weights are behind one address, such as a load balancer. New weights reach only one "
    "of them: give --rollout-url once for each engine"
)


def _compare_all(reply: ProbeReply, expected: Sequence[float]) -> dict[str, ProbeResult]:
    """Compare the reply of each replica with the trainer's log-probabilities. Return the results by
    the replica's name. Return {} if a reply cannot be compared. Raises MixedWeights if the answers
    of one replica differ from each other."""
    results: dict[str, ProbeResult] = {}
    for name, each in reply.by_replica.items():
        for again in each.repeated:
            agreement = compare(replace(each, dtype=reply.dtype, log_probs=again), each.log_probs)
            if agreement is not None and not agreement.is_same:
                raise MixedWeights(MIXED)
        result = compare(replace(each, dtype=reply.dtype), expected)
        if result is None:
            return {}
        results[name] = result
    return results


class WeightProbe:
    """Compares the rollout engine's weights with the trainer's weights, for one backend. Engine and
    trainer compute the log-probabilities of the known prompt (one fixed text). If the engine or the
    trainer cannot compute them, one log line gives the reason, and no more probes are run."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_off = False
        self.wrong_replicas: Mapping[str, ProbeResult] = {}
        """Replicas whose weights differed from the trainer's in the latest probe, if the weights of
        at least one other replica were right. Always empty for a single engine."""
        self.has_passed = False
        """Whether engine and trainer have agreed before, which shows that their numbers can be
        compared."""

    async def run(self, version: int) -> ProbeResult | None:
        """Compare the weights that the engine serves as `version` with the trainer's weights.
        If there are several replicas, return the comparison of the one that differs most. Return
        None if there is nothing to compare.

        Raises BackendError if an engine fails. Raises MixedWeights if the answers of one engine
        differ from each other.
        """
        self.wrong_replicas = {}
        if self._is_off:
            return None
        started = time.perf_counter()
        try:
            async with asyncio.timeout(PROBE_WITHIN_S):
                answers = await self._answers(version)
        except ActionFailed as failure:  # isolated: training must not end because of the probe
            return self.switch_off(str(failure))
        except TimeoutError:
            return self.switch_off(f"no answer came within {PROBE_WITHIN_S:g} s")
        if answers is not None and not all(map(math.isfinite, answers[1])):
            log.warning(
                "version %d: the trainer's log-probabilities of a known prompt are not finite, so "
                "they are not compared with the engine's",
                version,
            )
            return None
        results = {} if answers is None else _compare_all(*answers)
        result = max(results.values(), key=lambda each: each.difference, default=None)
        if result is None:
            reason = "it does not report log-probabilities that can be compared"
            return self.switch_off(reason, logging.INFO)
        wrong = {name: each for name, each in results.items() if not each.is_same}
        if len(wrong) < len(results):
            self.wrong_replicas = wrong
        is_first = not wrong and not self.has_passed
        level = logging.INFO if is_first else logging.DEBUG
        log.log(level, "version %d: %s (%.0f ms)", version, result, _ms_since(started))
        self.has_passed = self.has_passed or len(wrong) < len(results)
        return result

    def switch_off(self, reason: str, level: int = logging.WARNING) -> None:
        """Run no more probes (comparisons of the engine's weights with the trainer's), and log the
        reason once."""
        self._is_off = True
        log.log(
            level,
            "the rollout engine cannot be asked for a known prompt after each publish: %s. Whether "
            "it has the trainer's weights shows only in `mismatch_k3`",
            reason,
        )

    async def _answers(self, version: int) -> tuple[ProbeReply, Sequence[float]] | None:
        """Return the engine's log-probabilities of the known prompt (one fixed text), and the
        trainer's log-probabilities of the same tokens. Return None if the engine does not report
        log-probabilities."""
        reply = await self._backend.probe()
        if reply is None:
            return None
        ids = reply.ids
        logprobs = [0.0] * (len(ids) - 1)
        call = Call(PROBE_ID, ids[:1], ids[1:], logprobs, version, 1.0, advantage=0.0, weight=1.0)
        (expected,) = await self._backend.trainer.log_probs([call], "trained")
        return reply, expected


def _ms_since(started: float) -> float:
    return 1000 * (time.perf_counter() - started)
