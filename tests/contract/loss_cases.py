"""A pairwise selection of training losses: any two values of two settings that may stand together
are in one case."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pydantic
from swarm_server.backends.embedded.train.demonstration_steps import demonstrations_for
from swarm_server.backends.verl.reference import on_policy_calls, stale

from fakevllm_adapters.job.loss_spec import AGGREGATIONS, LOSS_DEFAULTS, UNITS, LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms.loss_sequences import token_weight
from fakevllm_server.types.backend import Batch, Call

CANDIDATES = 30
"""Number of random cases from which the one with the most new pairs is taken."""
DECOUPLED = {"bypass_mode": False}
FACTORS: dict[str, Mapping[str, dict[str, Any]]] = {
    "loss": {name: {"loss": name} for name in LOSS_DEFAULTS},
    "aggregation": {name: {"loss_agg_mode": name} for name in AGGREGATIONS},
    "unit": {name: {"loss_unit": name} for name in UNITS},
    "correction": {
        "none": {},
        "decoupled": DECOUPLED,
        "token-is": DECOUPLED | {"rollout_is": "token", "rollout_is_threshold": "1.2"},
        "masked-is": DECOUPLED | {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2"},
        "normalized-is": DECOUPLED | {"rollout_is": "token", "rollout_is_batch_normalize": True},
        "token-rs": {"rollout_rs": "token_k1", "rollout_rs_threshold": "1.4"},
        "sequence-rs": DECOUPLED | {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.04"},
    },
    "kl": {
        "none": {},
        "k3+": {"kl_loss_coef": 0.5, "kl_loss_type": "k3+"},
        "entropy": {"entropy_coeff": 0.05},
        "both": {"kl_loss_coef": 0.5, "kl_loss_type": "k1", "entropy_coeff": 0.05},
    },
    "demonstrations": {
        "none": {},
        "sft": {"demonstration_loss": "sft", "demonstration_loss_coef": 0.5},
        "dpo": {"demonstration_loss": "dpo"},
        "kto": {"demonstration_loss": "kto"},
    },
    "pieces": {"one": {}, "small": {"micro_batch_tokens": 60}},
    "workers": {"1": {}, "2": {}, "4": {}},
}


@dataclass(frozen=True)
class LossCase:
    """One choice of a value for each factor."""

    choice: tuple[tuple[str, str], ...]

    @property
    def num_workers(self) -> int:
        return int(dict(self.choice).get("workers", "1"))

    @property
    def settings(self) -> dict[str, Any]:
        return {
            name: value
            for factor, chosen in self.choice
            for name, value in FACTORS[factor][chosen].items()
        }

    @property
    def id(self) -> str:
        return ",".join(chosen for factor, chosen in self.choice if factor != "workers")

    @property
    def pairs(self) -> set[frozenset[tuple[str, str]]]:
        return {frozenset(pair) for pair in combinations(self.choice, 2)}

    def is_possible(self) -> bool:
        try:
            LossSpec.of(TrainJob.model_validate(self.settings))
        except (ValueError, pydantic.ValidationError):
            return False
        return True


def pairwise_cases(seed: int = 0) -> list[LossCase]:
    """Return few cases that contain every possible pair of values."""
    rng = random.Random(seed)
    values = {name: list(factor) for name, factor in FACTORS.items()}
    missing = {
        frozenset(((first, one), (second, other)))
        for first, second in combinations(values, 2)
        for one, other in product(values[first], values[second])
    }
    cases: list[LossCase] = []
    while missing:
        pair = min(missing, key=sorted)
        candidates = [
            case
            for _ in range(CANDIDATES)
            for case in [_random_case(values, rng, pair)]
            if case.is_possible()
        ]
        if not candidates:
            missing.remove(pair)  # such as loss = geo_mean with rollout_is = token
            continue
        best = max(candidates, key=lambda case: len(case.pairs & missing))
        cases.append(best)
        missing -= best.pairs
    return cases


def _random_case(
    values: Mapping[str, list[str]], rng: random.Random, fixed: Iterable[tuple[str, str]]
) -> LossCase:
    choice = {name: rng.choice(own) for name, own in values.items()} | dict(fixed)
    return LossCase(tuple(choice.items()))


def batch_of(job: TrainJob) -> Batch:
    """Create a batch of four episodes with one to three calls each, and the demonstrations that the
    job trains. The calls were sampled with slightly other weights."""
    calls = stale(on_policy_calls(9, mixed=True))
    episodes = [calls[:1], calls[1:3], calls[3:6], calls[6:]]
    trained = [
        _in_unit(call, job.loss_unit, f"e{number}", place, len(episode))
        for number, episode in enumerate(episodes)
        for place, call in enumerate(episode)
    ]
    name = LossSpec.of(job).of_demonstrations
    return Batch(1, trained, 0, demonstrations_for(name) if name is not None else ())


def _in_unit(call: Call, loss_unit: str, episode: str, place: int, num_calls: int) -> Call:
    """Return a call with the unit and the weight that the server gives it. In the second half of
    the long episodes, a new timeline begins."""
    units = {"call": None, "episode": episode, "timeline": f"{episode}.{place // 2}"}
    fields = {name: getattr(call, name) for name in Call.__dataclass_fields__}
    weight = token_weight(loss_unit, num_calls)
    return Call(**fields | {"unit": units[loss_unit], "weight": weight})
