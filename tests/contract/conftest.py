"""The rollout engines of the contract tests.

One engine of each kind serves all tests of `test_rollouts`, `test_completions` and `test_policies`
that one worker runs, because a start of vLLM takes half a minute. A test may leave any weights
behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
import pytest_asyncio
from contract.rollouts import Rig, start_rig


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let each test of a module run with each of its `ENGINES`."""
    if "shared_rig" in metafunc.fixturenames:
        engines = cast(Any, metafunc).module.ENGINES
        metafunc.parametrize("shared_rig", engines, indirect=True, scope="package")


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Rig]:
    rig = await start_rig(request.param, tmp_path_factory.mktemp(request.param))
    yield rig
    await rig.close()


@pytest.fixture
def rig(shared_rig: Rig) -> Rig:
    return shared_rig
