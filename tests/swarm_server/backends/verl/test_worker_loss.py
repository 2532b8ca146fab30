"""The loss of the workers, for a toy model in float64: its gradient is that of the step's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.backends.embedded.train.demonstration_steps import KINDS_OF_LOSS
from swarm_server.backends.torch_losses.scored_calls import spec_of
from swarm_server.backends.torch_losses.test_step_loss import specs
from torch import Tensor

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.torch_losses.step_loss import step_loss
from fakevllm_server.backends.training.step_calls import step_demonstrations
from fakevllm_server.backends.verl.forest_split import WorkerRows
from fakevllm_server.backends.verl.row_layout import spread_responses
from fakevllm_server.backends.verl.step_rows import RowValues, StepRows
from fakevllm_server.backends.verl.worker_loss import direct_inputs, worker_loss
from fakevllm_server.types.backend import Batch, Call
from fakevllm_server.types.demonstrations import Demonstration

VOCABULARY = 7


class ToyModel:
    """A model whose logits depend on all earlier tokens of the row."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
        self.embedding = torch.randn(VOCABULARY, 3, **options).requires_grad_()
        self.head = torch.randn(3, VOCABULARY, **options).requires_grad_()

    def rows(self, rows: Sequence[Call]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the log-probabilities and the entropies in the layout of verl's workers."""
        log_probs, entropies = [], []
        for row in rows:
            ids = torch.tensor([*row.prompt_ids, *row.response_ids])
            logits = torch.tanh(self.embedding[ids].cumsum(0)) @ self.head / row.temperature
            table = torch.log_softmax(logits, -1)
            log_probs.append(table[range(len(ids)), ids.roll(-1)])
            entropies.append(-(table.exp() * table).sum(-1))
        return log_probs, entropies

    def gradient(self) -> Tensor:
        """Return the gradient of all weights, and set it to zero."""
        gradients = []
        for weight in (self.embedding, self.head):
            assert weight.grad is not None
            gradients.append(weight.grad.flatten())
            weight.grad = None
        return torch.cat(gradients)


def responses(step: StepRows, per_row: list[Tensor]) -> Tensor:
    """Return the values of the response tokens, one row after another."""
    pairs = zip(step.rows, per_row, strict=True)
    return torch.cat([values[len(row.prompt_ids) - 1 : -1] for row, values in pairs])


def expected_gradient(model: ToyModel, step: StepRows) -> Tensor:
    log_prob, entropy = (responses(step, per_row) for per_row in model.rows(step.rows))
    step_loss(log_prob, step.tokens, step.spec, entropy).loss.backward()
    return model.gradient()


def gradient_of_workers(
    model: ToyModel, step: StepRows, num_workers: int, micro_batches: Random
) -> Tensor:
    """Return the gradient that verl's workers compute: the mean of their gradients."""
    inputs = direct_inputs(step.tokens)
    if step.is_coupled:
        with torch.no_grad():
            log_prob, entropy = (responses(step, per_row) for per_row in model.rows(step.rows))
        inputs = step.coefficients(RowValues(log_prob, entropy))
    spread = {name: spread_responses(step.rows, values) for name, values in inputs.items()}
    for chosen in chosen_rows(len(step.rows), num_workers, micro_batches):
        log_probs, entropies = model.rows([step.rows[at] for at in chosen])
        output = {"log_probs": nested(log_probs), "entropy": nested(entropies)}
        data = {name: nested([values[at] for at in chosen]) for name, values in spread.items()}
        settings = {"loss_spec": step.spec, "dp_size": num_workers}
        loss, _ = worker_loss(model_output=output, data=data | settings)
        (loss / num_workers).backward()
    return model.gradient()


def chosen_rows(num_rows: int, num_workers: int, random: Random) -> Iterator[list[int]]:
    """Yield the rows of each micro-batch of each worker."""
    per_worker = num_rows // num_workers
    for worker in range(num_workers):
        rows = list(range(worker * per_worker, (worker + 1) * per_worker))
        random.shuffle(rows)
        cut = random.randrange(1, per_worker + 1)
        yield from filter(None, (rows[:cut], rows[cut:]))


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def random_calls(random: Random, count: int) -> list[Call]:
    """Create calls of a few episodes, sampled by a similar model, some of which do not count."""
    calls: list[Call] = []
    for index in range(count):
        prompt, response = (
            [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 5))] for _ in range(2)
        )
        logprobs = [random.uniform(-3, -1) for _ in response]
        temperature, advantage = random.choice([0.7, 1.0]), random.gauss(0, 1)
        weight = random.choice([0.0, 0.5, 1.0, 1.0])
        unit = random.choice([None, "a", "b"])
        calls.append(
            Call(f"g{index}", prompt, response, logprobs, 0, temperature, advantage, weight, unit)
        )
    return calls


