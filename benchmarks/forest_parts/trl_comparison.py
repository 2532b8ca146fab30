"""TRL's GRPOTrainer as a peer for benchmarks.forest: a whole training step on the same samples.

Sampling is left out: `_generate_and_score_completions`, where TRL samples and asks for rewards,
gives out samples that are there already, padded as TRL pads them. What is timed is what lies
between `on_step_begin` and `on_step_end`: loss, backward, clipping, optimiser. Ours is
`PolicyTrainer.step`, planning and metrics among it. The learning rate is 0, so that all steps are
of the same weights.
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

WITHOUT_BOUND = 1e9
"""Of the gradient's norm: gradients are compared as they are."""
NO_CHANGE = 1e-30
"""A learning rate that changes no weight."""
TOLERANCE = 1e-4
"""Of the gradient's norm, in float32."""
ROWS_PER_PASS = 8
"""`per_device_train_batch_size`, by default."""


@dataclass(slots=True)
class Compared:
    case: Case
    samples: dict[str, Sample]
    """By trainer; TRL is the first."""
    gradient_off: float
    """Norm of the difference between TRL's gradient and ours, relative to TRL's."""

    def speed(self, name: str) -> float:
        return self.samples[name].faster_than(self.samples["TRL"])

    def trained_per_s(self, name: str) -> float:
        """Response tokens a CPU second."""
        return self.case.num_trained / self.samples[name].median_s


class Stepping(Protocol):
    """A trainer with its samples."""

    tokens: int

    def step(self, meter: Meter) -> None:
        """The meter runs during the step and nothing else."""
        ...

    def gradient(self) -> Any:
        """Of the last step."""
        ...


def compare(model: Any, case: Case, num_rounds: int) -> Compared:
    """In turns. The first step of each warms up, and shows whether their gradients agree."""
    advantages = advantages_of(case)
    sampled = _log_probs(model, case.calls)
    trainers: dict[str, Stepping] = {
        "TRL": OfTrl(model, case, advantages),
        "ours, rows": Ours(model, case, advantages, sampled, forest=False),
        "ours": Ours(model, case, advantages, sampled, forest=True),
    }
    samples = {name: Sample() for name in trainers}
    for name, trainer in trainers.items():
        trainer.step(Meter(Sample()))
        samples[name].tokens = trainer.tokens
    theirs, *ours = (trainer.gradient() for trainer in trainers.values())
    off = max(relative_difference(own, theirs) for own in ours)
    assert off < TOLERANCE, f"TRL trains something else on {case.name}: {off:.1e}"
    for _ in range(num_rounds):
        for name, trainer in trainers.items():
            trainer.step(Meter(samples[name]))
    return Compared(case, samples, off)


def advantages_of(case: Case) -> list[float]:
    """One of each group of siblings was right."""
    size = case.num_siblings
    if size == 1:
        return [1.0] * len(case.calls)
    return [1.0 if index % size == 0 else -1 / (size - 1) for index in range(len(case.calls))]


class Ours:
    def __init__(
        self,
        model: Any,
        case: Case,
        advantages: Sequence[float],
        sampled: Sequence[Sequence[float]],
        *,
        forest: bool,
    ) -> None:
        trainers: Any = import_module("fakevllm_server.backends.embedded.train.trainer")
        self._model = copy.deepcopy(model)
        self._trainer = trainers.PolicyTrainer(self._model, lambda: copy.deepcopy(model))
        job = TrainJob(
            lr=NO_CHANGE, grad_clip=WITHOUT_BOUND, forest=forest, micro_batch_tokens=case.budget
        )
        self._trainer.boot(job)
        self._spec = LossSpec.of(job)
        self._kept = _Gradient(self._model)
        self._trainer.optimizer.register_step_pre_hook(self._kept)
        together = zip(case.calls, advantages, sampled, strict=True)
        self._batch = Batch(0, [_call(*of) for of in together])
        self.tokens = 0

    def step(self, meter: Meter) -> None:
        running = self._trainer.step(self._batch, self._spec)
        with meter:
            try:
                while True:
                    next(running)
            except StopIteration as ended:
                self.tokens = round(ended.value["tokens_computed"])

    def gradient(self) -> Any:
        return self._kept.first


