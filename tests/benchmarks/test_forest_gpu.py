"""benchmarks.forest_gpu, as far as a CPU goes: the same functions over a tiny model."""

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
ways: Any = import_module("benchmarks.forest_parts.variants")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the meter reads /proc")
CASE = Shape(24, 6, 3, 2, 4).case()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def looked_at(model: Any, **others: Any) -> Any:
    return gpu.look_at("tiny", model, CASE, {"naive": ways.naive, **others}, 2)


def seeing_another(model: Any, case: Case) -> Iterator[Any]:
    """What a wrong mask comes to: each call sees what a sibling of the first turn answered."""
    sampled = list(case.calls[0].ids)[-6:]
    calls = [
        CallTokens([*sampled, *call.ids], [(start + 6, end + 6) for start, end in call.trained])
        for call in case.calls
    ]
    return ways.naive(model, replace(case, calls=calls))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ways_that_merge_are_as_near_to_naive_rows_as_single_calls_are(dtype: str) -> None:
    model = gpu.make_model(gpu.SIZES["tiny"], "cpu")
    gpu.precision.set_compute_dtype(model, getattr(torch, dtype))
    found = looked_at(model, dense=gpu.WAYS["dense"], segments=gpu.WAYS["segments"])
    assert found.missed() == []
    assert set(found.off) == {"dense", "segments"}
    samples = found.measured.samples
    assert all(len(one.cpu_s) == 2 for one in samples.values())
    assert samples["dense"].tokens < samples["naive"].tokens
    assert len(found.row()) == 4 + len(samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_mask_is_more_than_rounding(dtype: str) -> None:
    model = gpu.make_model(gpu.SIZES["tiny"], "cpu")
    gpu.precision.set_compute_dtype(model, getattr(torch, dtype))
    found = looked_at(model, wrong=seeing_another)
    (told,) = found.missed()
    assert "wrong is off by" in told and found.off["wrong"].gradient > 0.01


def test_a_size_that_recomputes_its_layers_trains_the_same() -> None:
    size = gpu.SIZES["tiny"]
    plain, again = (
        gpu.make_model(size._replace(checkpointed=checkpointed), "cpu")
        for checkpointed in (False, True)
    )
    assert again.is_gradient_checkpointing and again.training
    gradients: list[Any] = []
    for model in (plain, again):
        gpu.trained(gpu.WAYS["segments"])(model, CASE)
        gradients.append(gpu.gradient_of(model))
    assert gpu.relative_difference(*gradients) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_names_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["forest_gpu"])
    assert gpu.main() == 2
    told = capsys.readouterr().err
    assert "no CUDA GPU" in told and "--device cpu" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--models", "70B"], "no 70B: choose from tiny, 0.5B, 7B"),
        (["--device", "cpu", "--ways", "flex"], "flex has no backward pass on a CPU"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["forest_gpu", *words])
    with pytest.raises(SystemExit):
        gpu.main()
    assert told in capsys.readouterr().err
