"""Tests that neither program listens on a public address without a key."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from fakevllm_adapters.http.http_url import http_url
from fakevllm_adapters.protocol.keys import named_key
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, free_port, wait_until

SERVER = ("-m", "fakevllm_server", "start", "--backend", "fake")
PROXY = ("-m", "fakevllm", "serve")
PROGRAMS = pytest.mark.parametrize("program", [SERVER, PROXY], ids=["server", "proxy"])


def run_to_end(
    folder: Path, program: tuple[str, ...], *flags: str
) -> subprocess.CompletedProcess[str]:
    return PRELOADED_PYTHON.run([*program, "--run-dir", str(folder / "run"), *flags], folder)


@PROGRAMS
@pytest.mark.parametrize("host", ["::", socket.gethostname() or "gpu-box"])
def test_a_public_address_without_a_key_is_refused_with_the_fix(
    tmp_path: Path, program: tuple[str, ...], host: str
) -> None:
    ended = run_to_end(tmp_path, program, "--host", host, "--port", str(free_port()))
    assert ended.returncode == 2
    message = ended.stderr.strip()
    assert f"--host {host} is reachable from outside" in message
    assert "--key-file" in message and "\n" not in message


@PROGRAMS
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_address_with_a_key_file_demands_a_key(
    tmp_path: Path, program: tuple[str, ...], host: str
) -> None:
    if host == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    (tmp_path / "keys").write_text(named_key("sk-one", "app", "today").line)
    port = free_port()
    flags = ["--host", host, "--port", str(port), "--key-file", str(tmp_path / "keys")]
    command = [*program, "--run-dir", str(tmp_path / "run"), *flags]
    path = "/get_engine_status" if program is SERVER else "/fakevllm/stats"
    with Processes(tmp_path) as processes:
        process = processes.adopt(Process("outside", command, port, tmp_path / "cwd"))
        process.url = f"http://127.0.0.1:{port}" if host == "0.0.0.0" else f"http://[::1]:{port}"
        wait_until_listening(process)
        assert f"listening on {http_url(host, port)}" in process.log
        assert httpx.get(process.url + path).status_code == 401
        assert httpx.get(process.url + path, auth=("app", "sk-one")).status_code == 200


def wait_until_listening(process: Process) -> None:
    """Wait until the process listens: a proxy without a server is never healthy."""

    def listens() -> bool:
        assert process.returncode is None, process.log
        try:
            httpx.get(f"{process.url}/health", timeout=5)
        except httpx.TransportError:
            return False
        return True

    wait_until(listens, 30)


def test_by_default_both_programs_listen_only_on_the_loopback_address(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server)
    hosts = {
        address for process in (server, proxy) for address in listening_addresses(process.port)
    }
    assert hosts == {"0100007F"}


def listening_addresses(port: int) -> list[str]:
    """Return the addresses that the port is bound to, in hexadecimal as in /proc/net."""
    addresses: list[str] = []
    for table in ("tcp", "tcp6"):
        file = Path(f"/proc/net/{table}")
        if not file.exists():
            pytest.skip("needs Linux's /proc/net")
        for line in file.read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, hex_port = local.split(":")
            if state == "0A" and int(hex_port, 16) == port:
                addresses.append(address)
    return addresses
