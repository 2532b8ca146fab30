"""The functions of benchmarks.forest_gpu on a CPU, over a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from benchmarks.forest_parts.cases import Case, Shape
from fakevllm_server.forest import CallTokens

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")
gpu: Any = import_module("benchmarks.forest_gpu")
variants: Any = import_module("benchmarks.forest_parts.variants")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the meter reads /proc")
CASE = Shape(24, 6, 3, 2, 4).create_case()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread, because a model this small is slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure_with_naive(model: Any, **others: Any) -> Any:
    return gpu.measure_case("tiny", model, CASE, {"naive": variants.naive, **others}, 2)


def pass_with_wrong_mask(model: Any, case: Case) -> Iterator[Any]:
    """Compute as with a wrong mask: each call sees the answer of a sibling of the first turn."""
    sampled = list(case.calls[0].ids)[-6:]
    calls = [
        CallTokens([*sampled, *call.ids], [(start + 6, end + 6) for start, end in call.trained])
        for call in case.calls
    ]
    return variants.naive(model, replace(case, calls=calls))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_variants_differ_from_naive_rows_only_by_rounding(dtype: str) -> None:
    model = gpu.make_model(gpu.MODEL_SHAPES["tiny"], "cpu")
    gpu.autocast.set_compute_dtype(model, getattr(torch, dtype))
    passes = {name: gpu.FORWARD_PASSES[name] for name in ("dense", "segments")}
    result = measure_with_naive(model, **passes)
    assert result.failures() == []
    assert set(result.differences) == {"dense", "segments"}
    samples = result.measurement.samples
    assert all(len(sample.cpu_s) == 2 for sample in samples.values())
    assert samples["dense"].tokens < samples["naive"].tokens
    assert len(result.row()) == 4 + len(samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_mask_differs_by_more_than_rounding(dtype: str) -> None:
    model = gpu.make_model(gpu.MODEL_SHAPES["tiny"], "cpu")
    gpu.autocast.set_compute_dtype(model, getattr(torch, dtype))
    result = measure_with_naive(model, wrong=pass_with_wrong_mask)
    (failure,) = result.failures()
    assert "wrong differs by" in failure and result.differences["wrong"].gradient > 0.01


def test_a_model_that_recomputes_its_layers_has_the_same_gradient() -> None:
    shape = gpu.MODEL_SHAPES["tiny"]
    plain, recomputing = (
        gpu.make_model(shape._replace(checkpointed=checkpointed), "cpu")
        for checkpointed in (False, True)
    )
    assert recomputing.is_gradient_checkpointing and recomputing.training
    gradients: list[Any] = []
    for model in (plain, recomputing):
        gpu.with_backward(gpu.FORWARD_PASSES["segments"])(model, CASE)
        gradients.append(gpu.gradient_of(model))
    assert gpu.relative_difference(*gradients) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_names_the_flag_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["forest_gpu"])
    assert gpu.main() == 2
    message = capsys.readouterr().err
    assert "no CUDA GPU" in message and "--device cpu" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "70B"], "there is no 70B; choose from tiny, 0.5B, 7B"),
        (["--device", "cpu", "--ways", "flex"], "flex has no backward pass on a CPU"),
    ],
)
def test_unknown_models_and_variants_are_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["forest_gpu", *arguments])
    with pytest.raises(SystemExit):
        gpu.main()
    assert message in capsys.readouterr().err