def divide_among(num_workers: int, attention: str = ROWS) -> Callable[[Sequence[Call]], WorkerRows]:
    return partial(WorkerRows.of, num_workers=num_workers, max_tokens=40, attention=attention)


def step_of(
    random: Random, spec: LossSpec, num_workers: int, demonstrations: Sequence[Demonstration] = ()
) -> StepRows:
    batch = Batch(1, random_calls(random, random.randrange(1, 7)), 0, demonstrations)
    divide = divide_among(num_workers, random.choice([ROWS, "chains"]))
    step = StepRows.of(batch.calls, step_demonstrations(batch, spec), spec, divide, 0)
    similar = torch.tensor([random.uniform(-3, -1) for _ in step.tokens.scale])
    old = similar if random.random() < 0.5 else None
    return step.with_log_probs(old=old, reference=similar)


@st.composite
def step_specs(draw: st.DrawFn) -> LossSpec:
    spec = draw(specs())
    is_normalized = spec.rollout_is is not None and draw(st.booleans())
    return replace(spec, rollout_is_batch_normalize=is_normalized)


@settings(max_examples=60)
@given(step_specs(), st.integers(1, 3), st.integers(0, 2**32))
def test_the_workers_gradient_is_that_of_the_step_loss_for_every_loss(
    spec: LossSpec, num_workers: int, seed: int
) -> None:
    random, model = Random(seed), ToyModel()
    step = step_of(random, spec, num_workers)
    actual = gradient_of_workers(model, step, num_workers, random)
    torch.testing.assert_close(actual, expected_gradient(model, step), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_the_workers_gradient_of_demonstrations_is_that_of_the_step_loss(
    loss: str, is_alone: bool
) -> None:
    kinds = KINDS_OF_LOSS[loss]
    demonstrations = [
        Demonstration(
            f"g{group}", [1, 2, at], [3, at][: 1 + group], kind, f"p{group}" if pairs else None
        )
        for pairs in [loss == "dpo"]
        for group in range(2)
        for at, kind in enumerate(kinds)
    ]
    spec = LossSpec(name=loss) if is_alone else spec_of("vanilla", demonstration_loss=loss)
    for seed in range(5):
        random, model = Random(seed), ToyModel()
        step = step_of(random, spec, 2, demonstrations)
        expected = expected_gradient(model, step)
        assert expected.norm() > 1e-3
        actual = gradient_of_workers(model, step, 2, random)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "is_coupled"),
    [
        ({}, False),
        ({"name": "gspo"}, True),
        ({"name": "gspo", "unit": None}, False),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "1"}, True),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "1"}, False),
        ({"bypass_mode": False, "rollout_is": "sequence"}, True),
        ({"bypass_mode": False, "rollout_is": "token"}, False),
        (
            {"bypass_mode": False, "rollout_is": "token", "rollout_is_batch_normalize": True},
            True,
        ),
        ({"demonstration_loss": "sft"}, True),
    ],
)
def test_only_a_step_whose_rows_are_coupled_needs_two_passes(
    changes: dict[str, Any], is_coupled: bool
) -> None:
    changes = {"name": "vanilla", "unit": "episode"} | changes
    unit = changes.pop("unit")
    calls = [Call("g", [1], [2], [-1.0], 0, 1.0, 1.0, 1.0, unit) for _ in range(2)]
    step = StepRows.of(calls, [], spec_of(**changes), divide_among(1), 0)
    assert step.is_coupled is is_coupled


def test_an_impossible_prompt_token_does_not_change_the_gradient() -> None:
    """Its log-probability is infinite, and 0 times infinity is not 0."""
    call = Call("g", [1, 2], [3], [-1.0], 0, 1.0, 1.0, 1.0)
    step = StepRows.of([call], [], LossSpec(), divide_among(1), 0)
    log_prob = torch.tensor([-torch.inf, -1.0, -torch.inf], requires_grad=True)
    direct = direct_inputs(step.tokens)
    coefficients = step.coefficients(RowValues(torch.tensor([-1.0]), None))
    for inputs in (direct, coefficients):
        data = {name: spread_responses(step.rows, values) for name, values in inputs.items()}
        loss, _ = worker_loss(
            {"log_probs": nested([log_prob])}, data | {"loss_spec": step.spec, "dp_size": 1}
        )
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert gradient.tolist() == [0, -1, 0]
