"""A test of unmodified opencode with a real proxy and two siblings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import OpenCode, parts
from tests.clients.prompts import num_tokens, say
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.npm_package import install_opencode
from tests.e2e.processes import Process, Processes

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

ANSWER = "The answer is forty-two."


@pytest.fixture(scope="module")
def opencode(request: pytest.FixtureRequest) -> Path:
    """The command of opencode, which is installed if it is missing."""
    return install_opencode(request.config)


def test_opencode_gets_its_answer_through_the_proxy_at_two_siblings(
    opencode: Path, processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")

    client = OpenCode(f"{proxy.url}/v1", tmp_path / "project", command=str(opencode))
    code, events = client(f"{say(ANSWER)} please")

    assert code == 0, events
    assert [part["text"] for part in parts(events, "text")] == [ANSWER]
    (finish,) = parts(events, "step_finish")
    assert (finish["reason"], finish["tokens"]["output"]) == ("stop", num_tokens(ANSWER))

    main = main_call_of(proxy)
    assert (main["streamed"], main["num_siblings"], main["status"]) == (1, 2, 200)
    siblings = rows(proxy, "select * from siblings where group_id = ?", main["group_id"])
    assert [sibling["text"] for sibling in siblings] == [ANSWER] * 2
    assert sum(sibling["served"] for sibling in siblings) == 1
    assert [sibling["reward"] for sibling in siblings] == [0.0, 0.0]


def main_call_of(proxy: Process) -> Any:
    """Return the group with tools.

    The other group is the side call for the title. It has no tools, and opencode may cancel it.
    """
    groups = [
        group for group in wait_for_groups(proxy, 2) if "tools" in json.loads(group["request_json"])
    ]
    assert len(groups) == 1
    return groups[0]
