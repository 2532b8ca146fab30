"""Choose the number of torch's threads by timing decode iterations at start-up."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.decode.decoder import Decoder, cache_shape
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.types.sampling import Sampling

LEAST_GAIN = 1.2
"""How many times faster an iteration must be with more threads. A smaller gain is lost as soon as
another process needs a core, because torch's threads wait for each other at every operation."""
NUM_ROWS = 8
ITERATIONS = 5


def choose_threads(seconds: Mapping[int, float]) -> int:
    """Return the number of threads to use. `seconds` is a dict from the number of threads to the
    time of an iteration. A larger number is chosen only if it is faster than the best smaller
    number by the factor LEAST_GAIN."""
    best, *others = sorted(seconds)
    for number in others:
        if seconds[number] * LEAST_GAIN <= seconds[best]:
            best = number
    return best


def measured_threads(model: PreTrainedModel, max_model_len: int) -> int:
    """Time decode iterations with 1, 2, 4, … threads, up to the number of cores. Return the number
    of threads to use. Torch's own setting is unchanged afterwards."""
    before = torch.get_num_threads()
    number, seconds = 1, dict[int, float]()
    try:
        while number <= (os.cpu_count() or 1):
            torch.set_num_threads(number)
            seconds[number] = _iteration_s(model, max_model_len)
            number *= 2
    finally:
        torch.set_num_threads(before)
    return choose_threads(seconds)


@torch.inference_mode()
def _iteration_s(model: PreTrainedModel, max_model_len: int) -> float:
    """Run a few decode iterations, and return the shortest time of an iteration, in seconds."""
    cache = KvCache(cache_shape(model), NUM_ROWS, max_model_len, max_cells=1 << 30)
    decoder = Decoder(model, cache, frozenset())
    for index in range(NUM_ROWS):
        sampling = Sampling(ignore_eos=True)
        request = DecodeRequest([index], 1 << 30, sampling, random.Random(index), stream=None)
        decoder.join([request], [])
    times: list[float] = []
    for _ in range(min(ITERATIONS, max_model_len - 1)):
        started = time.perf_counter()
        decoder.advance(version=0)
        times.append(time.perf_counter() - started)
    return min(times)
