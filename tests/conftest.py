"""Settings of every test: signals, threads, Hypothesis, workers, and which tests are slow."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]
from xdist.scheduler import LoadFileScheduling  # pyright: ignore[reportMissingTypeStubs]

FOLDER = Path(__file__).parent
SLOW_FOLDERS = ("crash", "e2e", "examples")
"""Every test in these folders starts several processes, so it is marked `slow`."""
SHARING_ENGINES = frozenset(
    f"tests/contract/test_{name}.py" for name in ("completions", "policies", "rollouts")
)
"""Files whose tests share the engines of tests/contract/conftest.py."""

# A background job of a shell ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests' workers and their processes occupy all cores. Several threads of torch in each of them
# would spin while they wait for each other: one file of tests took 64 s instead of 406 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis repeats the same examples, so that a failure can be reproduced. HYPOTHESIS=search looks
# for new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(FOLDER).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)


class SharedEngineScheduling(LoadFileScheduling):
    """The scheduling of `--dist loadfile`, but with all files that share engines in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "files that share engines" if file in SHARING_ENGINES else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Producer
) -> SharedEngineScheduling | None:
    """Return the scheduler for `--dist loadfile`. For any other value, return None, so that xdist
    chooses."""
    is_by_file = config.getoption("dist") == "loadfile"
    return SharedEngineScheduling(config, log) if is_by_file else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of `-n auto`: one more than there are cores.

    Most tests spend most of their time waiting for another process.
    """
    return (os.cpu_count() or 1) + 1
