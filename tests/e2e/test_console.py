"""`fakevllm console` as a process, in front of a running proxy and server."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx

from fakevllm.console.access.first_link import POLL_EVERY_S
from fakevllm_adapters.http.http_url import http_url
from tests.e2e.console_process import login_url, start_console, start_console_of_run
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, free_port, wait_until
from tests.e2e.stack import VALID, Stack, post

STOPPED_WITHIN_S = 8.0
"""A graceful stop waits five seconds for open requests. An open page must not use them up."""


@contextmanager
def logged_in(console: Process) -> Generator[httpx.Client]:
    with httpx.Client(base_url=console.url, timeout=30) as browser:
        assert browser.get(login_url(console)).status_code == 200
        yield browser


def test_the_console_shows_a_request_and_the_status_of_proxy_and_server(
    stack: Stack, processes: Processes
) -> None:
    assert post(stack.three, VALID).status_code == 200
    wait_for_groups(stack.three, 1)
    console = start_console(processes, stack.three)
    with logged_in(console) as browser:
        now = browser.get("/").text
        assert "serves requests" in now or "trains, or loads" in now
        assert "Nothing is wrong" in now and "fan-out" in now
        group_id = rows(stack.three, "SELECT group_id FROM groups LIMIT 1")[0]["group_id"]
        assert f"/groups/{group_id}" in browser.get("/groups?text=Hello").text
        shown = browser.get(f"/groups/{group_id}").text
        assert shown.count("<article") == 3 and ">served</span>" in shown


def test_an_event_arrives_after_a_request_and_open_pages_do_not_delay_the_stop(
    stack: Stack, processes: Processes
) -> None:
    console = start_console(processes, stack.three)
    events: list[str] = []
    with logged_in(console) as browser:

        def listen() -> None:
            with browser.stream("GET", "/events") as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                events.extend(stream.iter_lines())

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()

        def arrived() -> bool:
            assert post(stack.three, VALID).status_code == 200
            return "event: ledger" in events

        with httpx.stream("GET", f"{console.url}/events") as refused:
            assert refused.status_code == 401
        # httpx yields whole lines only after the next chunk, so the first event may be late.
        wait_until(lambda: bool(events), 30.0, "the beginning of the stream")
        wait_until(arrived, 30.0, "an event")
        console.signal(signal.SIGTERM)
        wait_until(lambda: console.returncode is not None, STOPPED_WITHIN_S, "the end")
        assert console.returncode == 0
        listener.join(10.0)
        assert not listener.is_alive()
    assert "Traceback" not in console.log


def test_the_console_keeps_working_while_the_proxy_is_gone(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server)
    assert post(proxy, VALID).status_code == 200
    wait_for_groups(proxy, 1)
    console = start_console(processes, proxy)
    with logged_in(console) as browser:
        assert proxy.stop() == 0
        wait_until(
            lambda: "No fakevllm proxy answers" in browser.get("/").text, 20.0, "the sentence"
        )
        assert "Hello" in browser.get("/groups").text


def run_console(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fakevllm", "console", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_console_with_a_closed_output_has_its_address_and_its_links_in_the_log(
    tmp_path: Path,
) -> None:
    host = "::1" if socket.has_dualstack_ipv6() else "127.0.0.1"
    url = http_url(host, port := free_port())
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fakevllm", "console", "--host", host, "--port", str(port)]
    log = tmp_path / "log"
    with log.open("w") as errors:
        console = subprocess.Popen(command, cwd=tmp_path, stdout=writer, stderr=errors)
    os.close(writer)
    try:
        wait_until(lambda: "code=" in log.read_text(), 60.0, "the link for the login in the log")
        assert f"listening on {url}," in log.read_text()
        (link,) = re.findall(r"open (\S+code=\S+)", log.read_text())
        with httpx.Client(base_url=url, timeout=30) as browser:
            assert browser.get(link).status_code == 200
            login = browser.get("/login").text
            token = re.search(r'name="form_token" value="(\w+)"', login)
            assert token is not None
            reply = browser.post("/login/new-link", data={"form_token": token[1]})
            assert reply.status_code == 200
            wait_until(lambda: log.read_text().count("code=") == 2, 10.0, "a second link")
    finally:
        console.send_signal(signal.SIGINT)
        assert console.wait(30) == 0


def test_a_console_keeps_its_link_until_the_proxy_is_ready(processes: Processes) -> None:
    statuses = [503, 503]  # an engine that is ready at the third look

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0) if statuses else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            looks.append(self.path)

    looks: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Health) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        console = start_console_of_run(processes, processes.folder / "run", url)
        wait_until(lambda: len(looks) == 3, 30.0, "a look at the proxy that is ready")
        time.sleep(1.5 * POLL_EVERY_S)
        proxy.shutdown()
    assert looks == ["/health"] * 3
    assert console.stop() == 0


def test_mistakes_in_the_flags_get_one_line(tmp_path: Path) -> None:
    done = run_console(tmp_path, "--host", "0.0.0.0", "--port", str(free_port()))
    assert done.returncode == 2 and "--key-file" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    done = run_console(tmp_path, "--allow-host", "gpu-box:8010")
    assert done.returncode == 2 and "'gpu-box:8010' is not a host name" in done.stderr
    done = run_console(tmp_path, "--key-file", "absent")
    assert done.returncode == 2 and "no valid key" in done.stderr
    assert not any(tmp_path.iterdir())
