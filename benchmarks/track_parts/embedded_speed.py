"""Speed of the embedded engine, compared with the shortest code that samples and trains the same
model: sampling with a cache, and a training step on padded rows."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.forest_parts.cases import Case, Shape, random_ids
from benchmarks.rollout import COMPLETION_TOKENS, NUM_SIBLINGS, make_model
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.types.backend import Batch, Call, LossSpec
from fakevllm_server.types.sampling import Sampling

PROMPT_TOKENS = 512
STEP_SHAPE = Shape(256, 32, 8)


def decode_ratio(num_rounds: int) -> float:
    """Return the CPU time in which the engine samples a group, divided by the CPU time of a loop
    over the same model. Both the engine and the loop compute the prompt once for all siblings."""
    engines: Any = import_module("fakevllm_server.backends.embedded.engine")
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder:
        path = make_model(Path(folder) / "model")
        engine: Any = engines.EmbeddedEngine(engines.EngineConfig(path, "model"))
        try:
            model = _load(path)
            chance = random.Random(0)
            prompts = (random_ids(chance, PROMPT_TOKENS) for _ in itertools.count())
            return _median_ratio(
                lambda: asyncio.run(_sample_group(engine, next(prompts))),
                lambda: _sample_in_loop(model, next(prompts)),
                num_rounds,
            )
        finally:
            engine.close()


async def _sample_group(engine: Any, prompt: list[int]) -> None:
    sampling = Sampling(max_tokens=COMPLETION_TOKENS, ignore_eos=True)

    async def sample() -> int:
        return sum([len(tokens) async for tokens in engine.generate(prompt, sampling)])

    nums = await asyncio.gather(*(sample() for _ in range(NUM_SIBLINGS)))
    assert nums == [COMPLETION_TOKENS] * NUM_SIBLINGS, nums


def _load(path: Path) -> Any:
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _sample_in_loop(model: Any, prompt: list[int]) -> None:
    """Sample NUM_SIBLINGS answers with their log-probabilities."""
    torch: Any = import_module("torch")
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        cache.batch_repeat_interleave(NUM_SIBLINGS)
        logits = output.logits[:, -1].expand(NUM_SIBLINGS, -1)
        chosen: list[Any] = []
        for number in range(COMPLETION_TOKENS):
            log_probs = logits.float().log_softmax(-1)
            token = torch.multinomial(log_probs.exp(), 1)
            chosen.append(log_probs.gather(1, token))
            if number < COMPLETION_TOKENS - 1:
                output = model(input_ids=token, past_key_values=cache, use_cache=True)
                logits = output.logits[:, -1]
        torch.cat(chosen, 1).tolist()


def step_ratio(num_rounds: int) -> float:
    """Return the CPU time of a training step, divided by the CPU time of a plain step: padded rows,
    their backward pass, and torch's AdamW."""
    torch: Any = import_module("torch")
    variants: Any = import_module("benchmarks.forest_parts.variants")
    trainers: Any = import_module("fakevllm_server.backends.embedded.train.trainer")
    torch.set_num_threads(1)
    case = STEP_SHAPE.create_case()
    job = TrainJob(lr=1e-6, ppo_epochs=1, max_mismatch_k3=None)
    trainer = trainers.PolicyTrainer(variants.make_model(), variants.make_model)
    trainer.boot(job)
    batch, spec = Batch(1, _calls(case)), LossSpec.of(job)
    model = variants.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)

    def step_by_hand() -> None:
        optimizer.zero_grad(set_to_none=True)
        variants.VARIANTS["naive"](model, case)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return _median_ratio(lambda: _finish(trainer.step(batch, spec)), step_by_hand, num_rounds)


def _calls(case: Case) -> list[Call]:
    """Return the case's calls as a server records them, with alternating advantages."""
    calls: list[Call] = []
    for index, call in enumerate(case.calls):
        ((begin, end),) = call.trained
        ids = list(call.ids)
        logprobs = [-6.0] * (end - begin)
        calls.append(Call("g", ids[:begin], ids[begin:end], logprobs, 0, 1.0, (-1.0) ** index, 1.0))
    return calls


def forest_ratio(num_rounds: int) -> float:
    """Return the CPU time of forward and backward pass over a forest, divided by that of padded
    rows."""
    measurement: Any = import_module("benchmarks.forest_parts.measurement")
    variants: Any = import_module("benchmarks.forest_parts.variants")
    import_module("torch").set_num_threads(1)
    chosen = {name: variants.VARIANTS[name] for name in ("naive", variants.OURS)}
    case = STEP_SHAPE.create_case()
    result = measurement.measure(variants.make_model(), case, chosen, num_rounds)
    return 1 / result.speed(variants.OURS)


def _finish(step: Generator[None, None, Any]) -> Any:
    """Run a step to its end, and return its metrics."""
    while True:
        try:
            next(step)
        except StopIteration as end:
            metrics: dict[str, float] = end.value
            assert not metrics["skipped"], metrics
            return metrics


def _median_ratio(
    ours: Callable[[], object], floor: Callable[[], object], num_rounds: int
) -> float:
    """Return the ratio of the two CPU times, as the median over the rounds. The first round warms
    up and is not counted."""
    ratios: list[float] = []
    for number in range(num_rounds + 1):
        spent: list[float] = []
        for run in (ours, floor):
            started = time.process_time()
            run()
            spent.append(time.process_time() - started)
        if number > 0:
            ratios.append(spent[0] / spent[1])
    return statistics.median(ratios)
