"""The forest against its peers: as fast as promised, on this machine, with the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from benchmarks.forest_cases import SHAPES, Case, Shape  # noqa: E402
from benchmarks.forest_measuring import measure  # noqa: E402
from benchmarks.forest_report import GOALS, OVER_TRL  # noqa: E402
from benchmarks.forest_sessions import RECORDED, session_cases  # noqa: E402
from benchmarks.forest_ways import OURS, WAYS, make_model  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 3
COMPARED = {name: WAYS[name] for name in ("naive", OURS)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [one for one in SHAPES if one.name in GOALS], ids=str)
def test_a_step_is_as_much_faster_than_naive_rows_as_promised(shape: Shape) -> None:
    measured = measure(make_model(), shape.case(), COMPARED, ROUNDS)
    assert measured.speed(OURS) >= GOALS[shape.name]


@pytest.mark.skipif(not RECORDED.exists(), reason=f"recordings are not there: {RECORDED}")
def test_a_recorded_session_of_opencode_trains_five_times_as_fast() -> None:
    cases: list[Case] = session_cases(2048)
    assert cases
    for case in cases:
        assert measure(make_model(), case, COMPARED, 1).speed(OURS) >= 5


@pytest.mark.skipif(not find_spec("trl"), reason="TRL is not installed: benchmarks/README.md")
@pytest.mark.filterwarnings("default")
def test_long_prompts_train_twice_as_fast_as_with_trl() -> None:
    trl: Any = import_module("benchmarks.forest_trl")
    compared = trl.compare(make_model(), Shape(1024, 32, 8).case(), ROUNDS)
    assert compared.speed("ours") >= OVER_TRL
    assert compared.gradient_off < 1e-5
