"""The console's pages Releases, Evaluations and Configuration, with a real proxy and server."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.console_process import start_console
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.release_stack import Talk, history, write_held_out
from tests.e2e.stack import VALID, post
from tests.e2e.test_commands import PROXY, run
from tests.e2e.test_console import logged_in

CONFIG = """
[job]
batch_size = 1
lr = 0.5
save_freq = 1
"""
NUM_CLIENTS = 20


@dataclass(frozen=True, slots=True)
class Run:
    server: Process
    proxy: Process
    console: Process


@pytest.fixture
def trained(processes: Processes, tmp_path: Path) -> Iterator[Run]:
    """A run that has trained a few steps, each with a checkpoint."""
    config = tmp_path / "fakevllm.toml"
    config.write_text(CONFIG)
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES)
    server = processes.server("--backend", "fake")
    flags = ["--config", str(config), "--hooks", str(hooks), "--n", "3"]
    proxy = processes.proxy(server, *flags)
    talk = Talk(proxy)

    def is_trained() -> bool:
        talk.ask()
        status = httpx.get(f"{server.url}/get_engine_status", timeout=30).json()
        return status["weight_version"] >= 3

    wait_until(is_trained, 60.0, "version 3")
    yield Run(server, proxy, start_console(processes, proxy, "--swarm", server.url))


def decide(browser: httpx.Client, version: int, action: str) -> httpx.Response:
    """Confirm a decision on its page, as a browser does."""
    html = browser.get(f"/releases/decision?version={version}").text
    form = html.partition(f'action="/releases/{action}"')[2].partition("</form>")[0]
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))
    return browser.post(f"/releases/{action}", data=fields, follow_redirects=True)


def test_a_version_is_released_and_rolled_back_while_clients_ask(trained: Run) -> None:
    stopped = threading.Event()

    def ask(_: int) -> list[int]:
        statuses: list[int] = []
        while not stopped.is_set():
            statuses.append(post(trained.proxy, VALID).status_code)
        return statuses

    with logged_in(trained.console) as browser, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        assert "version 0, the model before any training" in browser.get("/releases").text
        shown = decide(browser, 2, "promote")
        assert "Version 2 is released (decision 1)." in shown.text
        asking = [pool.submit(ask, number) for number in range(NUM_CLIENTS)]
        try:
            shown = decide(browser, 2, "rollback")
        finally:
            stopped.set()
        assert "Training goes on from version 2 (decision 2)." in shown.text, shown.text
        assert "Version 2 is the released version." in shown.text
        refused = decide(browser, 999, "promote")
        assert refused.status_code == 409 and 'role="alert"' in refused.text
    statuses = [status for one in asking for status in one.result(30)]
    assert len(statuses) >= NUM_CLIENTS and set(statuses) == {200}
    assert [(one["decision"], one["version"]) for one in history(trained.server)] == [
        ("released", 2),
        ("rejected", 3),
    ]


def test_the_page_of_an_evaluation_has_the_figures_of_the_command(
    trained: Run, tmp_path: Path
) -> None:
    file = write_held_out(tmp_path)
    command = (*PROXY, "eval", "--dataset", str(file), "--url", trained.proxy.url)
    done = run(tmp_path, *command, "--version", "0", "--version", "2", "--json", "eval.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "eval.json").read_text())
    with logged_in(trained.console) as browser:
        listed = browser.get("/evaluations").text
        assert f'href="/evaluations/{report["eval_id"]}"' in listed
        shown = browser.get(f"/evaluations/{report['eval_id']}").text
    text = " ".join(re.sub(r"<[^>]+>", " ", shown).split())
    for version in report["versions"]:
        mean, low, high = (version[name] for name in ("mean", "low", "high"))
        figures = f"{mean:.3f} ({low:.3f} to {high:.3f}) {version['greedy']:.3f}"
        assert f"version {version['version']} {version['rows']} {figures}" in text
    second = report["versions"][1]["compared_with_first"]
    mean, low, high = (second[name] for name in ("mean", "low", "high"))
    counts = " ".join(str(second[name]) for name in ("wins", "losses", "ties"))
    assert f"{mean:+.3f} ({low:+.3f} to {high:+.3f}) {counts}" in text


def test_the_configuration_names_the_flag_the_file_and_the_defaults(trained: Run) -> None:
    with logged_in(trained.console) as browser:
        html = browser.get("/configuration?all=yes").text
    rows = [
        " ".join(re.sub(r"<[^>]+>", " ", row).split())
        for row in re.findall(r"<tr>.*?</tr>", html, re.DOTALL)
    ]
    for expected in (
        "num_repeat 3 command line",
        "lr 0.5 file",
        "batch_size 1 file",
        "temperature 1.0 default",
        "key not set default",
        "model fake",
    ):
        assert expected in rows, (expected, rows)
    assert "fakevllm.toml" in html and "The server trains with" not in html
