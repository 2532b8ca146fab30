"""One server with the fake engine, and two proxies before it: one sibling, and four with a hook."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.clients.sessions import Session
from tests.clients.words import KEY
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

NUM_SIBLINGS = (1, 4)


@pytest.fixture(scope="session")
def proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Process]]:
    """By their number of siblings."""
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
    session.nothing_more()


@pytest.fixture
def client(session: Session) -> Iterator[openai.OpenAI]:
    """OpenAI's own, with its retries on. Other clients' files have theirs."""
    with openai.OpenAI(base_url=session.base_url, api_key=KEY) as client:
        yield client
