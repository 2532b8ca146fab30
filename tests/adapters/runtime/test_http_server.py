from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from fakevllm_runtime.errors import ConfigError
from fakevllm_runtime.http_server import listening_socket

WAIT_FOR_SIGTERM = """
import signal
from fakevllm_runtime.http_server import stop_when_stdin_closes

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
stop_when_stdin_closes()
assert signal.sigwait({signal.SIGTERM}) == signal.SIGTERM
"""


def test_a_port_in_use_is_a_config_error_that_names_address_and_flag() -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .* choose another --port"):
            listening_socket("127.0.0.1", port)


def test_a_parents_socket_is_taken_by_its_descriptor() -> None:
    with listening_socket("127.0.0.1", 0) as parents:
        address = parents.getsockname()
        with listening_socket("not used", 0, os.dup(parents.fileno())) as listener:
            assert listener.getsockname() == address
            with socket.create_connection(address):
                listener.accept()[0].close()


def test_a_process_gets_sigterm_when_its_standard_input_closes() -> None:
    child = subprocess.run([sys.executable, "-c", WAIT_FOR_SIGTERM], input=b"", timeout=30)
    assert child.returncode == 0
