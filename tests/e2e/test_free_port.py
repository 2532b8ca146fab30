"""A test of the function that finds ports for the servers of tests, which run in parallel."""

from __future__ import annotations

import socket

from tests.e2e.processes import free_port

MANY = 1000
"""Number of ports, large enough that a naive search would return some port twice."""


def test_a_free_port_is_returned_only_once_and_a_server_may_listen_on_it() -> None:
    ports = [free_port() for _ in range(MANY)]
    assert len(set(ports)) == MANY
    for port in ports[:10]:
        with socket.socket() as anyone, socket.create_server(("127.0.0.1", port)):
            anyone.bind(("127.0.0.1", 0))
            assert anyone.getsockname()[1] not in ports
