"""Fixtures: a server with the fake engine, and proxies with one sibling and with four."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.clients.prompts import KEY
from tests.clients.sessions import Session
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

NUM_SIBLINGS = (1, 4)


@pytest.fixture(scope="session")
def proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Process]]:
    """The proxies by their number of siblings."""
    folder = tmp_path_factory.mktemp("clients")
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    with Processes(folder) as started:
        server = started.server("--backend", "fake")
        running = {
            number: started.proxy(
                server, "--hooks", str(hooks), "--n", str(number), folder=f"n{number}", wait=False
            )
            for number in NUM_SIBLINGS
        }
        yield {number: proxy.wait_until_healthy() for number, proxy in running.items()}


@pytest.fixture(params=NUM_SIBLINGS, ids=lambda number: f"N={number}")
def session(request: pytest.FixtureRequest, proxies: dict[int, Process]) -> Iterator[Session]:
    session = Session(proxies[request.param], request.param)
    yield session
    session.check_all_groups_seen()


@pytest.fixture
def client(session: Session) -> Iterator[openai.OpenAI]:
    """OpenAI's Python client with retries. Tests of other clients define their own fixtures."""
    with openai.OpenAI(base_url=session.base_url, api_key=KEY) as client:
        yield client