class OfTrl:
    def __init__(self, model: Any, case: Case, advantages: Sequence[float]) -> None:
        num_rows = len(case.calls)
        assert num_rows % ROWS_PER_PASS == 0, f"TRL takes rows by {ROWS_PER_PASS}"
        self._model = copy.deepcopy(model)
        self._samples = padded_samples(case.calls, advantages)
        self._meter = Meter(Sample())
        self._kept = _Gradient(self._model)
        self._trainer = _grpo_trainer(self._model, self._samples, num_rows, case.num_siblings)
        self._trainer.add_callback(_callback(self._begin, self._kept, self._end))
        rows, longest = self._samples["prompt_ids"].shape
        self.tokens = rows * (longest + self._samples["completion_ids"].shape[1])

    def step(self, meter: Meter) -> None:
        self._meter = meter
        # It prints a summary.
        with contextlib.redirect_stdout(io.StringIO()):
            self._trainer.train()

    def gradient(self) -> Any:
        return self._kept.first

    def _begin(self) -> None:
        self._meter.__enter__()

    def _end(self) -> None:
        self._meter.__exit__()


def padded_samples(calls: Sequence[CallTokens], advantages: Sequence[float]) -> dict[str, Any]:
    """What `_generate_and_score_completions` returns: prompts padded on the left, completions on
    the right, all to the longest of the step. No old log-probabilities: TRL has none where a step
    trains once on what it sampled."""
    pad: Any = import_module("trl.trainer.utils").pad
    starts = [call.trained[0][0] for call in calls]
    prompts = [
        torch.tensor(list(call.ids[:start])) for call, start in zip(calls, starts, strict=True)
    ]
    answers = [
        torch.tensor(list(call.ids[start:])) for call, start in zip(calls, starts, strict=True)
    ]
    sides = {"prompt": (prompts, "left"), "completion": (answers, "right")}
    found: dict[str, Any] = {
        "advantages": torch.tensor(list(advantages)),
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
    }
    for name, (rows, side) in sides.items():
        found[f"{name}_ids"] = pad(rows, padding_value=0, padding_side=side)
        ones = [torch.ones_like(row) for row in rows]
        found[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side)
    return found


def _grpo_trainer(model: Any, samples: dict[str, Any], num_rows: int, num_siblings: int) -> Any:
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    import_module("transformers").logging.set_verbosity_error()

    class GivenSamples(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            # TRL shuffles and cuts what it gets; these stay as they are.
            return dict(samples)

    # Its own defaults, but for what no CPU does (bf16), what costs time (checkpointing), and what
    # would end up on the disk or the screen.
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="forest-trl-"),
        per_device_train_batch_size=ROWS_PER_PASS,
        gradient_accumulation_steps=num_rows // ROWS_PER_PASS,
        num_generations=num_siblings,
        learning_rate=NO_CHANGE,
        max_grad_norm=WITHOUT_BOUND,
        max_steps=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GivenSamples(
        model=model,
        reward_funcs=_no_reward,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["unread"] * num_rows}),
        processing_class=demo_tokenizer(),
    )


def _no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """TRL wants one; it is never asked."""
    return [0.0] * len(completions)


class _Gradient:
    """The first one an optimiser is given."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.first: Any = None

    def __call__(self, *_: object) -> None:
        if self.first is None:
            self.first = gradient_of(self._model)


def _callback(begin: Any, before_update: Any, end: Any) -> Any:
    transformers: Any = import_module("transformers")

    class Stops(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begin()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            before_update()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            end()

    return Stops()


def _call(tokens: CallTokens, advantage: float, sampled: Sequence[float]) -> Call:
    start = tokens.trained[0][0]
    return Call(
        group_id=str(hash(tuple(tokens.ids[:start]))),
        prompt_ids=tokens.ids[:start],
        response_ids=tokens.ids[start:],
        logprobs=sampled,
        version=0,
        temperature=1.0,
        advantage=advantage,
        weight=1.0,
    )


def _log_probs(model: Any, calls: Sequence[CallTokens]) -> list[list[float]]:
    """Of the responses: what an engine of the same weights would have told."""
    found: list[list[float]] = []
    for call in calls:
        ids = torch.tensor([list(call.ids)])
        start = call.trained[0][0]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].tolist())
    return found
