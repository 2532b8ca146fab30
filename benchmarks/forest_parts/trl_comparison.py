"""Compare a training step of TRL's GRPOTrainer with a step of our trainer on the same samples.

Sampling is not measured. TRL samples and computes rewards in `_generate_and_score_completions`.
Here, this method returns prepared samples, padded as TRL pads them. For TRL, the time from
`on_step_begin` to `on_step_end` is measured: loss, backward pass, clipping, optimizer. For our
trainer, the time of `PolicyTrainer.step` is measured, including planning and metrics. The learning
rate is practically 0, so that all steps use the same weights.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from benchmarks.forest_parts.cases import Case
from benchmarks.forest_parts.measurement import Meter, Sample, gradient_of, relative_difference
from benchmarks.forest_parts.recorded_sessions import demo_tokenizer
from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.forest import CallTokens
from fakevllm_server.types.backend import Batch, Call

torch: Any = import_module("torch")

NO_CLIPPING = 1e9
"""Limit of the gradient's norm that clips nothing, because unclipped gradients are compared."""
LEARNING_RATE = 1e-30
"""Learning rate that changes no weight in float32."""
TOLERANCE = 1e-4
"""Largest relative difference between TRL's gradient and ours, in float32."""
ROWS_PER_PASS = 8
"""TRL's default of `per_device_train_batch_size`."""


@dataclass(slots=True)
class Comparison:
    """Samples of all trainers on one case."""

    case: Case
    samples: dict[str, Sample]
    """Sample by trainer. TRL is the first."""
    gradient_difference: float
    """Norm of the difference between TRL's gradient and ours, relative to TRL's."""

    def speed(self, name: str) -> float:
        """Return how many times as fast as TRL the trainer is."""
        return self.samples[name].faster_than(self.samples["TRL"])

    def trained_per_s(self, name: str) -> float:
        """Return the number of trained tokens (the tokens of the responses) per CPU second."""
        return self.case.num_trained / self.samples[name].median_s


class StepRunner(Protocol):
    """A trainer with the samples of one case."""

    tokens: int
    """Tokens that go through the model in one step, including padding."""

    def step(self, meter: Meter) -> None:
        """Take one step, and measure the step alone with the meter."""
        ...

    def gradient(self) -> Any:
        """Return the gradient of the first step."""
        ...


def compare(model: Any, case: Case, num_rounds: int) -> Comparison:
    """Compare the gradients of all trainers. Then measure steps of the trainers, which take turns.

    The first step of each trainer warms up and is not measured. Raises AssertionError if the
    gradients differ by more than TOLERANCE.
    """
    advantages = advantages_of(case)
    old_log_probs = _log_probs(model, case.calls)
    trainers: dict[str, StepRunner] = {
        "TRL": TrlRunner(model, case, advantages),
        "ours, rows": OurRunner(model, case, advantages, old_log_probs, forest=False),
        "ours": OurRunner(model, case, advantages, old_log_probs, forest=True),
    }
    samples = {name: Sample() for name in trainers}
    for name, trainer in trainers.items():
        trainer.step(Meter(Sample()))
        samples[name].tokens = trainer.tokens
    trl, *ours = (trainer.gradient() for trainer in trainers.values())
    difference = max(relative_difference(gradient, trl) for gradient in ours)
    assert difference < TOLERANCE, (
        f"TRL's gradient on {case.name} differs from ours by {difference:.1e}."
    )
    for _ in range(num_rounds):
        for name, trainer in trainers.items():
            trainer.step(Meter(samples[name]))
    return Comparison(case, samples, difference)


def advantages_of(case: Case) -> list[float]:
    """Return advantages as if one sibling of each group had been right."""
    size = case.num_siblings
    if size == 1:
        return [1.0] * len(case.calls)
    return [1.0 if index % size == 0 else -1 / (size - 1) for index in range(len(case.calls))]


class OurRunner:
    """Our trainer, on a copy of the model."""

    def __init__(
        self,
        model: Any,
        case: Case,
        advantages: Sequence[float],
        old_log_probs: Sequence[Sequence[float]],
        *,
        forest: bool,
    ) -> None:
        trainers: Any = import_module("fakevllm_server.backends.embedded.train.trainer")
        self._model = copy.deepcopy(model)
        self._trainer = trainers.PolicyTrainer(self._model, lambda: copy.deepcopy(model))
        job = TrainJob(
            lr=LEARNING_RATE, grad_clip=NO_CLIPPING, forest=forest, micro_batch_tokens=case.budget
        )
        self._trainer.boot(job)
        self._spec = LossSpec.of(job)
        self._gradient = _FirstGradient(self._model)
        self._trainer.optimizer.register_step_pre_hook(self._gradient)
        fields = zip(case.calls, advantages, old_log_probs, strict=True)
        self._batch = Batch(0, [_call(*values) for values in fields])
        self.tokens = 0

    def step(self, meter: Meter) -> None:
        step = self._trainer.step(self._batch, self._spec)
        with meter:
            try:
                while True:
                    next(step)
            except StopIteration as ended:
                self.tokens = round(ended.value["tokens_computed"])

    def gradient(self) -> Any:
        return self._gradient.first


