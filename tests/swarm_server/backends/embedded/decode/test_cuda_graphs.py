"""Decoding with graphs, with a recorder of torch's operations in place of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    decode_request,
    load,
    plain_logprobs,
    run_dry,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fakevllm_server.backends.embedded.decode import cuda_graphs
from fakevllm_server.backends.embedded.decode.decoder import MIN_SHARED_TOKENS, cache_shape
from fakevllm_server.backends.embedded.decode.decoding_check import check_decoding
from fakevllm_server.backends.embedded.decode.forward_choice import ForwardChoice
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache
from fakevllm_server.backends.embedded.decode.sampling_state import SamplingState
from fakevllm_server.types.sampling import Sampling


class RecordedOperations:
    """A graph that runs the recorded operations of torch again, with the same tensors and sizes. As
    in a CUDA graph, no Python code of the recorded function runs."""

    num_recorded = 0

    def __init__(self) -> None:
        self._replay: Callable[[], Tensor] | None = None
        self._result = torch.empty(0)

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        RecordedOperations.num_recorded += 1
        traced: Any = make_fx(run)()
        self._replay = traced
        self._result = run()
        return self._result

    def replay(self) -> None:
        assert self._replay is not None
        self._result.copy_(self._replay())


class BrokenGraph(RecordedOperations):
    def replay(self) -> None:
        pass


def graphed_state(folder: Path) -> SamplingState:
    model = load(folder)
    shape = cache_shape(model)
    cache = KvCache(shape, 8, 256, max_cells=1 << 30, has_static_width=True)
    choice = ForwardChoice(new_graph=RecordedOperations)
    return SamplingState(model, cache, frozenset({2}), forward=choice)


def test_tokens_decoded_with_graphs_have_the_models_own_logprobs(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedOperations, "num_recorded", 0)
    state = graphed_state(tiny_folder)
    rows = [
        decode_request(
            range(7 + index, 20 + 2 * index), 6 + index, Sampling(ignore_eos=True), index
        )
        for index in range(3)
    ]
    for one in rows:
        state.scheduler.add(one)
    run_dry(state)

    assert RecordedOperations.num_recorded == 3, "one for each number of rows"
    for one in rows:
        plain = plain_logprobs(state.model, one.ids)
        start = len(one.ids) - one.num_sampled
        for at, token in enumerate(one.undelivered, start=start):
            assert token.logprob == pytest.approx(plain[at - 1, token.id].item(), abs=2e-4)


def test_a_graph_is_recorded_again_when_the_buffers_have_grown(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedOperations, "num_recorded", 0)
    state = graphed_state(tiny_folder)
    one = decode_request(range(7, 107), 60, Sampling(ignore_eos=True))
    state.scheduler.add(one)
    run_dry(state)

    assert RecordedOperations.num_recorded == 2
    plain = plain_logprobs(state.model, one.ids)
    last = one.undelivered[-1]
    assert last.logprob == pytest.approx(plain[-2, last.id].item(), abs=2e-4)


def test_the_number_of_graphs_is_bounded(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    state = graphed_state(tiny_folder)
    for index in range(2):
        state.scheduler.add(
            decode_request([9 + index], 3 + index, Sampling(ignore_eos=True), index)
        )
    run_dry(state)

    step: Any = state.decoder._step  # pyright: ignore[reportPrivateUsage]
    assert len(step._recorded) == 1


def test_siblings_that_are_decoded_with_graphs_share_no_prompt(tiny_folder: Path) -> None:
    state = graphed_state(tiny_folder)
    prompt = range(7, 7 + MIN_SHARED_TOKENS + 5)
    rows = [decode_request(prompt, 4, Sampling(ignore_eos=True), seed) for seed in range(2)]
    for one in rows:
        state.scheduler.add(one)
    with torch.inference_mode():
        while not rows[0].num_sampled:
            state.run_iteration()

    assert len(state.decoder.rows) == 2 and state.decoder.cache.shared_rows == []


def test_graphs_that_decode_wrongly_are_turned_off_at_start_up(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(tiny_folder)

    assert check_decoding(model, 256, RecordedOperations).new_graph is RecordedOperations
    assert check_decoding(model, 256, BrokenGraph) == ForwardChoice()

    message = "the fused forward pass in CUDA graphs decodes this model wrongly"
    assert message in capsys.readouterr().err


def test_a_cpu_has_no_graphs() -> None:
    assert cuda_graphs.graph_maker(torch.device("cpu")) is None
