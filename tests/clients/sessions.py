"""Shared parts of the scripted sessions of all clients: pytest marks and checks of the ledger.

`.ci/clients` installs the clients. They are imported only when a session runs.
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
    pytest.mark.filterwarnings("default"),  # we cannot fix the clients' own warnings
]
"""The marks for a module's `pytestmark`."""


def library(name: str) -> Any:
    """Import a client's module.

    The result is Any, because the project's environment has no types for the module.
    """
    return importlib.import_module(name)


class Session:
    """One client's session with one proxy, and the session's groups in the ledger."""

    def __init__(self, proxy: Process, num_siblings: int) -> None:
        self.proxy = proxy
        self.num_siblings = num_siblings
        self._has_other_requests = False
        self._num_seen = len(self._all())

    @property
    def url(self) -> str:
        return self.proxy.url

    @property
    def base_url(self) -> str:
        return f"{self.proxy.url}/v1"

    def groups(self, count: int, *, siblings: int | None = None) -> list[Any]:
        """Return the new groups, which must be exactly `count`, each answered with all siblings.

        More groups mean that the client retried, and fewer that a request was not recorded.
        """
        groups = self._new(count)
        for group in groups:
            num_siblings = self.num_siblings if siblings is None else siblings
            assert (group["status"], group["num_siblings"]) == (200, num_siblings), dict(group)
            query = "select * from siblings where group_id = ?"
            siblings_of_group = rows(self.proxy, query, group["group_id"])
            indices = sorted(row["index"] for row in siblings_of_group)
            assert indices == list(range(num_siblings))
            assert [row["status"] for row in siblings_of_group] == [200] * num_siblings
            served = [row["index"] for row in siblings_of_group if row["served"]]
            assert served == [group["served_index"]]
        return groups

    def groups_of(self, question: str, count: int) -> list[Any]:
        """Wait for `count` groups of this question, and return them.

        The client may send other requests too, which are not checked.
        """
        query = "select * from groups where question = ? order by received_at"

        def matching() -> list[Any]:
            return rows(self.proxy, query, question)

        wait_until(lambda: len(matching()) >= count, 20, f"{count} groups of {question!r}")
        self._has_other_requests = True
        return matching()

    def refused(self, *statuses: int) -> list[Any]:
        """Return the new groups, which must have failed with exactly these statuses."""
        groups = self._new(len(statuses))
        assert [(group["state"], group["status"]) for group in groups] == [
            ("failed", status) for status in statuses
        ]
        return groups

    def check_all_groups_seen(self) -> None:
        """Check that the test has seen each group of the session."""
        if self._has_other_requests:
            # The client's open requests must end before the session of the next client.
            open_now = "\nfakevllm_requests_open 0.0\n"
            metrics = f"{self.url}/metrics"
            return wait_until(
                lambda: open_now in httpx.get(metrics).text, 20, "the end of the client's requests"
            )
        assert len(self._all()) == self._num_seen, "the test has not seen each group"

    def _new(self, count: int) -> list[Any]:
        groups = wait_for_groups(self.proxy, self._num_seen + count)[self._num_seen :]
        self._num_seen += len(groups)
        assert len(groups) == count, [(row["route"], row["question"]) for row in groups]
        return groups

    def _all(self) -> list[Any]:
        return rows(self.proxy, "select group_id from groups")
