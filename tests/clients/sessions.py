"""What the scripted sessions of all clients share: their marks, and what must be in the ledger
afterwards.

The clients are those of .ci/clients. Nothing here imports them before a session runs.
"""

from __future__ import annotations

import importlib
from typing import Any

import httpx
import pytest

from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, wait_until

SESSION = [
    pytest.mark.clients,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # the clients' own warnings are not ours to mend
]
"""For `pytestmark`."""


def library(name: str) -> Any:
    """A module of a client. Any: the project's own environment has no types for it."""
    return importlib.import_module(name)


class Session:
    """One client's session with one proxy, and what the ledger has of it."""

    def __init__(self, proxy: Process, num_siblings: int) -> None:
        self.proxy = proxy
        self.num_siblings = num_siblings
        self._asks_beside = False
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

    def asked(self, question: str, count: int) -> list[Any]:
        """The groups of this question, once there are `count`, of a client that asks for other
        things beside, as it pleases."""
        query = "select * from groups where question = ? order by received_at"

        def found() -> list[Any]:
            return rows(self.proxy, query, question)

        wait_until(lambda: len(found()) >= count, 20, f"{count} groups of {question!r}")
        self._asks_beside = True
        return found()

    def refused(self, *statuses: int) -> list[Any]:
        """The groups since the last look, which must be failed ones with exactly these."""
        groups = self._new(len(statuses))
        assert [(group["state"], group["status"]) for group in groups] == [
            ("failed", status) for status in statuses
        ]
        return groups

    def nothing_more(self) -> None:
        """Every request was looked at."""
        if self._asks_beside:
            # What the client left open when it ended must not come up in another's session.
            open_now = "\nfakevllm_requests_open 0.0\n"
            metrics = f"{self.url}/metrics"
            return wait_until(lambda: open_now in httpx.get(metrics).text, 20, "its requests' end")
        assert len(self._all()) == self._seen, "a session must look at all its groups"

    def _new(self, count: int) -> list[Any]:
        found = wait_for_groups(self.proxy, self._seen + count)[self._seen :]
        self._seen += len(found)
        assert len(found) == count, [(row["route"], row["question"]) for row in found]
        return found

    def _all(self) -> list[Any]:
        return rows(self.proxy, "select group_id from groups")
