"""What the scripted sessions of all clients share: what to say to the fake engine, and what must
be in the ledger afterwards.

The clients are those of .ci/clients: Python packages beside the project's own, npm packages in the
folder that $FAKEVLLM_CLIENTS_NPM names. Nothing here imports them before a session runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process

Json = dict[str, Any]

SESSION = [
    pytest.mark.clients,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # the clients' own warnings are not ours to mend
]
"""For `pytestmark`."""

MODEL = "fake"
KEY = "sk-test"
RUN_TIMEOUT_S = 240.0

CITY: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADA = '{"name": "Ada", "age": 36}'
SUNNY = "It is sunny in Oslo."
RESULT = "21 degrees, no clouds"
"""Of every tool."""


def say(text: str) -> str:
    """Makes the fake engine answer `text`."""
    return f"[[say {text}]]"


def call(*calls: tuple[str, Json], then: str = SUNNY) -> str:
    """Makes the fake engine call these tools in one turn, and answer `then` once it has a result
    of each."""
    named = " & ".join(f"{name} {json.dumps(arguments)}" for name, arguments in calls)
    return f"[[call {named}]] {say(then)}"


def num_tokens(text: str) -> int:
    """Of an answer: the fake engine counts bytes and an end."""
    return len(text.encode()) + 1


def library(name: str) -> Any:
    """A module of a client. Any: the project's own environment has no types for it."""
    return importlib.import_module(name)


class Session:
    """One client's session with one proxy, and what the ledger has of it."""

    def __init__(self, proxy: Process, num_siblings: int) -> None:
        self.proxy = proxy
        self.num_siblings = num_siblings
        self._seen = len(self._all())

    @property
    def url(self) -> str:
        return self.proxy.url

    @property
    def base_url(self) -> str:
        return f"{self.proxy.url}/v1"

    def groups(self, count: int, *, siblings: int | None = None) -> list[Any]:
        """The groups since the last look, which must be exactly `count` answered ones with all
        their siblings: more are a client that asked again, fewer a request that was not kept."""
        groups = self._new(count)
        for group in groups:
            num_siblings = self.num_siblings if siblings is None else siblings
            assert (group["status"], group["num_siblings"]) == (200, num_siblings), dict(group)
            found = rows(self.proxy, "select * from siblings where group_id = ?", group["group_id"])
            assert sorted(row["index"] for row in found) == list(range(num_siblings))
            assert [row["status"] for row in found] == [200] * num_siblings
            assert [row["index"] for row in found if row["served"]] == [group["served_index"]]
        return groups

    def refused(self, *statuses: int) -> list[Any]:
        """The groups since the last look, which must be failed ones with exactly these."""
        groups = self._new(len(statuses))
        assert [(group["state"], group["status"]) for group in groups] == [
            ("failed", status) for status in statuses
        ]
        return groups

    def nothing_more(self) -> None:
        """Every request was looked at."""
        assert len(self._all()) == self._seen, "a session must look at all its groups"

    def _new(self, count: int) -> list[Any]:
        found = wait_for_groups(self.proxy, self._seen + count)[self._seen :]
        self._seen += len(found)
        assert len(found) == count, [(row["route"], row["question"]) for row in found]
        return found

    def _all(self) -> list[Any]:
        return rows(self.proxy, "select group_id from groups")


def npm_command(name: str) -> str:
    """A program that npm installed."""
    return str(npm_folder() / "node_modules" / ".bin" / name)


def npm_folder() -> Path:
    folder = os.environ.get("FAKEVLLM_CLIENTS_NPM")
    assert folder, "FAKEVLLM_CLIENTS_NPM names no folder: start these tests by .ci/clients FOLDER"
    return Path(folder)


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, standard output and error. The program, and all it starts, has a home of its own
    beside `folder`, none of our environment, and an end."""
    home = folder.parent / "home"
    for needed in (home, folder):
        needed.mkdir(parents=True, exist_ok=True)
    running = subprocess.Popen(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        try:
            out, err = running.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    return running.returncode, out, err
