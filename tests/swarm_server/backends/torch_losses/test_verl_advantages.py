"""Every advantage estimator, compared with verl's own function in float64."""

# pyright: reportMissingImports=false
from __future__ import annotations

import warnings
from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.job.reward_settings import DISCOUNTS
from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome
from fakevllm_server.algorithms.reward_penalties import kl_penalties
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

pytestmark = pytest.mark.real

FLOOR = 1e-9
"""Standard deviation floor. verl has none; it adds 1e-6 to the deviation."""


def sampled_outcomes(seed: int, with_penalties: bool) -> list[Outcome]:
    """Return groups of several episodes with different rewards."""
    random = Random(seed)
    outcomes: list[Outcome] = []
    for group, size in enumerate([2, 4, 5]):
        for _ in range(size):
            length = random.randint(1, 6)
            penalties = [random.gauss(0, 0.1) for _ in range(length)] if with_penalties else ()
            outcomes.append(
                Outcome(f"g{group}", random.choice([0, random.gauss(1, 2)]), length, penalties)
            )
    random.shuffle(outcomes)
    return outcomes


def token_rewards(outcomes: list[Outcome]) -> Tensor:
    rows: list[Tensor] = []
    for outcome in outcomes:
        penalties = list(outcome.penalties) or [0.0] * outcome.num_tokens
        row = -torch.tensor(penalties, dtype=torch.float64)
        row[-1] += outcome.reward
        rows.append(row)
    return pad_sequence(rows, True)


class Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def verls(
    name: str,
    outcomes: list[Outcome],
    spec: AdvantageSpec,
    rewards: Tensor | None = None,
    **more: Any,
) -> list[float]:
    """Return verl's advantages. `rewards` is [episodes, tokens]; by default it is made from the
    outcomes."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask = pad_sequence([torch.ones(outcome.num_tokens).double() for outcome in outcomes], True)
    with_std = spec.norm_adv_by_std_in_grpo
    if name == "grpo":
        more["norm_adv_by_std_in_grpo"] = with_std
    if name != "remax" and name != "reinforce_plus_plus":
        more["index"] = [outcome.group_id for outcome in outcomes]
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=token_rewards(outcomes) if rewards is None else rewards,
        response_mask=mask,
        config=Config(gamma=spec.gamma, norm_adv_by_std_in_grpo=with_std),
        **more,
    )
    return advantages[mask.bool()].tolist()


def our_advantages(name: str, outcomes: list[Outcome], spec: AdvantageSpec) -> list[float]:
    return list(chain.from_iterable(ESTIMATORS[name](outcomes, spec)))


@pytest.mark.parametrize("with_penalties", [False, True])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("grpo", AdvantageSpec(std_floor=FLOOR)),
        ("grpo", AdvantageSpec(norm_adv_by_std_in_grpo=False)),
        ("grpo_passk", AdvantageSpec(std_floor=FLOOR)),
        ("grpo_passk", AdvantageSpec(norm_adv_by_std_in_grpo=False)),
        ("rloo", AdvantageSpec()),
        ("opo", AdvantageSpec()),
        ("gpg", AdvantageSpec()),
        ("reinforce_plus_plus", AdvantageSpec(std_floor=FLOOR)),
        ("reinforce_plus_plus", AdvantageSpec(std_floor=FLOOR, gamma=0.9)),
        ("reinforce_plus_plus_baseline", AdvantageSpec(std_floor=FLOOR)),
    ],
)
def test_advantages_equal_those_of_verl(
    name: str, spec: AdvantageSpec, seed: int, with_penalties: bool
) -> None:
    outcomes = sampled_outcomes(seed, with_penalties)
    expected = verls(name, outcomes, spec)
    assert our_advantages(name, outcomes, spec) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("with_penalties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_remax_equals_that_of_verl(seed: int, with_penalties: bool) -> None:
    spec = AdvantageSpec()
    outcomes = sampled_outcomes(seed, with_penalties)
    baselines = {"g0": 0.5, "g1": -1.0, "g2": 2.0}
    expected = verls(
        "remax",
        outcomes,
        spec,
        reward_baselines=torch.tensor([baselines[o.group_id] for o in outcomes]).double(),
    )
    greedy = [Outcome(name, reward, 0, is_greedy=True) for name, reward in baselines.items()]
    assert our_advantages("remax", greedy + outcomes, spec) == pytest.approx(expected, abs=1e-9)


def test_kl_in_the_reward_equals_that_of_verl() -> None:
    from verl.trainer.ppo.core_algos import compute_rewards

    log_probs, reference = [-1.0, -0.5, -2.0], [-1.2, -0.9, -1.5]
    scores = torch.zeros(3, dtype=torch.float64)
    expected = compute_rewards(scores, torch.tensor(log_probs), torch.tensor(reference), 0.1)
    result = [-penalty for penalty in kl_penalties(log_probs, reference, 0.1)]
    assert result == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("name", "gamma"),
    [(name, 1.0) for name in sorted(set(ESTIMATORS) - {"remax"})]
    + [(name, 0.9) for name in sorted(DISCOUNTS)],
)
def test_a_step_with_kl_in_the_reward_equals_that_of_verl(name: str, gamma: float) -> None:
    """The expected advantages start from verl's own penalty, which verl subtracts from token-level
    scores."""
    random = Random(f"{name} {gamma}")
    rows, groups = kl_rows(random), list[FinishedGroup]()
    for group in range(3):
        own = rows[3 * group : 3 * group + 3]
        episodes = [ScoredEpisode(at, row.reward, [row.call]) for at, row in enumerate(own)]
        groups.append(FinishedGroup(f"g{group}", episodes))
    job = TrainJob(
        algorithm=name,  # pyright: ignore[reportArgumentType]
        gamma=gamma,
        use_kl_in_reward=True,
        kl_coef=0.1,
        std_floor=FLOOR,
    )
    penalties = [kl_penalties(row.call.logprobs or (), row.reference, 0.1) for row in rows]

    plan = plan_step(1, groups, job, penalties)

    result = list(chain.from_iterable(call.advantages for call in plan.batch.calls))
    rewards, metrics = verls_penalised(rows, 0.1)
    outcomes = [Outcome(f"g{at // 3}", 0.0, len(row.reference)) for at, row in enumerate(rows)]
    expected = verls(name, outcomes, AdvantageSpec(gamma=gamma), rewards)
    assert result == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert plan.metrics["reward_kl_penalty"] == pytest.approx(metrics["actor/reward_kl_penalty"])


class KlRow(NamedTuple):
    reward: float
    call: RecordedCall
    reference: list[float]


def kl_rows(random: Random) -> list[KlRow]:
    rows: list[KlRow] = []
    for _ in range(9):
        ids = [5] * random.randint(1, 6)
        old, reference = ([random.uniform(-3, 0) for _ in ids] for _ in range(2))
        call = RecordedCall([1], ids, old, [], 1.0, "stop", None)
        rows.append(KlRow(random.gauss(0, 1), call, reference))
    return rows


def verls_penalised(rows: list[KlRow], coef: float) -> tuple[Tensor, dict[str, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        from verl.protocol import DataProto
        from verl.trainer.ppo.core_algos import FixedKLController
        from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    def padded(values: list[list[float]]) -> Tensor:
        return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in values], True)

    lengths = [len(row.reference) for row in rows]
    tensors = {
        "token_level_scores": padded(
            [[0.0] * (n - 1) + [row.reward] for n, row in zip(lengths, rows, strict=True)]
        ),
        "response_mask": padded([[1.0] * n for n in lengths]),
        "old_log_probs": padded([list(row.call.logprobs or ()) for row in rows]),
        "ref_log_prob": padded([row.reference for row in rows]),
    }
    data, metrics = apply_kl_penalty(DataProto.from_dict(tensors), FixedKLController(coef))
    return data.batch["token_level_rewards"], metrics