class TrlRunner:
    """TRL's trainer, on a copy of the model."""

    def __init__(self, model: Any, case: Case, advantages: Sequence[float]) -> None:
        num_rows = len(case.calls)
        assert num_rows % ROWS_PER_PASS == 0, f"TRL needs a multiple of {ROWS_PER_PASS} rows."
        self._model = copy.deepcopy(model)
        self._samples = padded_samples(case.calls, advantages)
        self._meter = Meter(Sample())
        self._gradient = _FirstGradient(self._model)
        self._trainer = _grpo_trainer(self._model, self._samples, num_rows, case.num_siblings)
        self._trainer.add_callback(_callback(self._begin, self._gradient, self._end))
        rows, longest = self._samples["prompt_ids"].shape
        self.tokens = rows * (longest + self._samples["completion_ids"].shape[1])

    def step(self, meter: Meter) -> None:
        self._meter = meter
        # TRL prints a summary.
        with contextlib.redirect_stdout(io.StringIO()):
            self._trainer.train()

    def gradient(self) -> Any:
        return self._gradient.first

    def _begin(self) -> None:
        self._meter.__enter__()

    def _end(self) -> None:
        self._meter.__exit__()


def padded_samples(calls: Sequence[CallTokens], advantages: Sequence[float]) -> dict[str, Any]:
    """Return the samples in the form that TRL's `_generate_and_score_completions` returns.

    Prompts are padded on the left to the longest prompt of the step. Completions are padded on the
    right to the longest completion of the step. There are no old log-probabilities, because TRL has
    none if it trains once on each sample.
    """
    pad: Any = import_module("trl.trainer.utils").pad
    starts = [call.trained[0][0] for call in calls]
    prompts = [
        torch.tensor(list(call.ids[:start])) for call, start in zip(calls, starts, strict=True)
    ]
    answers = [
        torch.tensor(list(call.ids[start:])) for call, start in zip(calls, starts, strict=True)
    ]
    sides = {"prompt": (prompts, "left"), "completion": (answers, "right")}
    samples: dict[str, Any] = {
        "advantages": torch.tensor(list(advantages)),
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
    }
    for name, (rows, side) in sides.items():
        samples[f"{name}_ids"] = pad(rows, padding_value=0, padding_side=side)
        ones = [torch.ones_like(row) for row in rows]
        samples[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side)
    return samples


def _grpo_trainer(model: Any, samples: dict[str, Any], num_rows: int, num_siblings: int) -> Any:
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    import_module("transformers").logging.set_verbosity_error()

    class PreparedSamples(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            # The samples of `inputs` are ignored: TRL would shuffle and shorten them.
            return dict(samples)

    # These are TRL's defaults, except for bf16, which this CPU does not support, for checkpointing,
    # which costs time, and for output to the disk or the screen.
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="forest-trl-"),
        per_device_train_batch_size=ROWS_PER_PASS,
        gradient_accumulation_steps=num_rows // ROWS_PER_PASS,
        num_generations=num_siblings,
        learning_rate=LEARNING_RATE,
        max_grad_norm=NO_CLIPPING,
        max_steps=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return PreparedSamples(
        model=model,
        reward_funcs=_no_reward,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["unread"] * num_rows}),
        processing_class=demo_tokenizer(),
    )


def _no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return zeros. TRL requires a reward function, and never calls this one."""
    return [0.0] * len(completions)


class _FirstGradient:
    """A hook before the optimizer's step that keeps the first gradient."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.first: Any = None

    def __call__(self, *_: object) -> None:
        if self.first is None:
            self.first = gradient_of(self._model)


def _callback(begin: Any, before_update: Any, end: Any) -> Any:
    transformers: Any = import_module("transformers")

    class StepCallback(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begin()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            before_update()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            end()

    return StepCallback()


def _call(tokens: CallTokens, advantage: float, log_probs: Sequence[float]) -> Call:
    start = tokens.trained[0][0]
    return Call(
        group_id=str(hash(tuple(tokens.ids[:start]))),
        prompt_ids=tokens.ids[:start],
        response_ids=tokens.ids[start:],
        logprobs=log_probs,
        version=0,
        temperature=1.0,
        advantage=advantage,
        weight=1.0,
    )


def _log_probs(model: Any, calls: Sequence[CallTokens]) -> list[list[float]]:
    """Return the log-probabilities of the responses, as an engine with the same weights reports
    them."""
    log_probs: list[list[float]] = []
    for call in calls:
        ids = torch.tensor([list(call.ids)])
        start = call.trained[0][0]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        log_probs.append(logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].tolist())
    return log_probs
