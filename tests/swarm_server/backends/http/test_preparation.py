from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from fakevllm_adapters.protocol.errors import WireError
from fakevllm_server.backends.http import preparation
from fakevllm_server.backends.http.preparation import LONG_BODY_BYTES, PreparationThreads


@pytest.fixture
def threads() -> Iterator[PreparationThreads]:
    threads = PreparationThreads()
    yield threads
    threads.close()


async def test_a_long_prompt_delays_neither_the_event_loop_nor_short_prompts(
    threads: PreparationThreads,
) -> None:
    release = threading.Event()
    long = asyncio.create_task(threads.run(LONG_BODY_BYTES, release.wait))
    assert await threads.run(LONG_BODY_BYTES - 1, lambda: "short") == "short"
    assert not long.done()
    release.set()
    assert await long


async def test_equal_requests_are_prepared_in_order_of_arrival(
    threads: PreparationThreads,
) -> None:
    prepared: list[int] = []
    await asyncio.gather(*[threads.run(9, lambda at=at: prepared.append(at)) for at in range(50)])
    assert prepared == list(range(50))


async def test_a_request_whose_client_leaves_is_never_prepared(
    threads: PreparationThreads,
) -> None:
    release = threading.Event()
    prepared: list[str] = []
    first = asyncio.create_task(threads.run(LONG_BODY_BYTES, release.wait))
    second = asyncio.create_task(threads.run(LONG_BODY_BYTES, lambda: prepared.append("second")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    assert await first
    await threads.run(LONG_BODY_BYTES, lambda: prepared.append("third"))
    assert prepared == ["third"]


async def test_a_request_is_refused_when_too_many_wait(
    threads: PreparationThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "MAX_PREPARING", 1)
    release = threading.Event()
    first = asyncio.create_task(threads.run(9, release.wait))
    await asyncio.sleep(0)
    with pytest.raises(WireError) as refused:
        await threads.run(9, lambda: None)
    assert refused.value.status == 503
    release.set()
    assert await first
    await threads.run(9, lambda: None)
